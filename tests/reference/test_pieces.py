"""The arithmetic of scores in pieces: late maxima and their bound, halves, sums by products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import DTYPE_MAX_LOG2
from fa4.dtypes import largest_finite, round_to, unit_roundoff
from fa4.reference.online_softmax import RowState, SoftmaxRule, online_step
from fa4.reference.pieces import (
    PiecesRule,
    PiecesState,
    most_late_log2,
    pieces_attention,
    pieces_turn,
)

ONE = np.ones(1, np.float32)
ROWS, PIECE = 4, 8

# Scores in powers of two, with jumps from nothing to far beyond any threshold.
levels = st.floats(-40, 40, width=32) | st.sampled_from([-math.inf, 0.0, 8.0, 60.0, 90.0])


@st.composite
def turns_of_scores(draw: st.DrawFn, groups: int = 1) -> list[np.ndarray]:
    """One to five turns of scores (rows, keys)."""
    count, width = draw(st.integers(1, 5)), groups * PIECE
    values = draw(st.lists(levels, min_size=count * ROWS * width, max_size=count * ROWS * width))
    return list(np.array(values, np.float32).reshape(count, ROWS, width))


def rule(groups: int = 1, tau: float = 8.0, **fields: Any) -> PiecesRule:
    """Scores in log2 units: scale 1."""
    softmax = SoftmaxRule(scale_log2=ONE, threshold_log2=tau)
    return PiecesRule(softmax=softmax, groups=groups, piece=PIECE, **fields)


def empty(groups: int = 1) -> PiecesState:
    """Of some rows."""
    return PiecesState.empty((ROWS,), groups, np.dtype(np.float32))


@settings(max_examples=150)
@given(turns_of_scores(), st.sampled_from([0.0, 2.0, 8.0]))
def test_without_a_late_maximum_it_is_the_online_softmax(
    tiles: list[np.ndarray], tau: float
) -> None:
    """A speculative maximum that is checked before P is used changes no bit of P, l, O's factor."""
    state, other = empty(), RowState.empty((ROWS,), np.dtype(np.float32))
    plain = SoftmaxRule(scale_log2=ONE, threshold_log2=tau)
    for scores in tiles:
        turn = pieces_turn(state, scores, rule(tau=tau))
        seen = other.started
        step = online_step(other, scores.copy(), plain)
        assert np.array_equal(turn.p, step.p)
        if seen:
            factor = np.ones(ROWS, np.float32) if step.alpha is None else step.alpha
            assert np.array_equal(turn.alpha, factor)
        assert np.array_equal(state.row_sum, other.row_sum)
        assert np.array_equal(state.row_max, other.row_max)
        assert turn.late == 0


@settings(max_examples=150)
@given(turns_of_scores(), st.floats(8.0, 14.0))
def test_a_late_maximum_is_bounded(tiles: list[np.ndarray], late: float) -> None:
    """P is at most 2^late, in fp16's range too; what rises further falls back."""
    state, given_rule = empty(), rule(late_log2=late, dtype="fp16")
    for scores in tiles:
        turn = pieces_turn(state, scores, given_rule)
        assert turn.p.max(initial=0.0) <= 2.0**late * (1 + 2**-20)
        assert np.isfinite(round_to(turn.p, "fp16")).all()
        assert np.isfinite(state.row_sums).all() and np.isfinite(turn.alpha).all()


@settings(max_examples=100)
@given(turns_of_scores(groups=2), st.sampled_from([None, 30.0, 100.0]))
def test_the_weights_are_the_softmax(tiles: list[np.ndarray], late: float | None) -> None:
    """Whatever was late: P, in the last reference, over l is softmax to float32's accuracy."""
    state, given_rule = empty(2), rule(2, late_log2=late)
    weights: list[np.ndarray] = []
    for scores in tiles:
        turn = pieces_turn(state, scores, given_rule)
        weights = [w * turn.alpha[:, None].astype(np.float64) for w in weights]
        weights.append(turn.p.astype(np.float64))
    got = np.concatenate(weights, axis=1)
    scores64 = np.concatenate(tiles, axis=1).astype(np.float64)
    top = scores64.max(axis=1)
    seen = np.isfinite(top)
    exact = np.exp2(scores64[seen] - top[seen, None])
    exact /= exact.sum(axis=1, keepdims=True)
    total = state.row_sum.astype(np.float64)
    assert (total[~seen] == 0).all()
    assert np.abs(got[seen] / total[seen, None] - exact).max(initial=0.0) < 1e-5


