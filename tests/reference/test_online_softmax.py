"""The recurrence, its conditional rescaling rule, and the merge of partial results."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.reference.online_softmax import (
    Partial,
    RowState,
    SoftmaxRule,
    add_sink,
    combine,
    finish,
    merge,
    online_step,
)

ONE = np.ones(1)


def rule(**fields) -> SoftmaxRule:
    """A rule whose scores are already in log2 units (c = 1)."""
    return SoftmaxRule(**{"scale_log2": ONE, **fields})


def run(tiles, softmax_rule, rows=1):
    """Feed tiles (rows, n) through online_step; the state and each step."""
    state = RowState.empty((rows,), np.dtype(np.float64))
    return state, [online_step(state, np.array(t, np.float64), softmax_rule) for t in tiles]


@pytest.mark.parametrize(
    ("jump", "moves"), [(7.999, False), (8.0, False), (8.001, True), (50.0, True), (-3.0, False)]
)
def test_the_maximum_moves_only_above_the_threshold_and_equality_keeps(jump, moves) -> None:
    state, steps = run([[[0.0]], [[jump]]], rule())
    assert (state.row_max[0] == jump) == moves
    assert (steps[1].alpha is not None) == moves
    assert (steps[1].rescales_done, steps[1].rescales_skipped) == (int(moves), int(not moves))
    assert steps[1].p[0, 0] == pytest.approx(1.0 if moves else 2.0**jump)


def test_the_first_tile_sets_the_maximum_without_a_test() -> None:
    state, steps = run([[[-100.0]]], rule())
    assert state.row_max[0] == -100.0 and steps[0].alpha is None
    assert steps[0].rescales_done == steps[0].rescales_skipped == 0


@pytest.mark.parametrize("tau", [0.0, 8.0])
def test_rows_that_have_seen_nothing(tau) -> None:
    hidden, seen = [[-np.inf, -np.inf]], [[3.0, 1.0]]
    with np.errstate(invalid="raise"):
        state, steps = run([hidden, hidden, seen, hidden], rule(threshold_log2=tau))
    assert (steps[0].p == 0).all() and (steps[3].p == 0).all()
    assert steps[2].alpha is not None and steps[2].alpha[0] == 0.0
    assert state.row_max[0] == 3.0 and state.row_sum[0] == 1.25


def test_zero_threshold_rescales_whenever_the_maximum_rises() -> None:
    _, steps = run([[[0.0]], [[0.001]], [[0.0]]], rule(threshold_log2=0.0))
    assert [s.rescales_done for s in steps] == [0, 1, 0]


def test_the_threshold_is_in_scaled_units() -> None:
    state, _ = run([[[0.0]], [[100.0]]], rule(scale_log2=np.array([0.05])))
    assert state.row_max[0] == 0.0  # a rise of 5 log2 units
    state, _ = run([[[0.0]], [[100.0]]], rule(scale_log2=np.array([0.1])))
    assert state.row_max[0] == 100.0


def test_a_warp_decides_together_when_asked_to() -> None:
    first, second = np.zeros((64, 1)), np.zeros((64, 1))
    second[3], second[4] = 20.0, 1.0
    for rows, moved in ((1, [20.0, 0.0]), (32, [20.0, 1.0])):
        state, steps = run([first, second], rule(rescale_rows=rows), rows=64)
        assert state.row_max[3:5].tolist() == moved
        assert (steps[1].rescales_done, steps[1].rescales_skipped) == (1, 1)
        assert steps[1].alpha is not None and (steps[1].alpha[32:] == 1).all()


def test_nan_scores_do_not_reach_the_maximum() -> None:
    state, steps = run([[[np.nan, 2.0]]], rule())
    assert state.row_max[0] == 2.0 and np.isnan(steps[0].p[0, 0])


scores = st.floats(-60, 60).map(lambda x: round(x, 3)) | st.just(-math.inf)


@settings(max_examples=150)
@given(
    st.lists(st.lists(scores, min_size=3, max_size=3), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 8.0, 30.0]),
    st.sampled_from([0.0, 8.0]),
)
def test_any_tiling_and_threshold_gives_softmax(tiles, tau, offset) -> None:
    softmax_rule = rule(threshold_log2=tau, offset_log2=offset)
    state = RowState.empty((1,), np.dtype(np.float64))
    o = np.zeros((1, len(tiles) * 3))
    for index, tile in enumerate(tiles):
        step = online_step(state, np.array([tile]), softmax_rule)
        o = o if step.alpha is None else o * step.alpha[:, None]
        o[:, 3 * index : 3 * index + 3] = step.p
        assert (step.p <= 2.0 ** (tau + offset) * (1 + 1e-12)).all()
    factor, lse = finish(state, softmax_rule)
    flat = np.array(tiles).ravel()
    top = flat.max()
    if np.isneginf(top):
        assert np.isneginf(lse[0]) and (o == 0).all()
        return
    p = 2.0 ** (flat - top)
    np.testing.assert_allclose(o[0] * factor[0], p / p.sum(), rtol=1e-12, atol=1e-300)
    assert lse[0] == pytest.approx((top + np.log2(p.sum())) * math.log(2), abs=1e-11)


@settings(max_examples=60)
@given(st.lists(scores, min_size=1, max_size=6), st.floats(-200, 200) | st.just(-math.inf))
def test_the_sink_is_one_more_logit(values, sink) -> None:
    softmax_rule = rule()
    state, steps = run([[values]], softmax_rule)
    alpha = add_sink(state, np.array([sink]), softmax_rule)
    factor, lse = finish(state, softmax_rule)
    logits = np.array([*values, sink / math.log(2)])
    top = logits.max()
    if np.isneginf(top):
        assert np.isneginf(lse[0])
        return
    weights = 2.0 ** (logits - top)
    expected = (weights / weights.sum())[:-1]
    np.testing.assert_allclose((steps[0].p * alpha * factor)[0], expected, rtol=1e-11, atol=1e-300)
    assert lse[0] == pytest.approx((top + np.log2(weights.sum())) * math.log(2), abs=1e-11)


@st.composite
def partials(draw) -> Partial:
    """A partial result of three rows, some of which saw no key."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    lse = np.where(rng.random(3) < 0.3, -np.inf, rng.normal(0, 30, 3))
    out = np.where(np.isneginf(lse)[:, None], 0.0, rng.normal(size=(3, 4)))
    return Partial(out, lse)


def assert_same(a: Partial, b: Partial) -> None:
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-13, atol=1e-13)


@settings(max_examples=80)
@given(partials(), partials(), partials())
def test_merge_is_associative_and_commutative_with_an_identity(a, b, c) -> None:
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(merge(a, b), c), combine([a, b, c]))
    nothing = Partial(np.zeros((3, 4)), np.full(3, -np.inf))
    assert_same(merge(a, nothing), a)


def test_the_rule_refuses_what_it_cannot_track() -> None:
    with pytest.raises(ValueError, match="scale_log2 must be positive"):
        rule(scale_log2=np.array([0.0]))
    with pytest.raises(ValueError, match=r"threshold_log2 must be at least 0\.0; got -1"):
        rule(threshold_log2=-1.0)
