"""The arithmetic of kernels whose scores come in pieces: what differs from `online_softmax`.

A turn gives each of `groups` warpgroups of a Q tile one piece of keys. They share a reference
maximum and O, and add up their own P: l is the sum of their sums, in another order.

- A late maximum: P of a turn is computed with the reference of the turn before, and the reference
  moves afterwards, as long as it rose by no more than `late_log2`; P is then at most 2^(late +
  offset), which must fit its type, its sum and O (`most_late_log2`). Where it rose by more, the
  turn falls back to its own maximum. With late_log2 = tau nothing is late: what was computed too
  early is computed again, and the results are those of `online_step`, bit for bit.
- Sums by products: a column of ones in V adds up P as the tensor core sees it, rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa4.config import DTYPE_MAX_LOG2, require, require_int
from fa4.dtypes import round_to
from fa4.reference.online_softmax import (
    Partial,
    RowState,
    SoftmaxRule,
    finish,
    row_maximum,
    zero_if_neg_inf,
)

FLOAT32_MAX_LOG2 = 127.0  # below the largest: a sum of rounded terms has room left


def most_late_log2(dtype: str, keys: int, offset_log2: float = 0.0) -> float:
    """How far a maximum may rise unnoticed: P fits its type, the sum over `keys` of P float32."""
    require_int("keys", keys, 1)
    room = min(DTYPE_MAX_LOG2[dtype], FLOAT32_MAX_LOG2 - math.log2(keys))
    return room - offset_log2


@dataclass(frozen=True, kw_only=True)
class PiecesRule:
    """softmax: scale, tau, offset, exponentials. late_log2: None for tau, no late maximum.

    rounded_sums: P is added up as products see it, rounded to `dtype`.
    """

    softmax: SoftmaxRule
    dtype: str = "bf16"
    groups: int = 1
    piece: int = 64
    late_log2: float | None = None
    rounded_sums: bool = False

    def __post_init__(self) -> None:
        """Check ranges; a late maximum below tau would fall back where nothing needs to."""
        require_int("groups", self.groups, 1, 2)
        require_int("piece", self.piece, 1)
        require(self.dtype in DTYPE_MAX_LOG2, f"dtype must be one of {list(DTYPE_MAX_LOG2)}",
                self.dtype)  # fmt: skip
        tau = self.softmax.threshold_log2
        require(self.late >= tau, f"late_log2 must be at least tau, {tau}", self.late)

    @property
    def late(self) -> float:
        """Rise up to which a turn keeps the reference of the one before."""
        return self.softmax.threshold_log2 if self.late_log2 is None else self.late_log2

    def check_keys(self, keys: int) -> None:
        """Raises ValueError if P or its sum over so many keys could overflow."""
        most = most_late_log2(self.dtype, keys, self.softmax.offset_log2)
        if self.late >= most:
            raise ValueError(
                f"late_log2 must be below {most:.3f} for {self.dtype} and {keys} keys; got "
                f"{self.late}"
            )


@dataclass
class PiecesState:
    """row_max (..., rows): the reference of the next turn; used: that of O and of the sums so far;
    row_sums (groups, ..., rows)."""

    row_max: np.ndarray
    used: np.ndarray
    row_sums: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, ...], groups: int, dtype: np.dtype) -> PiecesState:
        """Nothing seen."""
        none = np.full(shape, -np.inf, dtype)
        return cls(none, none.copy(), np.zeros((groups, *shape), dtype))

    @property
    def row_sum(self) -> np.ndarray:
        """l: the groups' sums, added up at the end."""
        total: np.ndarray = self.row_sums.sum(axis=0, dtype=self.row_sums.dtype)
        return total


class Turn(NamedTuple):
    """p (..., rows, keys) unrounded; alpha (..., rows) for O before P V is added; rows whose
    maximum was late, and that fell back."""

    p: np.ndarray
    alpha: np.ndarray
    late: int
    fell_back: int


def pieces_turn(state: PiecesState, scores: np.ndarray, rule: PiecesRule) -> Turn:
    """Fold a turn of masked scores (..., rows, groups x piece or less) into `state`."""
    softmax = rule.softmax
    top = np.fmax(state.row_max, row_maximum(scores))
    first = np.isneginf(state.row_max)
    safe_top, safe_old = zero_if_neg_inf(top), zero_if_neg_inf(state.row_max)
    rise = np.where(first, np.inf, (safe_top - safe_old) * softmax.scale_log2)
    keep = rise <= softmax.threshold_log2 if softmax.threshold_log2 > 0 else rise <= 0
    late = ~keep & (rise <= rule.late) & (rule.late > softmax.threshold_log2)
    reference = np.where(keep | late, state.row_max, top)
    fall = (state.used - zero_if_neg_inf(reference)) * softmax.scale_log2
    one = top.dtype.type(1)
    same = reference == state.used
    alpha = np.where(same, one, np.exp2(np.where(same, top.dtype.type(0), fall)))
    alpha = alpha.astype(top.dtype)
    bias = softmax.offset_log2 - zero_if_neg_inf(reference) * softmax.scale_log2
    p = softmax.exp_unit(scores.copy(), softmax.scale_log2[..., None], bias[..., None])
    added = round_to(p, rule.dtype, saturate=True).astype(p.dtype) if rule.rounded_sums else p
    for g in range(rule.groups):
        own = added[..., g * rule.piece : (g + 1) * rule.piece]
        state.row_sums[g] = state.row_sums[g] * alpha + own.sum(axis=-1)
    state.used, state.row_max = reference, np.where(keep, state.row_max, top)
    began = first & ~np.isneginf(top)
    fell_back = ~keep & ~late & ~began & ~first
    return Turn(p, alpha, int(np.count_nonzero(late)), int(np.count_nonzero(fell_back)))


def pieces_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rule: PiecesRule, keep: np.ndarray | None = None
) -> Partial:
    """O (rows, dv) and LSE (rows) of float32 q (rows, d), k (keys, d), v (keys, dv).

    keep (rows, keys): visible pairs. P enters P V rounded to the rule's type. Raises ValueError if
    the rule's late maximum could overflow.
    """
    rule.check_keys(max(1, len(k)))
    rows, width = len(q), rule.groups * rule.piece
    state = PiecesState.empty((rows,), rule.groups, np.dtype(np.float32))
    o = np.zeros((rows, v.shape[-1]), np.float32)
    scores = (q @ k.T).astype(np.float32)
    if keep is not None:
        scores = np.where(keep, scores, np.float32(-np.inf))
    for start in range(0, len(k), width):
        turn = pieces_turn(state, scores[:, start : start + width], rule)
        o *= turn.alpha[:, None]
        rounded = round_to(turn.p, rule.dtype, saturate=True).astype(np.float32)
        o += rounded @ v[start : start + width]
    factor, lse = finish(RowState(state.used, state.row_sum, True), rule.softmax)
    return Partial(o * factor[:, None], lse)
