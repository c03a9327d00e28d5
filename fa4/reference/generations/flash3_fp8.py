"""FlashAttention-3 in FP8 (arXiv 2407.08608, section 3.3): block scales, incoherent processing.

Q, K and V become e4m3 with one scale per block of rows, amax / 448, instead of one per tensor. Q
and K are first multiplied by the same random orthogonal matrix, random signs times a Hadamard
matrix along the head dim: Q K^T stays what it was, while an outlier is spread over its whole row.
P is rounded to e4m3 as well; products accumulate in float32 (Hopper's narrower accumulation inside
an MMA is not modelled).

The paper has no FP8 backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.config import require, require_finite, require_int
from fa4.dtypes import largest_finite, round_to
from fa4.reference.generations.flash3 import Flash3Config, Flash3Forward
from fa4.reference.sequences import Sequence, SequenceOutput
from fa4.reference.spec import Attention
from fa4.reference.tiles import Tile

_E4M3_MAX = largest_finite("e4m3")


@dataclass(frozen=True, kw_only=True)
class Flash3Fp8Config(Flash3Config):
    """scales: "block" (Q per tile_m rows, K and V per tile_n) or "tensor" (one per head).

    incoherent: rotate Q and K by signs drawn from `seed` and a Hadamard matrix. p_offset_log2: P is
    multiplied by 2^offset, so that e4m3 does not flush its small values; 8 as in the released
    kernels (hopper/softmax.h, Max_offset), below log2(448) = 8.8.
    """

    scales: str = "block"
    incoherent: bool = True
    seed: int = 0
    p_offset_log2: float = 8.0

    def __post_init__(self) -> None:
        """Check ranges and types."""
        super().__post_init__()
        kinds = ("block", "tensor")
        require(self.scales in kinds, f"scales must be one of {kinds}", self.scales)
        require_int("seed", self.seed, 0)
        require_finite("p_offset_log2", self.p_offset_log2, 0.0)
        limit = float(np.log2(_E4M3_MAX))
        require(
            self.p_offset_log2 < limit,
            f"p_offset_log2 must be below log2(largest e4m3) = {limit:.3f}",
            self.p_offset_log2,
        )


def rotate(x: np.ndarray, seed: int) -> np.ndarray:
    """x (..., d) times D H / sqrt(d'): random signs D, Hadamard matrix H of order d'.

    d is padded with zeros to d', the next power of two. Orthogonal, so inner products of rows stay.
    The fast transform takes d' log2(d') additions.
    """
    order = 1 << (x.shape[-1] - 1).bit_length()
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=x.shape[-1])
    rotated = np.zeros((*x.shape[:-1], order), x.dtype)
    rotated[..., : x.shape[-1]] = x * signs.astype(x.dtype)
    half = 1
    while half < order:
        pairs = rotated.reshape(*x.shape[:-1], order // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        rotated = np.stack([low + high, low - high], axis=-2).reshape(*x.shape[:-1], order)
        half *= 2
    return rotated * x.dtype.type(order**-0.5)


@dataclass(frozen=True)
class QuantizedBlocks:
    """A heads-first tensor in e4m3: codes (H, S, D) and scales (H, blocks), value = code * scale.

    `block` is the number of rows that share a scale.
    """

    codes: np.ndarray
    scales: np.ndarray
    block: int

    @classmethod
    def quantize(cls, x: np.ndarray, block: int) -> QuantizedBlocks:
        """Scales amax / 448 per head and block of rows; 1 for a block of zeros."""
        heads, rows, _ = x.shape
        starts = np.arange(0, rows, block)
        amax = np.abs(x).max(axis=-1)
        top = np.maximum.reduceat(amax, starts, axis=-1) if rows else np.zeros((heads, 0), x.dtype)
        scales = np.where(top > 0, top / x.dtype.type(_E4M3_MAX), x.dtype.type(1))
        spread = np.repeat(scales, block, axis=-1)[:, :rows, None]
        return cls(round_to(x / spread, "e4m3", saturate=True), scales, block)

    def scale(self, tile: Tile) -> np.ndarray:
        """(H, 1, 1) scale of a tile that lies within one block."""
        assert tile.start // self.block == (tile.stop - 1) // self.block
        return self.scales[:, tile.start // self.block, None, None]


class Flash3Fp8Forward(Flash3Forward):
    """FA3 on quantised operands: products of codes, scales applied to each tile's result."""

    def __init__(self, seq: Sequence, spec: Attention, config: Flash3Fp8Config) -> None:
        """Rotate and quantise once; charge that pass."""
        if spec.dropout.probability:
            raise ValueError(
                "fa3-fp8 has no dropout: P / (1 - dropout_p) would leave the range of e4m3; got "
                f"dropout_p {spec.dropout.probability}"
            )
        super().__init__(seq, spec, config, offset_log2=config.p_offset_log2)
        self.p_dtype = "e4m3"
        self.kv_itemsize = 1
        block_m, block_n = config.tile_m, config.tile_n
        if config.scales == "tensor":
            block_m, block_n = max(self.seqlen_q, 1), max(self.seqlen_k, 1)
        q, k, v = (x.astype(self.work) for x in (seq.q, seq.k, seq.v))
        if config.incoherent:
            q, k = rotate(q, config.seed), rotate(k, config.seed)
            order = q.shape[-1]
            self.counters.other_flops += (q.size + k.size) * (order.bit_length() + 1)
        self.q8 = QuantizedBlocks.quantize(q, block_m)
        self.k8 = QuantizedBlocks.quantize(k, block_n)
        self.v8 = QuantizedBlocks.quantize(v, block_n)
        read = sum(x.size * x.dtype.itemsize for x in (seq.q, seq.k, seq.v))
        blocks = (self.q8, self.k8, self.v8)
        self.charge(read=read, write=sum(x.codes.size + 4 * x.scales.size for x in blocks))

    def raw_scores(self, rows: Tile, cols: Tile) -> np.ndarray:
        """Q K^T of one tile: the product of the codes times both scales."""
        q, k = self.load(self.q8.codes, rows), self.load(self.k8.codes, cols)
        k_scale = np.repeat(self.k8.scale(cols), self.group, axis=0)
        return self.product(q, k.transpose(0, 2, 1)) * (self.q8.scale(rows) * k_scale)

    def weighted_values(
        self, p: np.ndarray, rows: Tile, cols: Tile, keep: np.ndarray | None
    ) -> np.ndarray:
        """P V of one tile: e4m3 codes of both, times the scale of V.

        A kernel would fold the ratio of consecutive V scales into the rescale of O.
        """
        product = self.product(self.rounded(p, "e4m3"), self.seen(self.v8.codes, cols, keep))
        return product * np.repeat(self.v8.scale(cols), self.group, axis=0)


def forward_sequence(seq: Sequence, spec: Attention, config: Flash3Fp8Config) -> SequenceOutput:
    """FA3-FP8 forward of one sequence of 16-bit (or wider) inputs, quantised on the way.

    Raises ValueError for FP8 inputs and for dropout.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return Flash3Fp8Forward(seq, spec, config).run()
