"""Standard attention: S and P pass through HBM.

Algorithm 0 of FlashAttention (Dao et al. 2022, arXiv 2205.14135, section 2.2):
    1. read Q, K; S = scale Q K^T; write S        2. read S; P = softmax(S); write P
    3. read P, V; O = P V; write O
Backward, Algorithm 3 (appendix B): P is read back from HBM, dP and dS are written and re-read.

Traffic and memory are quadratic in the sequence length. Masks and dropout are applied in step 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.dtypes import numpy_dtype
from fa4.reference.generations.common import FLOPS_PER_SCORE, SequenceTiles
from fa4.reference.generations.gradients import GradientTiles
from fa4.reference.online_softmax import row_maximum, zero_if_neg_inf
from fa4.reference.sequences import Sequence, SequenceGradients, SequenceOutput, Upstream
from fa4.reference.spec import Attention
from fa4.reference.tiles import Tile


@dataclass(frozen=True, kw_only=True)
class StandardConfig:
    """stored_dtype: format of S, P, dP and dS in HBM; None is that of the inputs."""

    stored_dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        if self.stored_dtype is not None:
            numpy_dtype(self.stored_dtype)


class _StandardForward(SequenceTiles):
    """The whole score matrix as one tile, rounded where it passes through HBM."""

    def __init__(self, seq: Sequence, spec: Attention, config: StandardConfig) -> None:
        super().__init__(seq, spec)
        self.stored_dtype = config.stored_dtype or self.dtype

    def as_stored(self, x: np.ndarray) -> np.ndarray:
        return self.rounded(x, self.stored_dtype)

    def run(self) -> SequenceOutput:
        if self.seqlen_q == 0:
            return SequenceOutput(*self.empty_output(), self.counters)
        rows, cols = Tile(0, self.seqlen_q), Tile(0, self.seqlen_k)
        scores = self.scores(rows, cols)
        top = row_maximum(scores.masked)
        sink = None if self.spec.sink is None else self.spec.sink.astype(self.work)[:, None]
        if sink is not None:
            top = np.maximum(top, sink)
        safe = zero_if_neg_inf(top)
        p = np.exp(scores.masked - safe[..., None])
        total = p.sum(axis=-1) + (0 if sink is None else np.exp(sink - safe))
        p /= np.where(total > 0, total, 1)[..., None]
        out, lse = self.empty_output()
        values = self.weighted_values(self.as_stored(p), rows, cols, scores.keep)
        out[:] = self.round_output(values, out.dtype)
        with np.errstate(divide="ignore"):
            lse[:] = np.where(total > 0, np.log(total) + safe, -np.inf)
        self._count(rows, cols)
        return SequenceOutput(out, lse, self.counters)

    def _count(self, rows: Tile, cols: Tile) -> None:
        """Each query head reads its own K and V."""
        heads, item = self.heads, self.itemsize
        matrix = heads * rows.size * cols.size * numpy_dtype(self.stored_dtype).itemsize
        self.count_pairs(rows, cols, 2 * (self.d + self.dv))
        self.charge(read=heads * (rows.size + cols.size) * self.d * item, write=matrix)
        self.charge(read=matrix, write=matrix + heads * rows.size * self.work.itemsize)
        self.charge(read=matrix + heads * cols.size * self.dv * item)
        self.charge(write=heads * rows.size * self.dv * item)


class _StandardBackward(GradientTiles):
    """Algorithm 3. P is recomputed from the LSE here; the charges are those of reading it."""

    def __init__(
        self, seq: Sequence, up: Upstream, spec: Attention, config: StandardConfig
    ) -> None:
        super().__init__(seq, up, spec)
        self.stored_dtype = config.stored_dtype or self.dtype

    def as_stored(self, x: np.ndarray) -> np.ndarray:
        return self.rounded(x, self.stored_dtype)

    def probabilities(self, masked: np.ndarray, rows: Tile) -> np.ndarray:
        return self.as_stored(super().probabilities(masked, rows))

    def run(self) -> SequenceGradients:
        if self.seqlen_q == 0:
            return self.finish()
        rows, cols = Tile(0, self.seqlen_q), Tile(0, self.seqlen_k)
        self.tile(rows, cols, row_dot=None)
        pairs = self.heads * rows.size * cols.size
        matrix = pairs * numpy_dtype(self.stored_dtype).itemsize
        q, dout = (self.heads * rows.size * width * self.itemsize for width in (self.d, self.dv))
        k, v = (self.heads * cols.size * width * self.itemsize for width in (self.d, self.dv))
        self.counters.matmul_flops += 4 * pairs * (self.d + self.dv)
        self.counters.other_flops += FLOPS_PER_SCORE * pairs
        self.charge(read=matrix + dout, write=v)  # dV = P^T dO
        self.charge(read=dout + v, write=matrix)  # dP = dO V^T
        self.charge(read=2 * matrix, write=matrix)  # dS = P o (dP - rowsum(P o dP))
        self.charge(read=matrix + k, write=q)  # dQ = dS K
        self.charge(read=matrix + q, write=k)  # dK = dS^T Q
        self.charge_shared_heads()
        return self.finish()


def forward_sequence(seq: Sequence, spec: Attention, config: StandardConfig) -> SequenceOutput:
    """Standard attention of one sequence: O in the output type, LSE, and counters."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _StandardForward(seq, spec, config).run()


def backward_sequence(
    seq: Sequence, up: Upstream, spec: Attention, config: StandardConfig
) -> SequenceGradients:
    """Standard gradients of one sequence in the work type (float32 or float64)."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _StandardBackward(seq, up, spec, config).run()
