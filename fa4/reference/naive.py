"""The oracle: attention by its definition, in float64, one full score matrix per sequence.

    S = score_mod(scale Q K^T)   masked with -inf
    LSE = log(sum_j exp(S_ij) + exp(sink))          natural logarithm
    P = exp(S - LSE),  O = dropout(P) V
    dV = dropout(P)^T dO,  dP = dropout(dO V^T),  dS = P * (dP - D),  D = rowsum(dO O) - dLSE
    dQ = scale dS' K,  dK = scale dS'^T Q           dS' = dS through score_mod's derivative
    dsink = -sum_i exp(sink - LSE_i) D_i

No tiles, no running maxima, no shared code with the tiled algorithms but the user's callbacks and
the dropout generator. A row without a visible key has O = 0 and LSE = -inf (= sink if given).
"""

from __future__ import annotations

import numpy as np

from fa4.reference.counters import Counters
from fa4.reference.dropout import keep_scale
from fa4.reference.sequences import (
    Sequence,
    SequenceGradients,
    SequenceOutput,
    Upstream,
)
from fa4.reference.spec import (
    BLOCK_FULL,
    BLOCK_SKIPPED,
    Attention,
    Region,
    SeqlenInfo,
    apply_mask_mod,
    block_states,
    modify_gradient,
    modify_scores,
)


def visible_pairs(spec: Attention, region: Region) -> np.ndarray:
    """(Hq, Sq, Sk) bool: may query i of head h see key j?

    Bottom-right aligned: i + Sk - Sq - left <= j <= i + Sk - Sq + right.
    """
    i, j = region.rows[:, None], region.cols[None, :]
    diagonal = i + region.info.seqlen_k - region.info.seqlen_q
    left, right = spec.window
    keep = np.ones((len(region.heads), len(region.rows), len(region.cols)), bool)
    if left is not None:
        keep &= j >= diagonal - left
    if right is not None:
        keep &= j <= diagonal + right
    chosen = keep if spec.mask_mod is None else apply_mask_mod(spec, region)
    if spec.block_sparse is None:
        return keep & chosen
    block_m, block_n = spec.block_sparse.block_size
    states = block_states(spec.block_sparse, region.batch, len(region.heads))
    state = states[:, i // block_m, j // block_n]
    return keep & (state != BLOCK_SKIPPED) & (chosen | (state == BLOCK_FULL))


def whole_region(seq: Sequence) -> Region:
    """The full score matrix of a sequence."""
    heads, seqlen_q, seqlen_k = seq.q.shape[0], seq.q.shape[1], seq.k.shape[1]
    every_head, rows, keys = (np.arange(n) for n in (heads, seqlen_q, seqlen_k))
    return Region(seq.batch, every_head, rows, keys, SeqlenInfo(seqlen_q, seqlen_k))


def expand_heads(x: np.ndarray, group: int) -> np.ndarray:
    """Repeat KV heads so that they match the query heads: (Hk, S, D) -> (Hq, S, D) float64."""
    return np.repeat(x.astype(np.float64), group, axis=0)


class _Probabilities:
    """Scores, LSE and probabilities of one sequence, float64 (Hq, Sq, Sk)."""

    def __init__(self, seq: Sequence, spec: Attention) -> None:
        self.region = whole_region(seq)
        self.q = seq.q.astype(np.float64)
        self.k = expand_heads(seq.k, seq.group)
        self.v = expand_heads(seq.v, seq.group)
        self.scale = spec.head_scale(seq.batch, self.q.shape[0])
        self.visible = visible_pairs(spec, self.region)
        self.scaled = self.scale * (self.q @ self.k.transpose(0, 2, 1))
        scores = np.where(self.visible, modify_scores(spec, self.scaled, self.region), -np.inf)
        top = scores.max(axis=-1, initial=-np.inf)
        if spec.sink is not None:
            sink = spec.sink.astype(np.float64)[:, None]
            top = np.maximum(top, sink)
        finite_top = np.where(np.isneginf(top), 0.0, top)
        total = np.exp(scores - finite_top[..., None]).sum(axis=-1)
        if spec.sink is not None:
            total = total + np.exp(sink - finite_top)
        with np.errstate(divide="ignore"):
            self.lse = np.where(total > 0, np.log(total) + finite_top, -np.inf)
            self.lse = np.where(np.isnan(total), np.nan, self.lse)
        finite_lse = np.where(np.isneginf(self.lse), 0.0, self.lse)
        self.p = np.exp(scores - finite_lse[..., None])
        self.keep_scale = keep_scale(spec.dropout, self.region)


def _weigh(weights: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """weights @ values over visible pairs only: an inf or NaN that nobody sees is no 0 * inf.

    weights, visible (H, Sq, Sk); values (H, Sk, D); result (H, Sq, D).
    """
    finite = np.isfinite(values).all(axis=-1)
    total = weights @ np.where(finite[..., None], values, 0.0)
    for head, key in np.argwhere(~finite):
        seen = visible[head, :, key, None]
        total[head] += np.where(seen, weights[head, :, key, None] * values[head, key], 0.0)
    return total


def forward_sequence(seq: Sequence, spec: Attention) -> SequenceOutput:
    """Oracle forward of one sequence: out and lse in float64; counters stay zero."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        prob = _Probabilities(seq, spec)
        out = _weigh(prob.p * prob.keep_scale, prob.v, prob.visible)
        out *= spec.value_scale(seq.batch, len(prob.q))
    return SequenceOutput(out, prob.lse, Counters())


def backward_sequence(seq: Sequence, up: Upstream, spec: Attention) -> SequenceGradients:
    """Oracle gradients of one sequence in float64; O and LSE are recomputed from the inputs.

    With descales, gradients are those with respect to the stored (quantised) values.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        prob = _Probabilities(seq, spec)
        dout = up.dout.astype(np.float64) * spec.value_scale(seq.batch, len(prob.q))
        dropped = prob.p * prob.keep_scale
        row_dot = (dout * _weigh(dropped, prob.v, prob.visible)).sum(axis=-1)
        if up.dlse is not None:
            row_dot = row_dot - up.dlse.astype(np.float64)
        dp = (dout @ prob.v.transpose(0, 2, 1)) * prob.keep_scale
        ds = np.where(prob.visible, prob.p * (dp - row_dot[..., None]), 0.0)
        ds = prob.scale * modify_gradient(spec, ds, prob.scaled, prob.region)
        ds = np.where(prob.visible, ds, 0.0)
        dq = _weigh(ds, prob.k, prob.visible)
        seen_by = prob.visible.transpose(0, 2, 1)
        dk = sum_groups(_weigh(ds.transpose(0, 2, 1), prob.q, seen_by), seq.group)
        dv = sum_groups(_weigh(dropped.transpose(0, 2, 1), dout, seen_by), seq.group)
        dsink = None
        if spec.sink is not None:
            sink = spec.sink.astype(np.float64)[:, None]
            weight = np.where(np.isneginf(prob.lse), 1.0, np.exp(sink - prob.lse))
            dsink = -(weight * row_dot).sum(axis=-1)
    return SequenceGradients(dq, dk, dv, dsink, Counters())


def sum_groups(x: np.ndarray, group: int) -> np.ndarray:
    """Add the gradients of the query heads that share a KV head: (Hq, S, D) -> (Hk, S, D)."""
    return x.reshape(x.shape[0] // group, group, *x.shape[1:]).sum(axis=1)
