"""The model behind the order of work tiles in Hopper's gradients."""

from __future__ import annotations

import heapq
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import Problem
from fa4.designs.gradients import last_heads, narrow_kernels
from fa4.hardware import H200
from fa4.plan.warpgroup_backward import WarpgroupBackwardPipeline
from lab.benchmarks.gradient_order import END_STEPS, judge, order_tiles, run_list

Spans = list[tuple[int, int]]


def plain(
    tiles: np.ndarray, spans: Spans, members: int, places: int, back: bool, sms: int
) -> tuple[float, int]:
    """The same with lists of steps and a dictionary that remembers its order."""
    given, held, loads, end = iter(tiles.tolist()), OrderedDict[tuple[int, int], None](), 0, 0.0
    due: list[tuple[float, int, list[tuple[int, int]]]] = [(0.0, sm, []) for sm in range(sms)]
    while due:
        now, sm, steps = heapq.heappop(due)
        if not steps:
            tile = next(given, None)
            if tile is None:
                end = max(end, now)
                continue
            rows, heads = range(*spans[tile[0]]), [tile[1] * members + m for m in range(members)]
            steps = [(h, r) for h in heads for r in rows]
            if back:
                steps = [(h, r) for r in reversed(rows) for h in heads]
            heapq.heappush(due, (now + END_STEPS, sm, steps))
            continue
        if steps[0] not in held:
            loads += 1
        held[steps[0]] = None
        held.move_to_end(steps[0])
        if len(held) > places:
            held.popitem(last=False)
        heapq.heappush(due, (now + 1.0, sm, steps[1:]))
    return end, loads


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.booleans(), st.integers(1, 5),
    st.integers(0, 4),
)  # fmt: skip
def test_steps_and_loads_are_those_of_plain_lists(
    drawn: Spans, heads: int, members: int, places: int, back: bool, sms: int, last: int
) -> None:
    spans = [(start, start + length) for start, length in drawn]
    tiles = order_tiles(heads, len(spans), last)
    found = run_list(tiles, np.array(spans), members, 10, places, back, sms)
    assert found == plain(tiles, spans, members, places, back, sms)


@given(st.integers(1, 30), st.integers(1, 2000), st.integers(1, 3))
def test_tiles_are_in_the_simulators_order(heads: int, keys: int, group: int) -> None:
    """That of the kernels that `fa4 predict` simulates."""
    problem = Problem(batch=1, seqlen_q=keys, seqlen_k=keys, heads_q=heads * group, heads_k=heads,
                      head_dim=64, head_dim_v=64, causal=True)  # fmt: skip
    pipeline = WarpgroupBackwardPipeline(head_dim=64, head_dim_v=64, causal=True)
    (kernel,) = narrow_kernels(problem, pipeline, H200, None).mains
    blocks = -(-keys // pipeline.tile_n)
    heads, group = heads * group // kernel.tiles.group, kernel.tiles.group
    last = last_heads(heads, blocks, group, H200.sm_count)
    wanted = np.stack([kernel.tiles.block, kernel.tiles.head], axis=1)
    assert np.array_equal(order_tiles(heads, blocks, last), wanted)


@pytest.mark.parametrize(("left", "faster"), [(None, True), (200, False)])
def test_grouped_heads_walk_back_but_in_windows(left: int | None, faster: bool) -> None:
    """17 x 2,943 tokens of 32 heads on 4, which one walk brings into L2 four times as often."""
    problem = Problem(batch=17, seqlen_q=2943, seqlen_k=2943, heads_q=32, heads_k=4, head_dim=120,
                      head_dim_v=120, window_size=(left, 0))  # fmt: skip
    back, forwards = (judge(problem, 1, way) for way in (True, False))
    assert (back < 0.85 * forwards) == faster
