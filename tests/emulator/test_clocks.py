"""Vector clocks: what releases publish, what messages carry, between lanes, warps and clusters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.checks.clocks import AsyncPool, Foreign, Message, PipeActor, WarpClock, actor_id
from fa4.emulator.warp_lanes import FULL_MASK, LANES, lanes_of

ROWS = 4
masks = st.one_of(st.integers(1, FULL_MASK), st.sampled_from([1, 1 << 31, FULL_MASK]))


def lanes_in(mask: int) -> set[int]:
    return {lane for lane, bit in enumerate(reversed(f"{mask:032b}")) if bit == "1"}


@given(mask=st.integers(0, FULL_MASK))
def test_lanes_of_a_mask(mask) -> None:
    assert set(lanes_of(mask).tolist()) == lanes_in(mask)


def test_actor_ids_are_distinct() -> None:
    ids = [actor_id(row, lane) for row in range(ROWS) for lane in range(LANES)]
    assert ids == list(range(ROWS * LANES))


STEPS: dict[str, Callable[[WarpClock, int], object]] = {
    "release": WarpClock.release,
    "snapshot": WarpClock.snapshot,
    "sync": WarpClock.sync_lanes,
    "fence": WarpClock.fence_proxy,
}


@given(script=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), masks), max_size=8), mask=masks)
def test_a_release_publishes_its_lanes_up_to_now_and_others_as_last_synced(script, mask) -> None:
    warp, synced = WarpClock(2, ROWS), [0] * LANES
    for name, lanes in script:
        if name == "sync":
            for lane in lanes_in(lanes):
                synced[lane] = warp.epoch
        STEPS[name](warp, lanes)
    now = warp.epoch
    message = warp.release(mask)
    expected = [now if lane in lanes_in(mask) else synced[lane] for lane in range(LANES)]
    assert message.seen[2 * LANES : 3 * LANES].tolist() == expected
    assert not message.seen[: 2 * LANES].any() and not message.seen[3 * LANES :].any()


@pytest.mark.parametrize("name", sorted(STEPS))
def test_what_follows_is_not_part_of_what_was_published(name) -> None:
    warp = WarpClock(0, ROWS)
    before = warp.epoch
    assert before == 1
    STEPS[name](warp, 1)
    assert warp.epoch > before


def test_published_messages_do_not_change() -> None:
    warp, other = WarpClock(0, ROWS), WarpClock(1, ROWS)
    message = warp.release()
    held = message.known.copy()
    other.release()
    warp.acquire(other.release())
    warp.fence_proxy()
    warp.sync_lanes()
    assert (message.known == held).all()
    copy = message.copy()
    copy.add(5, 99)
    assert (message.known == held).all()


def test_a_fence_covers_what_was_seen_but_nothing_later() -> None:
    writer, fencer = WarpClock(0, ROWS), WarpClock(1, ROWS)
    fencer.acquire(writer.release(1 << 4))
    late = writer.release(1 << 4)
    fencer.fence_proxy(1 << 7)
    fencer.acquire(late)
    fenced = fencer.release(1 << 7).fenced
    assert fenced[4] == 1 and late.seen[4] == 2
    assert fenced[LANES + 7] == 1 and fenced.sum() == 2


@settings(max_examples=50)
@given(masks=st.lists(masks, min_size=1, max_size=4))
def test_fenced_never_exceeds_published(masks) -> None:
    """Once all lanes are synced, nothing is fenced that is not seen."""
    first, second = WarpClock(0, ROWS), WarpClock(1, ROWS)
    for mask in masks:
        first.fence_proxy(mask)
        second.acquire(first.release())
        second.fence_proxy(mask)
        first.acquire(second.release())
    for warp in (first, second):
        message = warp.release()
        assert (message.fenced <= message.seen).all()


messages = st.builds(
    lambda cluster, entries, known_from: _message(cluster, entries, known_from),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 9)), max_size=5),
    st.integers(0, 3),
)


def _message(cluster: int, entries: list[tuple[int, int, int]], known_from: int) -> Message:
    """A message of `cluster` that knows (cluster, id, epoch) of some actors."""
    message = Message.nothing(2, cluster, known_from)
    for where, actor, epoch in entries:
        other = Message.nothing(2, where)
        other.add(actor, epoch, fenced=epoch % 2 == 0)
        message.join(other)
    return message


def facts(message: Message) -> set[tuple[int, int, int, int]]:
    """Everything a message says: (cluster, seen or fenced, id, epoch), and known_from."""
    said = {(-1, 0, 0, message.known_from)}
    for cluster, known in [(message.cluster, message.known), *message.foreign]:
        for column, actor in zip(*np.nonzero(known), strict=True):
            said.add((cluster, int(column), int(actor), int(known[column, actor])))
    return said


def latest(said: set[tuple[int, int, int, int]]) -> set[tuple[int, int, int, int]]:
    """The highest epoch of each actor."""
    best: dict[tuple[int, int, int], int] = {}
    for *actor, epoch in said:
        key = actor[0], actor[1], actor[2]
        best[key] = max(best.get(key, 0), epoch)
    return {(*key, epoch) for key, epoch in best.items()}


@given(mine=messages, other=messages)
def test_joining_learns_exactly_what_either_knows(mine, other) -> None:
    expected, untouched = latest(facts(mine) | facts(other)), facts(other)
    cluster = mine.cluster
    mine.join(other)
    assert facts(mine) == expected
    assert mine.cluster == cluster
    other.add(3, 1000)
    mine.join(mine.copy())
    assert facts(mine) == expected and facts(other) != untouched


@given(message=messages)
def test_foreign_knowledge_lies_flat_as_said(message) -> None:
    index, flat = message.foreign.flat()
    found = {
        cluster: flat[:, row * LANES : row * LANES + 2 * LANES] for cluster, row in index.tolist()
    }
    assert found.keys() == message.foreign.by_cluster.keys()
    for cluster, known in message.foreign:
        assert (found[cluster] == known).all()


def test_foreign_clusters_of_different_sizes() -> None:
    known = {7: np.full((3, LANES), 1, np.int32), 9: np.full((3, 3 * LANES), 2, np.int32)}
    index, flat = Foreign(known).flat()
    assert index.tolist() == [[7, 0], [9, 1]]
    assert flat[:, :LANES].max() == 1 and flat[:, LANES:].min() == 2


def test_a_fence_covers_foreign_writes() -> None:
    writer, reader = WarpClock(0, ROWS, cluster=1), WarpClock(0, ROWS, cluster=2)
    reader.acquire(writer.release(1))
    before = reader.release().foreign.by_cluster[1]
    reader.fence_proxy()
    after = reader.release().foreign.by_cluster[1]
    assert before[:2, 0].tolist() == [1, 0] and after[:2, 0].tolist() == [1, 1]


def test_news_from_abroad_about_this_cluster() -> None:
    """A warp learns of its neighbour through another cluster."""
    first, second = WarpClock(0, ROWS, cluster=1), WarpClock(1, ROWS, cluster=1)
    abroad = WarpClock(0, ROWS, cluster=2)
    abroad.acquire(first.release())
    second.acquire(abroad.release())
    assert (second.knowledge.seen[:LANES] == 1).all()


def test_a_relaxed_operation_tells_what_was_executed_and_no_access() -> None:
    first, second, third = (WarpClock(row, ROWS) for row in range(3))
    second.acquire_order(first.release_order(1 << 4, None))
    assert second.knowledge.executed[4] == 1 and not second.knowledge.seen.any()
    third.acquire(second.release(1))  # and whoever is told passes it on
    assert third.knowledge.executed[[4, LANES]].tolist() == [1, 1]
    assert third.knowledge.seen[[4, LANES]].tolist() == [0, 1]
    assert first.epoch == 2


def test_a_relaxed_operation_tells_what_a_fence_has_published() -> None:
    first, second = (WarpClock(row, ROWS) for row in range(2))
    fence = first.release(1 << 4)
    second.acquire(first.release_order(1 << 4, fence))
    assert second.knowledge.seen[4] == 1 and second.knowledge.executed[4] == 2


def test_the_part_of_a_message_tells_of_its_ids_alone() -> None:
    warp = WarpClock(0, ROWS)
    message = warp.release_order(1 << 2, warp.release())
    ids = np.zeros(ROWS * LANES, bool)
    ids[2:4] = True
    part = message.part(ids)
    assert np.flatnonzero(part.executed).tolist() == [2, 3] and (part.executed <= 1).all()


def test_finished_launches_are_told_on() -> None:
    first, second = WarpClock(0, ROWS, 5, known_from=3), WarpClock(1, ROWS, 5, known_from=3)
    first.finish_launches(5)
    first.finish_launches(4)
    second.acquire(first.release())
    assert second.knowledge.known_from == 5


def test_pool_ids_go_round_and_their_epochs_up() -> None:
    pool, nothing = AsyncPool(2, rows=2), Message.nothing(ROWS)
    started = [pool.begin(nothing) for _ in range(2 * 2 * LANES)]
    expected = list(range(2 * LANES, 4 * LANES))
    assert [operation.id for operation in started] == expected * 2
    assert [operation.epoch for operation in started] == [1] * 64 + [2] * 64
    assert all(operation.since == operation.epoch for operation in started)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_completion_tells_of_the_operation_and_of_its_issuer(fenced) -> None:
    issuer, waiter = WarpClock(0, ROWS), WarpClock(1, ROWS)
    operation = AsyncPool(2).begin(issuer.snapshot(1 << 3))
    waiter.acquire(operation.completion(fenced))
    assert waiter.knowledge.seen[3] == 1 and waiter.knowledge.seen[operation.id] == 1
    assert waiter.knowledge.fenced[operation.id] == fenced
    assert waiter.knowledge.seen.sum() == 2
    bare = Message.nothing(ROWS)
    bare.add(operation.id, operation.epoch, fenced)
    assert bare.seen.sum() == 1 and bare.fenced.sum() == fenced


def test_the_pipe_runs_in_order() -> None:
    """Completion of a later operation tells of the earlier ones and of their issuers."""
    issuers, pipe = [WarpClock(row, ROWS) for row in range(2)], PipeActor(3)
    first = pipe.begin(issuers[0].snapshot(1))
    early = first.completion()
    second = pipe.begin(issuers[1].snapshot(1))
    assert (first.epoch, second.epoch, second.since) == (1, 2, 0)
    assert early.seen[[0, LANES, 3 * LANES]].tolist() == [1, 0, 1]
    assert first.completion().seen[[0, LANES, 3 * LANES]].tolist() == [1, 0, 1]
    assert second.completion().seen[[0, LANES, 3 * LANES]].tolist() == [1, 1, 2]
