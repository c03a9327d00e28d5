"""FlashAttention-2 (Dao 2023, arXiv 2307.08691): Q in the outer loop, one division at the end.

Forward, Algorithm 1: each block of query rows is one work tile and keeps O, m and l on chip while
it walks the KV tiles; O stays un-normalised and is rescaled in every step, whether or not the
maximum moved; only LSE = m + log(l) is saved. Backward, Algorithm 2: each block of KV columns is
one work tile; dQ is read, added to and written back in HBM (atomic adds).

KV tiles are visited in the kernel's descending order, as in FA4, so that maxima rise alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa4.config import require_int
from fa4.reference.generations.common import SequenceTiles
from fa4.reference.generations.gradients import GradientTiles
from fa4.reference.online_softmax import (
    Partial,
    RowState,
    add_sink,
    exp2_native,
    finish,
    online_step,
)
from fa4.reference.sequences import Sequence, SequenceGradients, SequenceOutput, Upstream
from fa4.reference.spec import LOG2_E, Attention
from fa4.reference.tiles import Tile, cut

# The paper, section 3.3, chooses among {64, 128} x {64, 128} by head dim and shared memory. The
# smaller ones, which no kernel has, keep small SRAM and wide element types computable.
_TILES = ((128, 128), (128, 64), (64, 64), (32, 32), (16, 16))


@dataclass(frozen=True, kw_only=True)
class Flash2Config:
    """tile_m rows of a Q tile, tile_n rows of a KV tile."""

    tile_m: int = 128
    tile_n: int = 128

    def __post_init__(self) -> None:
        """Check ranges and types."""
        require_int("tile_m", self.tile_m, 1)
        require_int("tile_n", self.tile_n, 1)

    @classmethod
    def for_sram(cls, sram_bytes: int, head_dims: int, itemsize: int) -> Flash2Config:
        """The largest tiles whose Q, K and V fit; head_dims is the sum of both (d + dv)."""
        require_int("sram_bytes", sram_bytes, 1)
        for tile_m, tile_n in _TILES:
            needed = (tile_m + 2 * tile_n) * head_dims * itemsize // 2
            if needed <= sram_bytes:
                return cls(tile_m=tile_m, tile_n=tile_n)
        raise ValueError(f"sram_bytes must be at least {needed} for FA2's tiles; got {sram_bytes}")


class HeadBlock(NamedTuple):
    """What one CTA computes: a head and its query rows (forward) or keys (backward)."""

    head: int
    tile: Tile


def work_tiles(heads: int, seqlen_q: int, config: Flash2Config) -> list[HeadBlock]:
    """Forward work of one sequence: independent of each other, one per CTA.

    FA1 has one work tile per head; here long sequences fill the device as well (section 3.2).
    """
    return [HeadBlock(head, rows) for head in range(heads) for rows in cut(seqlen_q, config.tile_m)]


def backward_work_tiles(heads: int, seqlen_k: int, config: Flash2Config) -> list[HeadBlock]:
    """Backward work of one sequence: one CTA per head and block of KV columns."""
    return [HeadBlock(head, cols) for head in range(heads) for cols in cut(seqlen_k, config.tile_n)]


class Flash2Forward(SequenceTiles):
    """The forward pass of one sequence; row blocks are independent of each other."""

    def __init__(self, seq: Sequence, spec: Attention, config: Flash2Config) -> None:
        """Choose the exponential by element type."""
        super().__init__(seq, spec)
        self.config = config
        self.rule = self.softmax_rule()

    def row_block(self, rows: Tile) -> Partial:
        """Normalised O (Hq, rows, dv) and LSE (Hq, rows) of one block, all heads at once."""
        state = RowState.empty((self.heads, rows.size), self.work)
        o = np.zeros((self.heads, rows.size, self.dv), self.work)
        for cols in self.masks.kv_tiles(rows, self.config.tile_n):
            if state.started:
                self.count_rescale(rows)
            scores = self.scores(rows, cols)
            step = online_step(state, scores.masked, self.rule)
            if step.alpha is not None:  # the product with alpha = 1 changes nothing
                o *= step.alpha[..., None]
            o += self.weighted_values(step.p, rows, cols, scores.keep)
            self.count_tile(rows, cols)
        if self.spec.sink is not None:
            o *= add_sink(state, self.spec.sink[:, None], self.rule)[..., None]
        factor, lse = finish(state, self.rule)
        o *= factor[..., None]
        self.count_block(rows)
        return Partial(o, lse)

    def count_tile(self, rows: Tile, cols: Tile) -> None:
        """Charge one KV tile: each query head reads its own K and V."""
        self.count_pairs(rows, cols, 2 * (self.d + self.dv))
        self.charge(read=self.heads * cols.size * (self.d + self.dv) * self.itemsize)

    def count_block(self, rows: Tile) -> None:
        """Charge one row block: Q in, O and LSE out, the final division."""
        elements = self.heads * rows.size
        self.counters.other_flops += elements * self.dv
        out_bytes = elements * (self.dv * self.itemsize + self.work.itemsize)
        self.charge(read=elements * self.d * self.itemsize, write=out_bytes)

    def run(self) -> SequenceOutput:
        """All row blocks."""
        out, lse = self.empty_output()
        for rows in cut(self.seqlen_q, self.config.tile_m):
            part = self.row_block(rows)
            out[:, rows.slice] = self.round_output(part.out, out.dtype)
            lse[:, rows.slice] = part.lse
        return SequenceOutput(out, lse, self.counters)


class Flash2Backward(GradientTiles):
    """Column blocks in the outer loop; D is computed once, before it."""

    def probabilities(self, masked: np.ndarray, rows: Tile) -> np.ndarray:
        """P = 2^(log2(e) S - log2(e) LSE)."""
        bias = -(self.lse[:, rows.slice, None] * self.work.type(LOG2_E))
        exp_unit = self.softmax_rule().exp_unit
        scores = masked.copy() if exp_unit is exp2_native else masked
        return exp_unit(scores, np.asarray(LOG2_E, self.work), bias)

    def run(self, config: Flash2Config) -> SequenceGradients:
        """All column blocks, ascending: one order in which atomic adds may reach dQ."""
        everything = Tile(0, self.seqlen_q)
        row_dot = self.row_dot(everything)
        size, work = self.up.out.size, self.work.itemsize
        self.charge(read=2 * size * self.itemsize, write=row_dot.size * work)
        self.charge(write=self.dq.size * work)  # dQ = 0
        self.counters.other_flops += 2 * size
        for cols in cut(self.seqlen_k, config.tile_n):
            visited = self.masks.q_tiles(cols, config.tile_m)
            column_bytes = self.heads * cols.size * (self.d + self.dv) * self.itemsize
            self.charge(read=column_bytes if visited else 0, write=column_bytes)
            for rows in visited:
                self.tile(rows, cols, row_dot[:, rows.slice])
                self._count(rows, cols)
        self.charge_shared_heads()
        self.charge(read=self.dq.size * work, write=self.dq.size * self.itemsize)  # dQ rounded
        return self.finish()

    def _count(self, rows: Tile, cols: Tile) -> None:
        """Reads Q, dO, LSE, D; adds to dQ by a read and a write (Algorithm 2, line 15)."""
        self.count_pairs(rows, cols, self.backward_flops_per_pair)
        elements, work = self.heads * rows.size, self.work.itemsize
        dq = elements * self.d * work
        inputs = elements * ((self.d + self.dv) * self.itemsize + 2 * work)
        self.charge(read=inputs + dq, write=dq)


def forward_sequence(seq: Sequence, spec: Attention, config: Flash2Config) -> SequenceOutput:
    """FA2 forward of one sequence: O in the output type, LSE, and counters."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return Flash2Forward(seq, spec, config).run()


def backward_sequence(
    seq: Sequence, up: Upstream, spec: Attention, config: Flash2Config
) -> SequenceGradients:
    """FA2 gradients of one sequence in the work type (float32 or float64)."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return Flash2Backward(seq, up, spec).run(config)
