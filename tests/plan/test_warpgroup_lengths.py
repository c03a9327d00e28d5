"""What the busiest SM has to do, beside a count pair by pair and a list that is worked off."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fa4.plan.warpgroup_lengths import MOST_ROUNDS, busiest, keys_of_blocks, keys_seen

SIDES = st.one_of(st.none(), st.integers(0, 200))
SIDES_OF_FEW = st.one_of(st.none(), st.integers(-90, 90))


@given(
    st.integers(1, 150), st.sampled_from([1, 4]), st.integers(1, 300), SIDES, SIDES,
    st.sampled_from([64, 128, 192]), st.sampled_from([16, 80, 112]),
)  # fmt: skip
def test_blocks_see_the_keys_of_their_rows(queries, share, keys, left, right, block, tile_n):
    """Whole KV tiles from the first key that a row of the block sees to the last; one if none."""
    rows = queries * share
    found = keys_of_blocks(rows, block, tile_n, queries, keys, (left, right))
    assert len(found) == -(-rows // block)
    for number, length in enumerate(found):
        seen = set()
        for row in range(number * block, min((number + 1) * block, rows)):
            at = row // share + keys - queries
            first = 0 if left is None else max(at - left, 0)
            last = keys - 1 if right is None else min(at + right, keys - 1)
            seen |= {key // tile_n for key in range(first, last + 1)}
        assert length == max(len(seen), 1) * tile_n


@given(st.integers(1, 60), st.integers(0, 90), SIDES_OF_FEW, SIDES_OF_FEW)
def test_keys_that_some_query_sees(queries, keys, left, right):
    """As counted query by query."""
    assume(left is None or right is None or left + right >= 0)
    seen: set[int] = set()
    for query in range(queries):
        at = query + keys - queries
        first = 0 if left is None else max(at - left, 0)
        last = keys - 1 if right is None else min(at + right, keys - 1)
        seen |= set(range(first, last + 1))
    assert keys_seen(queries, keys, (left, right)) == len(seen)


def worked_off(lengths, copies, sms) -> float:
    """What the busiest SM has: longest first, each on the one that is free first."""
    loads = [0.0] * sms
    for length in sorted(list(lengths) * copies, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)


@example([5, 5, 5, 24], 5, 8)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 9), st.integers(1, 12))
def test_the_busiest_is_near_that_of_a_list_worked_off(lengths, copies, sms) -> None:
    """Both have the mean and at most the longest beyond it: in rounds, too, no two SMs are ever
    further apart, as the longest of a round goes to the one that has least."""
    found, mean = busiest(np.array(lengths, float), copies, sms), sum(lengths) * copies / sms
    assert found <= mean + max(lengths) + 1e-9
    assert found >= max(mean, max(lengths)) - 1e-9 or -(-len(lengths) * copies // sms) > MOST_ROUNDS
    assert abs(found - worked_off(lengths, copies, sms)) <= max(lengths) + 1e-9


def test_the_busiest_is_mostly_that_of_a_list_worked_off() -> None:
    """Less than 1% off in the mean of 1,000 drawn cases."""
    drawn, errors = np.random.default_rng(0), []
    for _ in range(1000):
        lengths = drawn.integers(1, 51, drawn.integers(1, 21))
        copies, sms = int(drawn.integers(1, 10)), int(drawn.integers(1, 13))
        found, wanted = busiest(lengths * 1.0, copies, sms), worked_off(lengths, copies, sms)
        errors.append(abs(found / wanted - 1))
    assert np.mean(errors) < 0.01


def test_equal_lengths_come_in_rounds() -> None:
    assert busiest(np.full(3, 10.0), 4, 5) == 30
    assert busiest(np.full(3, 10.0), 0, 5) == 0
    many = busiest(np.full(1000, 10.0), 1, 10)
    assert many == pytest.approx(1000, rel=0.01)
