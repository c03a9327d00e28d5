"""FlashAttention (Dao et al. 2022, arXiv 2205.14135): tiles sized by SRAM, K/V in the outer loop.

Algorithms 1 and 2 (forward with mask and dropout), 4 (backward), 5 (block-sparse). For each K/V
block j and each Q block i, with O_i, m_i, l_i read from HBM and written back:

    m~ = rowmax(S_ij),  P~ = exp(S_ij - m~),  l~ = rowsum(P~),  m' = max(m_i, m~)
    l' = e^(m_i - m') l_i + e^(m~ - m') l~
    O_i = diag(l')^-1 (diag(l_i) e^(m_i - m') O_i + e^(m~ - m') dropout(P~) V_j)

so O is normalised after every block. HBM traffic is Theta(N^2 d^2 / M) for SRAM of M elements
(Theorem 2). A sink, which the paper lacks, is the start (m, l) = (sink, 1) instead of (-inf, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.config import require_int
from fa4.reference.generations.common import SequenceTiles
from fa4.reference.generations.gradients import GradientTiles
from fa4.reference.online_softmax import row_maximum, zero_if_neg_inf
from fa4.reference.sequences import Sequence, SequenceGradients, SequenceOutput, Upstream
from fa4.reference.spec import Attention
from fa4.reference.tiles import Tile, cut

A100_SRAM_BYTES = 192 * 1024  # on-chip SRAM per streaming multiprocessor: the paper, section 2.1

# Float operations per element of O and per row, each visit: two factors and one sum for O, the
# division by l'; two exponentials, maximum, two products and a sum for m and l.
_FLOPS_PER_OUTPUT = 4
_FLOPS_PER_ROW = 6


@dataclass(frozen=True, kw_only=True)
class Flash1Config:
    """sram_bytes: on-chip memory of one streaming multiprocessor."""

    sram_bytes: int = A100_SRAM_BYTES

    def __post_init__(self) -> None:
        """Check the type; whether it holds a block depends on the head dim."""
        require_int("sram_bytes", self.sram_bytes, 1)

    def block_sizes(self, head_dim: int, head_dim_v: int, itemsize: int) -> tuple[int, int]:
        """(B_r, B_c) = (min(ceil(M / 4d), d), ceil(M / 4d)), M = SRAM in elements of the inputs.

        4d elements are one row each of Q, K, V and O: 2 (d + dv) of them if the head dims differ.
        """
        row_elements = 2 * (head_dim + head_dim_v)
        elements = self.sram_bytes // itemsize
        if elements < row_elements:
            raise ValueError(
                f"sram_bytes must hold one row each of Q, K, V and O, {row_elements * itemsize} "
                f"bytes for head dims {head_dim} and {head_dim_v}; got {self.sram_bytes}"
            )
        columns = -(-elements // row_elements)
        return min(columns, head_dim), columns


class _Flash1Forward(SequenceTiles):
    """O (Hq, Sq, dv), m and l (Hq, Sq) in HBM, in the work type."""

    def __init__(self, seq: Sequence, spec: Attention, config: Flash1Config) -> None:
        super().__init__(seq, spec)
        self.block_m, self.block_n = config.block_sizes(self.d, self.dv, self.itemsize)
        self.o = np.zeros((self.heads, self.seqlen_q, self.dv), self.work)
        self.row_max = np.full((self.heads, self.seqlen_q), -np.inf, self.work)
        self.row_sum = np.zeros((self.heads, self.seqlen_q), self.work)
        if spec.sink is not None:
            self.row_max[:] = spec.sink[:, None]
            self.row_sum[:] = ~np.isneginf(self.row_max)
        self.started: set[int] = set()

    def run(self) -> SequenceOutput:
        work = self.work.itemsize
        self.charge(write=self.heads * self.seqlen_q * (self.dv + 2) * work)  # line 2: initialise
        for cols in cut(self.seqlen_k, self.block_n):
            visited = self.masks.q_tiles(cols, self.block_m)
            if visited:
                self.charge(read=self.heads * cols.size * (self.d + self.dv) * self.itemsize)
            for rows in visited:
                self.visit(rows, cols)
                self._count(rows, cols)
        out, lse = self.empty_output()
        out[:] = self.round_output(self.o, out.dtype)
        with np.errstate(divide="ignore"):
            seen = self.row_sum > 0
            lse[:] = np.where(seen, zero_if_neg_inf(self.row_max) + np.log(self.row_sum), -np.inf)
        return SequenceOutput(out, lse, self.counters)

    def visit(self, rows: Tile, cols: Tile) -> None:
        """Lines 9 to 13 of Algorithm 1 for one pair of blocks."""
        scores = self.scores(rows, cols)
        old_max, old_sum = self.row_max[:, rows.slice], self.row_sum[:, rows.slice]
        block_max = row_maximum(scores.masked)
        p = np.exp(scores.masked - zero_if_neg_inf(block_max)[..., None])
        new_max = np.fmax(old_max, block_max)
        safe = zero_if_neg_inf(new_max)
        old_factor, block_factor = np.exp(old_max - safe), np.exp(block_max - safe)
        kept = old_sum * old_factor
        new_sum = kept + block_factor * p.sum(axis=-1)
        divisor = np.where(new_sum > 0, new_sum, self.work.type(1))
        o = self.weighted_values(p, rows, cols, scores.keep)
        o *= block_factor[..., None]
        o += kept[..., None] * self.o[:, rows.slice]
        self.o[:, rows.slice] = o / divisor[..., None]
        self.row_max[:, rows.slice], self.row_sum[:, rows.slice] = new_max, new_sum

    def _count(self, rows: Tile, cols: Tile) -> None:
        if rows.start in self.started:
            self.count_rescale(rows)
        self.started.add(rows.start)
        self.count_pairs(rows, cols, 2 * (self.d + self.dv))
        elements = self.heads * rows.size
        self.counters.other_flops += elements * (_FLOPS_PER_OUTPUT * self.dv + _FLOPS_PER_ROW)
        state = elements * (self.dv + 2) * self.work.itemsize
        self.charge(read=elements * self.d * self.itemsize + state, write=state)


class _Flash1Backward(GradientTiles):
    """Algorithm 4: dK_j and dV_j stay on chip, dQ_i passes through HBM for each block pair."""

    def run(self, config: Flash1Config) -> SequenceGradients:
        block_m, block_n = config.block_sizes(self.d, self.dv, self.itemsize)
        self.charge(write=self.dq.size * self.work.itemsize)  # line 5: dQ = 0
        for cols in cut(self.seqlen_k, block_n):
            visited = self.masks.q_tiles(cols, block_m)
            column_bytes = self.heads * cols.size * (self.d + self.dv) * self.itemsize
            self.charge(read=column_bytes if visited else 0, write=column_bytes)
            for rows in visited:
                self.tile(rows, cols, self.row_dot(rows))  # D_i anew in each visit: line 19
                self._count(rows, cols)
        self.charge_shared_heads()
        return self.finish()

    def _count(self, rows: Tile, cols: Tile) -> None:
        """Reads Q, O, dO, dQ, l and m of the row block, writes dQ."""
        self.count_pairs(rows, cols, self.backward_flops_per_pair)
        elements = self.heads * rows.size
        self.counters.other_flops += 2 * elements * self.dv
        dq = elements * self.d * self.work.itemsize
        inputs = elements * (self.d + 2 * self.dv) * self.itemsize
        self.charge(read=inputs + dq + 2 * elements * self.work.itemsize, write=dq)


def forward_sequence(seq: Sequence, spec: Attention, config: Flash1Config) -> SequenceOutput:
    """FA1 forward of one sequence: O in the output type, LSE = m + log(l), and counters.

    Blocks that the mask or `block_sparse` hides entirely are skipped (Algorithm 5).
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _Flash1Forward(seq, spec, config).run()


def backward_sequence(
    seq: Sequence, up: Upstream, spec: Attention, config: Flash1Config
) -> SequenceGradients:
    """FA1 gradients of one sequence in the work type (float32 or float64).

    The paper saves m and l; here they arrive as LSE = m + log(l), with exp(S - m) / l the same as
    exp(S - LSE), and are charged as the two vectors they are.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _Flash1Backward(seq, up, spec).run(config)