def test_a_rise_is_late_by_one_turn() -> None:
    """Up to the bound: the old reference now, the new one in the next turn; above: at once."""

    def turns(rises: list[float]) -> list[tuple[float, float, float]]:
        state, found = empty(), []
        for rise in rises:
            turn = pieces_turn(state, np.full((ROWS, 1), rise, np.float32), rule(late_log2=50.0))
            found.append((float(turn.p[0, 0]), float(turn.alpha[0]), float(state.used[0])))
        return found

    assert turns([0.0, 20.0, 20.0])[1:] == [(2.0**20, 1.0, 0.0), (1.0, 2.0**-20, 20.0)]
    assert turns([0.0, 51.0])[1:] == [(1.0, 2.0**-51, 51.0)]
    assert turns([0.0, 8.0, 8.0])[1:] == [(256.0, 1.0, 0.0)] * 2  # tau keeps it for good


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3", "e5m2"])
def test_the_bound_is_that_of_the_type_and_of_the_sum(dtype: str) -> None:
    """P at the bound is finite in its type, and so is the sum over all keys in float32."""
    for keys in (1, 128, 2**20):
        most = most_late_log2(dtype, keys)
        assert 2.0**most <= largest_finite(dtype) * (1 + 1e-6)
        assert keys * 2.0**most < np.finfo(np.float32).max
    assert most_late_log2("bf16", 2**20) == 107.0
    assert most_late_log2("fp16", 1, 4.0) == DTYPE_MAX_LOG2["fp16"] - 4.0


@settings(max_examples=100)
@given(turns_of_scores(groups=2))
def test_halves_change_the_order_of_sums_only(tiles: list[np.ndarray]) -> None:
    """The same P; the sum of the halves' sums is within the rounding of as many additions."""
    whole, halves = empty(), empty(2)
    one = PiecesRule(softmax=rule().softmax, piece=2 * PIECE)
    additions = 0
    for scores in tiles:
        a, b = pieces_turn(whole, scores, one), pieces_turn(halves, scores, rule(2))
        assert np.array_equal(a.p, b.p) and np.array_equal(a.alpha, b.alpha)
        additions += scores.shape[1] + 2
    bound = additions * 2.0**-24 * whole.row_sum.astype(np.float64) * 2
    assert (np.abs(whole.row_sum - halves.row_sum.astype(np.float64)) <= bound).all()


def test_halves_of_powers_of_two_are_exact() -> None:
    """Sums without rounding do not depend on their order."""
    scores = np.tile(np.arange(16, dtype=np.float32) % 4, (ROWS, 1))
    sums = []
    for groups in (1, 2):
        state = empty(groups)
        given_rule = PiecesRule(softmax=rule().softmax, groups=groups, piece=16 // groups)
        for _ in range(3):
            pieces_turn(state, scores, given_rule)
        sums.append(state.row_sum)
    assert np.array_equal(*sums)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["bf16", "fp16"]))
def test_rounded_sums_normalise_what_the_product_adds(seed: int, dtype: str) -> None:
    """The same value in all rows of V comes out to float32's rounding; unrounded sums miss it by
    up to the type's."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((n, 16)).astype(np.float32) for n in (ROWS, 200))
    v = np.ones((200, 1), np.float32)
    worst = {}
    for rounded in (False, True):
        given_rule = rule(2, dtype=dtype, rounded_sums=rounded)
        worst[rounded] = np.abs(pieces_attention(q, k, v, given_rule).out - 1).max()
    assert worst[True] <= 200 * 2.0**-23
    assert worst[False] <= unit_roundoff(dtype) * (1 + 1e-3) + 200 * 2.0**-23


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, 60.0]), st.booleans())
def test_attention_is_near_its_definition(
    seed: int, causal: bool, late: float | None, rounded: bool
) -> None:
    """O within P's rounding, LSE within that of its sum; rows that see nothing are empty."""
    rng = np.random.default_rng(seed)
    rows, keys = 9, 50
    q, k, v = (rng.standard_normal((n, 8)).astype(np.float32) for n in (rows, keys, keys))
    keep = np.tri(rows, keys, -1, dtype=bool) if causal else None
    given_rule = rule(2, late_log2=late, rounded_sums=rounded)
    out, lse = pieces_attention(4 * q, k, v, given_rule, keep)
    scores = (4 * q @ k.T).astype(np.float64)
    scores[~keep if keep is not None else np.zeros_like(scores, bool)] = -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.exp2(scores - np.where(np.isfinite(scores.max(1)), scores.max(1), 0)[:, None])
        exact = np.nan_to_num(p @ v / p.sum(1, keepdims=True))
        exact_lse = np.log(p.sum(1)) + scores.max(1) * math.log(2)
    assert np.abs(out - exact).max() <= 3 * unit_roundoff("bf16") * np.abs(v).max()
    seen = np.isfinite(exact_lse)
    assert np.abs(lse[seen] - exact_lse[seen]).max() <= 2 * unit_roundoff("bf16")
    assert np.isneginf(lse[~seen]).all() and (out[~seen] == 0).all()


def test_what_would_overflow_is_refused() -> None:
    """With the number that is allowed."""
    ones = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"late_log2 must be below 15\.999 for fp16 and 2 keys"):
        pieces_attention(ones, ones, ones, rule(dtype="fp16", late_log2=20.0))
    with pytest.raises(ValueError, match=r"late_log2 must be at least tau, 8\.0; got 4\.0"):
        rule(late_log2=4.0)
    with pytest.raises(ValueError, match="groups must be between 1 and 2; got 3"):
        rule(3)
    with pytest.raises(ValueError, match="dtype must be one of"):
        rule(dtype="int8")
