"""Gradients of one score tile from the saved LSE: shared by every generation's backward pass.

    P = exp(S - LSE),  dP = Z o (dO V^T),  dS = P o (dP - D),  D = rowsum(dO o O) - dLSE
    dV += (Z o P)^T dO,  dQ += scale dS K,  dK += scale dS^T Q      Z: dropout factors, replayed

The generations differ in the order of the tiles and in what each tile reads and writes.
"""

from __future__ import annotations

import numpy as np

from fa4.reference.generations.common import SequenceTiles
from fa4.reference.sequences import Sequence, SequenceGradients, Upstream
from fa4.reference.spec import Attention, modify_gradient
from fa4.reference.tiles import Tile


class GradientTiles(SequenceTiles):
    """Accumulators dq (Hq, Sq, d), dk (Hk, Sk, d), dv (Hk, Sk, dv) in the work type."""

    def __init__(self, seq: Sequence, up: Upstream, spec: Attention) -> None:
        """Start from zero gradients; rows with LSE -inf get a finite LSE, as their P is 0."""
        super().__init__(seq, spec)
        self.up = up
        lse = up.lse.astype(self.work)
        self.lse = np.where(np.isneginf(lse), self.work.type(0), lse)
        self.dq, self.dk, self.dv_sum = (
            np.zeros(x.shape, self.work) for x in (seq.q, seq.k, seq.v)
        )

    def row_dot(self, rows: Tile) -> np.ndarray:
        """D of a row tile, (Hq, rows)."""
        dout, out = self.load(self.up.dout, rows), self.load(self.up.out, rows)
        return np.einsum("hsd,hsd->hs", dout, out) - self._dlse(rows)

    def _dlse(self, rows: Tile) -> np.ndarray:
        if self.up.dlse is None:
            return np.zeros((1, 1), self.work)
        return self.up.dlse[:, rows.slice].astype(self.work)

    def probabilities(self, masked: np.ndarray, rows: Tile) -> np.ndarray:
        """P = exp(S - LSE) of masked scores (Hq, rows, cols)."""
        return np.exp(masked - self.lse[:, rows.slice, None])

    def tile(self, rows: Tile, cols: Tile, row_dot: np.ndarray | None) -> None:
        """Add one tile's parts to dQ, dK and dV.

        row_dot (Hq, rows) is D; None takes D = rowsum(P o dP) - dLSE from this tile, which must
        then span all keys.
        """
        q, dout = self.load(self.seq.q, rows), self.load(self.up.dout, rows)
        scores = self.scores(rows, cols)
        k, v = (self.seen(x, cols, scores.keep) for x in (self.seq.k, self.seq.v))
        p = self.probabilities(scores.masked, rows)
        dropped = self.keep_scale(rows, cols)
        dp = self.as_stored(self.product(dout, v.transpose(0, 2, 1)) * dropped)
        if row_dot is None:
            row_dot = (p * dp).sum(axis=-1) - self._dlse(rows)
        ds = p * (dp - row_dot[..., None])
        region = self.masks.region(rows, cols)
        ds = self.rounded(modify_gradient(self.spec, ds, scores.scaled, region))
        if scores.keep is not None:
            ds = np.where(scores.keep, ds, self.work.type(0))
        p, ds = self.stacked(self.rounded(p * dropped)), self.stacked(ds)
        self.dv_sum[:, cols.slice] += p.transpose(0, 2, 1) @ self.stacked(dout)
        self.dk[:, cols.slice] += ds.transpose(0, 2, 1) @ self.stacked(q)
        self.dq[:, rows.slice] += self.unstacked(ds @ k)

    def finish(self) -> SequenceGradients:
        """Scale dQ and dK once, add dsink = -sum over rows of exp(sink - LSE) D."""
        self.dq *= self.scale
        self.dk *= self.scale
        dsink = None
        if self.spec.sink is not None:
            sink = self.spec.sink.astype(self.work)[:, None]
            empty = np.isneginf(self.up.lse)
            weight = np.where(empty, self.work.type(1), np.exp(sink - self.lse))
            dsink = -(weight * self.row_dot(Tile(0, self.seqlen_q))).sum(axis=-1)
        return SequenceGradients(self.dq, self.dk, self.dv_sum, dsink, self.counters)

    @property
    def backward_flops_per_pair(self) -> int:
        """Five products per pair, S recomputed: S, dP, dV, dQ, dK."""
        return 2 * (3 * self.d + 2 * self.dv)

    def charge_shared_heads(self) -> None:
        """Sum dK and dV over the query heads of a KV head: read each head's, write one."""
        if self.group > 1:
            per_head = self.seqlen_k * (self.d + self.dv) * self.itemsize
            self.charge(read=self.heads * per_head, write=self.heads_k * per_head)
