"""Online softmax in base 2 with conditional rescaling, one tile at a time, and its merge.

Per row the state is (m, l): a reference maximum in unscaled score units and the sum of
P = 2^(S c + off - m c) so far, with c = softmax_scale log2(e). For a new tile with maximum mc:

    a = (m - max(m, mc)) c                    how far the maximum rose, in powers of two (a <= 0)
    a >= -tau and tau > 0: keep m (now stale), alpha = 1     otherwise: m = max(m, mc), alpha = 2^a
    l = l alpha + sum(P),   O = O alpha + P V

A stale m stays exact: O and l carry the same factor. The first tile sets m without a test; a row
with m = -inf uses 0 in place of m, so that nothing becomes inf - inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa4.config import WARP_ROWS, require, require_finite
from fa4.reference.spec import LN_2

# Computes P in place or anew from scores (..., rows, n), scale and bias (broadcastable):
# 2^(scores * scale + bias).
ExpUnit = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def exp2_native(scores: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """2^(scores * scale + bias) by NumPy, in place; multiply and add round separately."""
    scores *= scale
    scores += bias
    return np.exp2(scores, out=scores)


@dataclass(frozen=True, kw_only=True)
class SoftmaxRule:
    """Constants of one row block: scale_log2 c (broadcastable to (..., rows)), tau, offset.

    threshold_log2 0 rescales whenever the maximum rises. rescale_rows 32 makes the 32 rows of a
    warp decide together: one row above the threshold moves the maximum of all of them.
    """

    scale_log2: np.ndarray
    threshold_log2: float = 8.0
    offset_log2: float = 0.0
    rescale_rows: int = 1
    exp_unit: ExpUnit = exp2_native

    def __post_init__(self) -> None:
        """Check that every scale is positive: the maximum is tracked in unscaled units."""
        require_finite("threshold_log2", self.threshold_log2, 0.0)
        require_finite("offset_log2", self.offset_log2, 0.0)
        require(bool(np.all(self.scale_log2 > 0)), "scale_log2 must be positive", self.scale_log2)


@dataclass
class RowState:
    """row_max m in unscaled units and row_sum l, each (..., rows); started after one tile."""

    row_max: np.ndarray
    row_sum: np.ndarray
    started: bool = False

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: np.dtype) -> RowState:
        """m = -inf, l = 0."""
        return cls(np.full(shape, -np.inf, dtype), np.zeros(shape, dtype))


class TileStep(NamedTuple):
    """p (..., rows, n) unrounded; alpha (..., rows) or None where no row of O changes."""

    p: np.ndarray
    alpha: np.ndarray | None
    rescales_done: int
    rescales_skipped: int


def row_maximum(scores: np.ndarray) -> np.ndarray:
    """Maximum over the last axis that drops NaN, as the hardware's max does; -inf if empty."""
    top = scores.max(axis=-1, initial=-np.inf)
    return np.fmax.reduce(scores, axis=-1, initial=-np.inf) if np.isnan(top).any() else top


def _any_in_warp(flags: np.ndarray) -> np.ndarray:
    """(..., rows) -> (..., warps): does any of the 32 rows of a warp have its flag set?"""
    starts = np.arange(0, flags.shape[-1], WARP_ROWS)
    return np.logical_or.reduceat(flags, starts, axis=-1)


def _spread_to_rows(warp_flags: np.ndarray, rows: int) -> np.ndarray:
    return np.repeat(warp_flags, WARP_ROWS, axis=-1)[..., :rows]


def zero_if_neg_inf(row_max: np.ndarray) -> np.ndarray:
    """The maximum that is safe to subtract: 0 for a row that has seen no key."""
    return np.where(np.isneginf(row_max), row_max.dtype.type(0), row_max)


