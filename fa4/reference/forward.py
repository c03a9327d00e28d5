"""FlashAttention-4 forward, tile by tile, in the kernel's order of operations.

For each block of tile_m * q_tiles query rows (both Q tiles of a CTA see the same KV tiles), KV
tiles in descending order: S = Q K^T, mask, one online-softmax step with conditional rescaling,
O += round(P) V; at the end O / l and the LSE. Low-precision inputs use float32 accumulation, the
exponentials of the configured MUFU/polynomial split, and P rounded to the input type in the
product but not in the sum.

Memory beyond the inputs and outputs: one score tile and one output tile per query head.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from fa4.config import ForwardConfig
from fa4.dtypes import dtype_name, round_to
from fa4.reference.counters import Counters
from fa4.reference.dropout import keep_scale
from fa4.reference.exp2 import count_emulated, exp2_split, fma_f32
from fa4.reference.online_softmax import (
    ExpUnit,
    Partial,
    RowState,
    SoftmaxRule,
    TileStep,
    add_sink,
    combine,
    exp2_native,
    finish,
    online_step,
)
from fa4.reference.parallel import map_tiles
from fa4.reference.sequences import Sequence, SequenceOutput, lse_dtype, output_dtype
from fa4.reference.spec import LOG2_E, Attention, modify_scores
from fa4.reference.tiles import Tile, TileMasks, cut

# Float operations per score element outside the matrix products: scale-subtract (2), maximum,
# exponential, sum. Per element of O: one multiplication per rescale and one at the end.
_FLOPS_PER_SCORE = 5


def split_exp_unit(config: ForwardConfig) -> ExpUnit:
    """2^(scores * scale + bias) as the kernel does it: one FMA, then MUFU or polynomial."""

    def compute(scores: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
        exponent = fma_f32(scores, scale, bias)
        return exp2_split(exponent, config.exp2, tile_n=config.tile_n)

    return compute


class _SequenceForward:
    """Everything that stays the same over the row blocks of one sequence."""

    def __init__(self, seq: Sequence, spec: Attention, config: ForwardConfig) -> None:
        self.seq, self.spec, self.config = seq, spec, config
        self.dtype = dtype_name(seq.q.dtype)
        config.check_dtype(self.dtype)
        self.work = lse_dtype(seq.q.dtype)
        self.masks = TileMasks(seq, spec)
        self.heads, self.group = seq.q.shape[0], seq.group
        self.scale = spec.head_scale(seq.batch, self.heads)
        # The maximum is kept in unscaled units, which needs a positive scale; else scale first.
        self.prescaled = spec.modifies_scores or bool((self.scale <= 0).any())
        kept = 1.0 - spec.dropout.probability
        self.output_scale = (spec.value_scale(seq.batch, self.heads) / kept).astype(self.work)

    @cached_property
    def rule(self) -> SoftmaxRule:
        scale = np.full((self.heads, 1), LOG2_E) if self.prescaled else self.scale[..., 0] * LOG2_E
        native = self.dtype in ("fp32", "fp64")
        return SoftmaxRule(
            scale_log2=scale.astype(self.work),
            threshold_log2=self.config.rescale_threshold_log2,
            offset_log2=self.config.p_offset_log2,
            rescale_rows=self.config.rescale_rows,
            exp_unit=exp2_native if native else split_exp_unit(self.config),
        )

    def grouped_matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """(Hq, m, x) @ (Hk, x, n) -> (Hq, m, n): the query heads of a KV head stacked as rows."""
        heads_k, (_, rows, inner) = right.shape[0], left.shape
        stacked = left.reshape(heads_k, self.group * rows, inner) @ right
        return stacked.reshape(self.heads, rows, right.shape[-1])

    def score_tile(self, q: np.ndarray, rows: Tile, cols: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Masked scores (Hq, m, n) and the V tile (Hk, n, dv), whose unseen keys are zero."""
        k = self.seq.k[:, cols.slice].astype(self.work)
        v = self.seq.v[:, cols.slice].astype(self.work)
        scores = self.grouped_matmul(q, k.transpose(0, 2, 1))
        if self.prescaled:
            scores *= self.scale.astype(self.work)
            scores = modify_scores(self.spec, scores, self.masks.region(rows, cols))
        keep = self.masks.visible(rows, cols)
        if keep is not None:
            scores = np.where(keep, scores, self.work.type(-np.inf))
            self.masks.hide_unseen(keep, v)
        return scores, v

    def work_tile(self, rows: Tile) -> tuple[Partial, Counters]:
        """O, LSE and the work done for one block of rows; several splits are combined."""
        counters, splits = Counters(), self.config.num_splits
        tiles = self.masks.kv_tiles(rows, self.config.tile_n)
        per_split = max(1, math.ceil(len(tiles) / splits))
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            parts = [
                self.row_block(rows, tiles[i * per_split : (i + 1) * per_split], i == 0, counters)
                for i in range(splits)
            ]
            whole = parts[0] if splits == 1 else combine(parts)
        self.count_block(rows, counters)
        return whole, counters

    def row_block(
        self, rows: Tile, tiles: list[Tile], with_sink: bool, counters: Counters
    ) -> Partial:
        """Normalised O and LSE of one block of rows over the given KV tiles."""
        state = RowState.empty((self.heads, rows.size), self.work)
        o = np.zeros((self.heads, rows.size, self.seq.v.shape[-1]), self.work)
        q = np.ascontiguousarray(self.seq.q[:, rows.slice], self.work)
        for cols in tiles:
            scores, v = self.score_tile(q, rows, cols)
            step = online_step(state, scores, self.rule)
            if step.alpha is not None:
                o *= step.alpha[..., None]
            o += self.grouped_matmul(self.product_operand(step.p, rows, cols), v)
            self.count_tile(step, rows, cols, counters)
        if with_sink and self.spec.sink is not None:
            o *= add_sink(state, self.spec.sink[:, None], self.rule)[..., None]
        factor, lse = finish(state, self.rule)
        o *= factor[..., None] * self.output_scale
        return Partial(o, lse)

    def product_operand(self, p: np.ndarray, rows: Tile, cols: Tile) -> np.ndarray:
        """P as the PV product sees it: dropped, rounded to the input type, in the work type.

        The factor 1/(1 - dropout probability) waits for the end: here it could push P beyond the
        range of a narrow type.
        """
        if self.spec.dropout.probability:
            region = self.masks.region(rows, cols)
            p = p * (keep_scale(self.spec.dropout, region) > 0)
        if self.dtype in ("fp32", "fp64"):
            return p
        return round_to(p, self.dtype, saturate=True).astype(self.work)

    def count_tile(self, step: TileStep, rows: Tile, cols: Tile, count: Counters) -> None:
        """Charge one (row block, KV tile) step."""
        heads_k = self.seq.k.shape[0]
        d, dv = self.seq.q.shape[-1], self.seq.v.shape[-1]
        pairs = self.heads * rows.size * cols.size
        count.exps += pairs
        if self.dtype not in ("fp32", "fp64"):
            emulated = count_emulated(self.config.exp2, self.config.tile_n, cols.size)
            count.emulated_exps += self.heads * rows.size * emulated
        count.rescales_done += step.rescales_done
        count.rescales_skipped += step.rescales_skipped
        count.matmul_flops += 2 * pairs * (d + dv)
        count.other_flops += _FLOPS_PER_SCORE * pairs + step.rescales_done * 32 * dv
        itemsize = self.seq.k.dtype.itemsize
        count.hbm_read_bytes += heads_k * cols.size * (d + dv) * itemsize

    def count_block(self, rows: Tile, count: Counters) -> None:
        """Charge one row block: Q in, O and LSE out; partial results in float32 when split."""
        splits, dv = self.config.num_splits, self.seq.v.shape[-1]
        elements = self.heads * rows.size
        count.hbm_read_bytes += splits * elements * self.seq.q.shape[-1] * self.seq.q.dtype.itemsize
        out_bytes = elements * (dv * output_dtype(self.seq.q.dtype).itemsize + 4)
        partial_bytes = splits * elements * (dv + 1) * 4 if splits > 1 else 0
        count.hbm_write_bytes += out_bytes + partial_bytes
        count.hbm_read_bytes += partial_bytes
        count.other_flops += elements * dv * splits


def forward_sequence(seq: Sequence, spec: Attention, config: ForwardConfig) -> SequenceOutput:
    """FA4 forward of one sequence: O in the output type, LSE, and counters.

    Raises ValueError if offset + tau exceed the element type's range.
    """
    run = _SequenceForward(seq, spec, config)
    heads, seqlen_q, dv = run.heads, seq.q.shape[1], seq.v.shape[-1]
    out = np.zeros((heads, seqlen_q, dv), output_dtype(seq.q.dtype))
    lse = np.full((heads, seqlen_q), -np.inf, run.work)
    blocks = cut(seqlen_q, config.tile_m * config.q_tiles)
    # User callables may not be safe to call from several threads.
    alone = spec.score_mod is not None or spec.mask_mod is not None
    elements = 0 if alone else heads * seqlen_q * seq.k.shape[1]
    counters = Counters()
    for rows, (part, count) in zip(blocks, map_tiles(run.work_tile, blocks, elements), strict=True):
        out[:, rows.slice] = _round_output(part.out, out.dtype)
        lse[:, rows.slice] = part.lse
        counters.add(count)
    return SequenceOutput(out, lse, counters)


def _round_output(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return values if values.dtype == dtype else round_to(values, dtype_name(dtype))
