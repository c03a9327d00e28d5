"""What every generation needs of one sequence: loaded tiles, masked scores, rounding, charges.

A generation is an order of loops over these tiles plus what it keeps between them. Scores are in
natural units here (scaled, capped, masked), so that any sign of the softmax scale works; kernels
that exponentiate in base 2 multiply by log2(e) inside the exponential.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa4.config import WARP_ROWS
from fa4.dtypes import dtype_name, numpy_dtype, round_to
from fa4.reference.counters import Counters
from fa4.reference.dropout import keep_scale
from fa4.reference.exp2 import exp2_mufu, fma_f32
from fa4.reference.online_softmax import SoftmaxRule, exp2_native
from fa4.reference.sequences import Sequence, lse_dtype, output_dtype
from fa4.reference.spec import LOG2_E, Attention, modify_scores
from fa4.reference.tiles import Tile, TileMasks

# Float operations per score element outside the matrix products, as fa4.reference.forward counts
# them: scale-subtract (2), maximum, exponential, sum.
FLOPS_PER_SCORE = 5

NATIVE = ("fp32", "fp64")  # computed and multiplied in their own type, by NumPy's exponential


class Scores(NamedTuple):
    """One tile of scores, (Hq, rows, cols) in natural units.

    `masked` holds -inf at hidden pairs; `scaled` is the input of softcap or score_mod, which the
    chain rule needs; `keep` is the mask, or None where every pair is visible.
    """

    masked: np.ndarray
    scaled: np.ndarray
    keep: np.ndarray | None


def mufu_unit(scores: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """2^(scores * scale + bias) in float32: one FMA, then the hardware's ex2."""
    return exp2_mufu(fma_f32(scores, scale, bias))