def online_step(state: RowState, scores: np.ndarray, rule: SoftmaxRule) -> TileStep:
    """Fold one tile of masked scores (..., rows, n) into `state`; `scores` is overwritten by P.

    Rescales are counted per warp of 32 rows, as the correction warps decide: a warp touches O
    only if alpha < 1 in one of its rows.
    """
    top = np.fmax(state.row_max, row_maximum(scores))
    safe = zero_if_neg_inf(top)
    alpha, done, skipped = None, 0, 0
    if state.started:
        rise = (state.row_max - safe) * rule.scale_log2
        keep = rise >= -rule.threshold_log2 if rule.threshold_log2 > 0 else rise >= 0
        if rule.rescale_rows == WARP_ROWS and rule.threshold_log2 > 0:
            keep = ~_spread_to_rows(_any_in_warp(~keep), keep.shape[-1])
        top = np.where(keep, state.row_max, top)
        safe = zero_if_neg_inf(top)
        one = rise.dtype.type(1)
        factor = np.where(keep, one, np.exp2(np.where(keep, rise.dtype.type(0), rise)))
        warps = _any_in_warp(factor < one)
        done = int(np.count_nonzero(warps))
        skipped = warps.size - done
        alpha = factor if done else None
    bias = rule.offset_log2 - safe * rule.scale_log2
    p = rule.exp_unit(scores, rule.scale_log2[..., None], bias[..., None])
    if alpha is not None:
        state.row_sum *= alpha
    state.row_sum += p.sum(axis=-1)
    state.row_max = top
    state.started = True
    return TileStep(p, alpha, done, skipped)


def add_sink(state: RowState, sink: np.ndarray, rule: SoftmaxRule) -> np.ndarray:
    """Fold a virtual logit (natural units, broadcastable to rows) into (m, l), once at the end.

    Returns the factor (..., rows) that O needs: below 1 where the sink exceeds the reference
    maximum, which then becomes the sink so that 2^(sink - m c) cannot overflow.
    """
    log2_sink = np.broadcast_to(sink / LN_2, state.row_max.shape).astype(state.row_max.dtype)
    log2_max = state.row_max * rule.scale_log2
    rises = log2_sink > log2_max
    with np.errstate(invalid="ignore"):
        alpha = np.where(rises, np.exp2(log2_max - log2_sink), state.row_sum.dtype.type(1))
        share = np.where(rises, 0, log2_sink - log2_max) + rule.offset_log2
    share = np.where(np.isneginf(log2_sink), 0, np.exp2(share))
    state.row_max = np.where(rises, log2_sink / rule.scale_log2, state.row_max)
    state.row_sum = (state.row_sum * alpha + share).astype(state.row_sum.dtype)
    return alpha


def finish(state: RowState, rule: SoftmaxRule) -> tuple[np.ndarray, np.ndarray]:
    """(1/l, LSE): the last factor of O and LSE = ln 2 (m c + log2(l) - off), natural logarithm.

    A row with l = 0 or NaN gets factor 1 and LSE -inf.
    """
    bad = ~(state.row_sum > 0)
    total = np.where(bad, state.row_sum.dtype.type(1), state.row_sum)
    scaled_max = zero_if_neg_inf(state.row_max) * rule.scale_log2
    lse = (scaled_max + np.log2(total) - rule.offset_log2) * LN_2
    return 1 / total, np.where(bad, -np.inf, lse).astype(state.row_sum.dtype)


class Partial(NamedTuple):
    """Normalised partial attention over some of the keys: out (..., rows, dv), lse (..., rows)."""

    out: np.ndarray
    lse: np.ndarray


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys: associative and commutative.

    L = max(lse), w_i = exp(lse_i - L), out = sum(w_i out_i) / sum(w_i), lse = L + log(sum(w_i)).
    Parts with lse = -inf weigh nothing; two such parts give out 0, lse -inf.
    """
    return combine([first, second])


def combine(parts: list[Partial]) -> Partial:
    """`merge` over any number of parts at once (split-KV)."""
    lses = np.stack([part.lse for part in parts])
    top = zero_if_neg_inf(lses.max(axis=0))
    weights = np.exp(lses - top)
    total = weights.sum(axis=0)
    empty = ~(total > 0)
    safe_total = np.where(empty, total.dtype.type(1), total)
    out = sum(
        np.where(weight[..., None] > 0, weight[..., None] * part.out, 0)
        for weight, part in zip(weights, parts, strict=True)
    )
    lse = np.where(empty, -np.inf, top + np.log(safe_total)).astype(lses.dtype)
    return Partial((out / safe_total[..., None]).astype(parts[0].out.dtype), lse)
