"""FlashAttention-4 backward from the saved LSE, tile by tile.

Preprocess: D = rowsum(dO O) - dLSE, O with its residual if that was kept. Each CTA (or CTA pair)
owns one (two) KV tiles and walks the query tiles that see them; per tile five products:

    S = Q K^T,  P = 2^(c S - LSE log2 e),  dP = dO V^T,  dS = P (dP - D)
    dV += P^T dO,  dK += dS^T Q,  dQ += dS K        (dK, dQ times softmax_scale at the end)

P and dS are rounded to the input type in the products. dQ is accumulated in float32 across CTAs:
in a fixed order (deterministic) or in one drawn interleaving. In 2-CTA mode each CTA of a pair
sends half of its dS to the other, so that each reduces half of the dQ rows over both KV tiles and
the pair adds to global dQ once instead of twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa4.config import BackwardConfig
from fa4.dtypes import dtype_name, round_to
from fa4.reference.counters import Counters
from fa4.reference.dropout import keep_scale
from fa4.reference.exp2 import exp2_mufu, fma_f32
from fa4.reference.online_softmax import exp2_native
from fa4.reference.sequences import Sequence, SequenceGradients, Upstream, lse_dtype
from fa4.reference.spec import LOG2_E, Attention, modify_gradient, modify_scores
from fa4.reference.tiles import Tile, TileMasks, cut

# Float operations per score element outside the matrix products: scale-subtract (2), exponential,
# subtract D, multiply by P.
_FLOPS_PER_SCORE = 5


class _Step(NamedTuple):
    """One unit of work: the KV tiles of a CTA (pair) against one query tile."""

    kv: tuple[Tile, ...]
    rows: Tile


def exchange_ds(halves: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The 2-CTA exchange: from dS of each CTA's own keys (H, m, n_r) to, for each CTA, half of the
    rows against the keys of both: CTA r gets (H, m/2 rows of half r, n_0 + n_1)."""
    rows = halves[0].shape[1]
    middle = -(-rows // 2)
    both = [slice(0, middle), slice(middle, rows)]
    return [np.concatenate([ds[:, part] for ds in halves], axis=2) for part in both]


class _SequenceBackward:
    """Inputs, row statistics and float32 (float64) accumulators of one sequence."""

    def __init__(
        self, seq: Sequence, up: Upstream, spec: Attention, config: BackwardConfig
    ) -> None:
        self.dtype = dtype_name(seq.q.dtype)
        if self.dtype in ("e4m3", "e5m2"):
            raise ValueError(f"the backward pass takes fp64, fp32, bf16 or fp16; got {self.dtype}")
        self.seq, self.up, self.spec, self.config = seq, up, spec, config
        self.work = lse_dtype(seq.q.dtype)
        self.masks = TileMasks(seq, spec)
        self.group = seq.group
        self.counters = Counters()
        self.prescaled = spec.modifies_scores or spec.softmax_scale <= 0
        self.row_dot = self._preprocess()
        lse = up.lse.astype(self.work)
        self.lse_log2 = np.where(np.isneginf(lse), self.work.type(0), lse * self.work.type(LOG2_E))
        self.dq, self.dk, self.dv = (np.zeros(x.shape, self.work) for x in (seq.q, seq.k, seq.v))

    def _preprocess(self) -> np.ndarray:
        """D (Hq, Sq): rowsum(dO (O + residual)) minus the gradient that reached the LSE."""
        out = self.up.out.astype(self.work)
        if self.up.residual is not None:
            out = out + self.up.residual.astype(self.work)
        row_dot = np.einsum("hsd,hsd->hs", self.up.dout.astype(self.work), out)
        if self.up.dlse is not None:
            row_dot = row_dot - self.up.dlse.astype(self.work)
        size = self.up.out.size
        operands = 2 if self.up.residual is None else 3
        self.counters.hbm_read_bytes += operands * size * self.up.out.dtype.itemsize
        self.counters.hbm_write_bytes += row_dot.size * 4
        self.counters.other_flops += 2 * size
        return row_dot

    def stacked(self, x: np.ndarray) -> np.ndarray:
        """(Hq, m, x) -> (Hk, group * m, x): the query heads of a KV head as more rows."""
        heads, rows, width = x.shape
        return x.reshape(heads // self.group, self.group * rows, width)

    def unstacked(self, x: np.ndarray) -> np.ndarray:
        """Inverse of `stacked`."""
        heads_k, rows, width = x.shape
        return x.reshape(heads_k * self.group, rows // self.group, width)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """A product operand: rounded to the input type, kept in the work type."""
        return x if self.dtype in ("fp32", "fp64") else round_to(x, self.dtype).astype(self.work)

    def probabilities(self, scores: np.ndarray, rows: Tile) -> np.ndarray:
        """P (Hq, m, n) from masked scores, with one FMA and MUFU as the kernel does it."""
        scale = np.asarray(LOG2_E * (1.0 if self.prescaled else self.spec.softmax_scale), self.work)
        bias = -self.lse_log2[:, rows.slice, None]
        if self.dtype in ("fp32", "fp64"):
            return exp2_native(scores, scale, bias)
        return exp2_mufu(fma_f32(scores, scale, bias))

    def tile(self, rows: Tile, cols: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Add this tile's part to dV and dK; return rounded dS (Hq, m, n) and K (Hk, n, d)."""
        q, dout = (x[:, rows.slice].astype(self.work) for x in (self.seq.q, self.up.dout))
        k, v = (x[:, cols.slice].astype(self.work) for x in (self.seq.k, self.seq.v))
        keep = self.masks.visible(rows, cols)
        if keep is not None:
            self.masks.hide_unseen(keep, k, v)
        region = self.masks.region(rows, cols)
        scaled = scores = self.unstacked(self.stacked(q) @ k.transpose(0, 2, 1))
        if self.prescaled:
            scaled = scores * self.work.type(self.spec.softmax_scale)
            scores = modify_scores(self.spec, scaled, region).copy()
        if keep is not None:
            scores = np.where(keep, scores, self.work.type(-np.inf))
        p = self.probabilities(scores, rows)
        drop = keep_scale(self.spec.dropout, region).astype(self.work)
        dp = self.unstacked(self.stacked(dout) @ v.transpose(0, 2, 1)) * drop
        ds = p * (dp - self.row_dot[:, rows.slice, None])
        ds = self.rounded(modify_gradient(self.spec, ds, scaled, region))
        if keep is not None:
            ds = np.where(keep, ds, self.work.type(0))
        p = self.stacked(self.rounded(p * drop))
        self.dv[:, cols.slice] += p.transpose(0, 2, 1) @ self.stacked(dout)
        self.dk[:, cols.slice] += self.stacked(ds).transpose(0, 2, 1) @ self.stacked(q)
        return ds, k

    def run(self, step: _Step) -> None:
        """One CTA's (pair's) visit to one query tile."""
        rows = step.rows
        parts, keys = zip(*(self.tile(rows, cols) for cols in step.kv), strict=True)
        k = np.concatenate(keys, axis=1)
        owned = exchange_ds(parts) if self.config.cta_group == 2 else list(parts)
        dq = [self.unstacked(self.stacked(ds) @ k) for ds in owned]
        self.dq[:, rows.slice] += np.concatenate(dq, axis=1) if len(dq) > 1 else dq[0]
        self._count(step)

    def _count(self, step: _Step) -> None:
        count, rows = self.counters, step.rows.size
        heads, d, dv = self.dq.shape[0], self.dq.shape[2], self.dv.shape[2]
        pairs = heads * rows * sum(cols.size for cols in step.kv)
        count.exps += pairs
        count.matmul_flops += 2 * pairs * (3 * d + 2 * dv)
        count.other_flops += _FLOPS_PER_SCORE * pairs
        itemsize = self.seq.q.dtype.itemsize
        count.hbm_read_bytes += heads * rows * ((d + dv) * itemsize + 8) * len(step.kv)
        count.hbm_write_bytes += heads * rows * d * 4

    def steps(self) -> list[_Step]:
        """All work in the order in which it reaches dQ."""
        tiles = cut(self.seq.k.shape[1], self.config.tile_n)
        pairs = [tuple(tiles[i : i + self.config.cta_group])
                 for i in range(0, len(tiles), self.config.cta_group)]  # fmt: skip
        ctas = [[_Step(kv, rows) for rows in self._rows_of(kv)] for kv in pairs]
        if self.config.dq_order == "descending":
            ctas.reverse()
        if self.config.dq_order != "random":
            return [step for cta in ctas for step in cta]
        rng = np.random.default_rng(self.config.seed)
        turns = rng.permutation(np.repeat(np.arange(len(ctas)), [len(cta) for cta in ctas]))
        queues = [iter(cta) for cta in ctas]
        return [next(queues[turn]) for turn in turns]

    def _rows_of(self, kv: tuple[Tile, ...]) -> list[Tile]:
        """Query tiles that see any of a CTA pair's KV tiles, ascending."""
        found = {rows for cols in kv for rows in self.masks.q_tiles(cols, self.config.tile_m)}
        return sorted(found)

    def sink_gradient(self) -> np.ndarray | None:
        """dsink (Hq,) = -sum over rows of exp(sink - LSE) D; the exponential is 1 if LSE = -inf."""
        if self.spec.sink is None:
            return None
        lse = self.up.lse.astype(self.work)
        sink = self.spec.sink.astype(self.work)[:, None]
        weight = np.where(np.isneginf(lse), self.work.type(1), np.exp(sink - lse))
        return -(weight * self.row_dot).sum(axis=-1)


def backward_sequence(
    seq: Sequence, up: Upstream, spec: Attention, config: BackwardConfig
) -> SequenceGradients:
    """FA4 backward of one sequence: gradients in the work type (float32 or float64).

    Raises ValueError for FP8 inputs, and for a score_mod without score_mod_bwd.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        run = _SequenceBackward(seq, up, spec, config)
        for step in run.steps():
            run.run(step)
        run.dq *= run.work.type(spec.softmax_scale)
        run.dk *= run.work.type(spec.softmax_scale)
        dsink = run.sink_gradient()
    itemsize = seq.q.dtype.itemsize
    run.counters.hbm_read_bytes += (seq.k.size + seq.v.size) * itemsize * run.group
    run.counters.hbm_read_bytes += run.dq.size * 4
    run.counters.hbm_write_bytes += (run.dq.size + run.dk.size + run.dv.size) * itemsize
    return SequenceGradients(run.dq, run.dk, run.dv, dsink, run.counters)