def warps_of(heads: int, rows: int) -> int:
    """Warps of 32 rows in a tile of `rows` rows for each of `heads` heads."""
    return heads * -(-rows // WARP_ROWS)


class SequenceTiles:
    """Tiles of one sequence under one `Attention`, and the counters of the kernel that reads them.

    Low-precision inputs are multiplied with float32 accumulation; `p_dtype` is the format of P in
    the product with V.
    """

    def __init__(self, seq: Sequence, spec: Attention) -> None:
        """Check what no generation before FA4 takes: FP8 inputs and their descales."""
        self.dtype = dtype_name(seq.q.dtype)
        if self.dtype in ("e4m3", "e5m2"):
            raise ValueError(
                "standard attention and FlashAttention 1 to 3 take fp64, fp32, fp16 or bf16 here "
                f"(fa3-fp8 quantises them itself), only fa4 takes FP8; got {self.dtype}"
            )
        if any(factor is not None for factor in spec.descale):
            raise ValueError(f"descales undo the quantisation of FP8 inputs; got {self.dtype}")
        self.seq, self.spec = seq, spec
        self.work = lse_dtype(seq.q.dtype)
        self.p_dtype = self.dtype
        self.masks = TileMasks(seq, spec)
        self.counters = Counters()
        self.heads, self.heads_k, self.group = seq.q.shape[0], seq.k.shape[0], seq.group
        self.seqlen_q, self.seqlen_k = seq.q.shape[1], seq.k.shape[1]
        self.d, self.dv = seq.q.shape[-1], seq.v.shape[-1]
        self.itemsize = seq.q.dtype.itemsize
        self.scale = self.work.type(spec.softmax_scale)

    def load(self, x: np.ndarray, tile: Tile) -> np.ndarray:
        """Rows of a heads-first tensor in the work type (a copy): (H, S, D) -> (H, size, D)."""
        return x[:, tile.slice].astype(self.work)

    def stacked(self, x: np.ndarray) -> np.ndarray:
        """(Hq, m, x) -> (Hk, group * m, x): the query heads of a KV head as more rows."""
        return x.reshape(self.heads_k, self.group * x.shape[1], x.shape[2])

    def unstacked(self, x: np.ndarray) -> np.ndarray:
        """Inverse of `stacked`."""
        return x.reshape(self.heads, x.shape[1] // self.group, x.shape[2])

    def product(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """(Hq, m, x) @ (Hk, x, n) -> (Hq, m, n)."""
        return self.unstacked(self.stacked(left) @ right)

    def raw_scores(self, rows: Tile, cols: Tile) -> np.ndarray:
        """Q K^T of one tile, unscaled."""
        q, k = self.load(self.seq.q, rows), self.load(self.seq.k, cols)
        return self.product(q, k.transpose(0, 2, 1))

    def as_stored(self, x: np.ndarray) -> np.ndarray:
        """Rounding of scores on their way through memory; none where they stay on chip."""
        return x

    def scores(self, rows: Tile, cols: Tile) -> Scores:
        """Scaled, modified and masked scores of one tile; `masked` may be overwritten."""
        raw = self.raw_scores(rows, cols)
        raw *= self.scale
        scaled = self.as_stored(raw)
        masked = modify_scores(self.spec, scaled, self.masks.region(rows, cols))
        if self.spec.modifies_scores and np.may_share_memory(masked, scaled):
            masked = masked.copy()  # a score_mod may return its argument
        keep = self.masks.visible(rows, cols)
        if keep is not None:
            masked = np.where(keep, masked, self.work.type(-np.inf))
        return Scores(masked, scaled, keep)

    def seen(self, x: np.ndarray, cols: Tile, keep: np.ndarray | None) -> np.ndarray:
        """K or V rows of a tile, with zeros for keys that no row of the tile sees."""
        loaded = self.load(x, cols)
        if keep is not None:
            loaded[:, ~keep.any(axis=(0, 1))] = 0
        return loaded

    def rounded(self, x: np.ndarray, dtype: str | None = None) -> np.ndarray:
        """A product operand: rounded to `dtype` (default: the input type), in the work type."""
        dtype = dtype or self.dtype
        if numpy_dtype(dtype).itemsize >= self.work.itemsize:
            return x
        return round_to(x, dtype, saturate=True).astype(self.work)

    def keep_scale(self, rows: Tile, cols: Tile) -> np.ndarray:
        """Dropout factors of one tile, the same in the forward and the backward pass."""
        return keep_scale(self.spec.dropout, self.masks.region(rows, cols)).astype(self.work)

    def weighted_values(
        self, p: np.ndarray, rows: Tile, cols: Tile, keep: np.ndarray | None
    ) -> np.ndarray:
        """dropout(P) V of one tile, (Hq, rows, dv), with P rounded to `p_dtype`."""
        if self.spec.dropout.probability:
            p = p * self.keep_scale(rows, cols)
        return self.product(self.rounded(p, self.p_dtype), self.seen(self.seq.v, cols, keep))

    def softmax_rule(self, offset_log2: float = 0.0) -> SoftmaxRule:
        """Online softmax in base 2 that rescales whenever the maximum rises (FA2 and FA3)."""
        return SoftmaxRule(
            scale_log2=np.full((1, 1), LOG2_E, self.work),
            threshold_log2=0.0,
            offset_log2=offset_log2,
            exp_unit=exp2_native if self.dtype in NATIVE else mufu_unit,
        )

    def empty_output(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) of rows that see no key: zeros in the output type, -inf."""
        out = np.zeros((self.heads, self.seqlen_q, self.dv), output_dtype(self.seq.q.dtype))
        return out, np.full((self.heads, self.seqlen_q), -np.inf, self.work)

    def round_output(self, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """O from the work type to the output type."""
        return values if values.dtype == dtype else round_to(values, dtype_name(dtype))

    def charge(self, *, read: int = 0, write: int = 0) -> None:
        """Add HBM traffic in bytes."""
        self.counters.hbm_read_bytes += read
        self.counters.hbm_write_bytes += write

    def count_pairs(self, rows: Tile, cols: Tile, flops_per_pair: int) -> None:
        """Charge the arithmetic of one tile: matrix products, exponentials and the rest."""
        pairs = self.heads * rows.size * cols.size
        self.counters.exps += pairs
        self.counters.matmul_flops += flops_per_pair * pairs
        self.counters.other_flops += FLOPS_PER_SCORE * pairs

    def count_rescale(self, rows: Tile) -> None:
        """Charge one unconditional rescale of O, (Hq, rows, dv)."""
        self.counters.rescales_done += warps_of(self.heads, rows.size)
        self.counters.other_flops += self.heads * rows.size * self.dv
