"""Compiled pieces that the shadows of a CTA's memories and of global memory share.

A record is a row of unsigned 32-bit fields that says who made an access: WHO (NEVER, NOBODY or
the actor's row + FIRST_ROW), EPOCH, BY_LANES (mask of lanes), WORD (PTX line and flags) and
CLUSTER.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np

from fa4.emulator.checks.clocks import FENCED, SEEN, Actor
from fa4.emulator.checks.conflict import (
    ASYNC_PROXY,
    KINDS,
    MISSING_PROXY_FENCE,
    MUST_BE_INITIALISED,
    READ_AFTER_WRITE,
    SAME_INSTRUCTION_WRITE,
    STRONG,
    UNINITIALISED,
    WRITE_AFTER_READ,
    WRITE_AFTER_WRITE,
)
from fa4.emulator.masks import LANES

# The kinds of conflict as compiled code numbers them.
RAW, WAW, WAR, NOT_INITIALISED, NOT_FENCED, SAME_INSTRUCTION = (
    KINDS.index(kind)
    for kind in (
        READ_AFTER_WRITE,
        WRITE_AFTER_WRITE,
        WRITE_AFTER_READ,
        UNINITIALISED,
        MISSING_PROXY_FENCE,
        SAME_INSTRUCTION_WRITE,
    )
)
NEVER, NOBODY, FIRST_ROW = 0, 1, 2  # WHO: never written; written before everything; a row
WHO, EPOCH, BY_LANES, WORD, CLUSTER, FIELDS = 0, 1, 2, 3, 4, 5
# Kind, granule, my lane, and of the other: WHO, lane, EPOCH, WORD, CLUSTER, BY_LANES.
FOUND_FIELDS = 9
OUTSIDE = -1  # instead of the number of a kind
NO_EPOCH = 1 << 62  # above all epochs

# Where a shadow's records are, for compiled code that is given an address: `rows` of actors and
# `granules` of `granule_bytes`; readers and rows are 0 where reads are not kept by row. dropped:
# flags of an access that do not count here.
SHADOW = np.dtype(
    [
        (name, np.int64)
        for name in ("writes", "readers", "reads", "granules", "granule_bytes", "rows", "dropped")
    ]
)

Int: TypeAlias = int | np.integer[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


class Mine(NamedTuple):
    """The actor and its access, for compiled code."""

    row: int
    epoch: int
    since: int
    word: int
    cluster: int
    known_from: int
    known: np.ndarray  # int32 (2, ids)
    foreign_index: np.ndarray  # int64 (k, 2): cluster, first row in foreign
    foreign: np.ndarray  # int32 (2, all their ids)


def mine_of(actor: Actor, word: int) -> Mine:
    """An actor and the flags of its access, as compiled code takes them."""
    knowledge = actor.knowledge
    index, foreign = knowledge.foreign.flat()
    return Mine(
        actor.row,
        actor.epoch,
        actor.since,
        word,
        knowledge.cluster,
        knowledge.known_from,
        knowledge.known,
        index,
        foreign,
    )


def part(function: Function) -> Function:
    """Compiles a function that only compiled code calls: without a wrapper for Python and machine
    code of its own, and without keeping it, since whoever calls it keeps all of it. That halves
    the first launch.
    """
    njit: Any = numba.njit  # these two options are not among its types
    return cast("Function", njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


@part
def first_behind(known: Any, row: Int, mask: Int, epoch: Int) -> Any:
    """The first lane of `mask` whose entry in a vector of epochs is below `epoch`, or -1."""
    lane = 0
    while mask:
        if mask & 0xFF == 0:
            mask >>= 8
            lane += 8
            continue
        if mask & 1 and known[row * LANES + lane] < epoch:
            return lane
        mask >>= 1
        lane += 1
    return -1


@part
def _behind(records: Any, at: Int, mine: Any, column: Int, mask: Int) -> Any:
    """The first lane of `mask` up to whose recorded epoch I do not know, or -1."""
    row, epoch = np.int64(records[at, WHO]) - FIRST_ROW, np.int64(records[at, EPOCH])
    cluster = np.int64(records[at, CLUSTER])
    if cluster < mine.known_from:
        return -1
    if cluster == mine.cluster:
        return first_behind(mine.known[column], row, mask, epoch)
    for i in range(mine.foreign_index.shape[0]):
        if mine.foreign_index[i, 0] == cluster:
            first_row = mine.foreign_index[i, 1]
            return first_behind(mine.foreign[column], first_row + row, mask, epoch)
    return first_behind(mine.known[column], np.int64(0), mask, np.int64(NO_EPOCH))


@part
def unordered(records: Any, at: Int, mine: Any, lane: Int) -> Any:
    """A lane of the access recorded at a granule that is not ordered before mine, or -1."""
    if np.int64(records[at, WORD]) & mine.word & STRONG:
        return -1
    mask = np.int64(records[at, BY_LANES])
    my_row = records[at, CLUSTER] == mine.cluster and records[at, WHO] == mine.row + FIRST_ROW
    if my_row and records[at, EPOCH] >= mine.since:
        mask &= ~(1 << lane)
    return _behind(records, at, mine, np.int64(SEEN), mask)


@part
def _unfenced(records: Any, at: Int, mine: Any) -> Any:
    """A lane of a recorded generic write that my async-proxy read may not see, or -1."""
    if np.int64(records[at, WORD]) & ASYNC_PROXY or not mine.word & ASYNC_PROXY:
        return -1
    return _behind(records, at, mine, np.int64(FENCED), np.int64(records[at, BY_LANES]))


@part
def report(found: Any, kind: Int, records: Any, granule: Int, lane: Int, other_lane: Int) -> None:
    """Keep the first conflict of a call: with the access recorded at that granule."""
    if found[0] == 0:
        found[0], found[1], found[2] = kind, granule, lane
        found[3], found[4] = records[granule, WHO], other_lane
        found[5], found[6] = records[granule, EPOCH], records[granule, WORD]
        found[7], found[8] = records[granule, CLUSTER], records[granule, BY_LANES]


@part
def same(records: Any, i: Int, j: Int) -> bool:
    """Whether the records of two granules stand for the same access."""
    return (
        records[i, EPOCH] == records[j, EPOCH]
        and records[i, BY_LANES] == records[j, BY_LANES]
        and records[i, WHO] == records[j, WHO]
        and records[i, WORD] == records[j, WORD]
        and records[i, CLUSTER] == records[j, CLUSTER]
    )


@part
def check_writes(
    writes: Any, found: Any, granules: Any, lanes: Any, mine: Any, is_write: bool
) -> None:
    """Compare an access with the last write of each granule."""
    good, good_lane = granules[0], -1  # the latest granule and lane that were in order
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        if lane == good_lane and same(writes, granule, good):
            continue
        other, kind = np.int64(0), np.int64(WAW if is_write else RAW)
        if writes[granule, WHO] < FIRST_ROW:
            if writes[granule, WHO] != NEVER or not mine.word & MUST_BE_INITIALISED:
                continue
            kind = np.int64(NOT_INITIALISED)
        else:
            other = unordered(writes, granule, mine, lane)
            if other < 0 and not is_write:
                other, kind = _unfenced(writes, granule, mine), np.int64(NOT_FENCED)
        if other >= 0:
            report(found, kind, writes, granule, lane, other)
        else:
            good, good_lane = granule, lane


@part
def equally_strong(word: Int, mine: Any) -> bool:
    """Whether a recorded access and mine are both strong or both plain."""
    return (np.int64(word) ^ mine.word) & STRONG == 0


@part
def fill(records: Any, granule: Int, mine: Any, mask: Int) -> None:
    """Make the record of a granule that of my access by the lanes in `mask`."""
    records[granule, WHO] = mine.row + FIRST_ROW
    records[granule, EPOCH] = mine.epoch
    records[granule, BY_LANES] = mask
    records[granule, WORD] = mine.word
    records[granule, CLUSTER] = mine.cluster


@part
def record_write(writes: Any, granules: Any, lanes: Any, mine: Any, found: Any) -> None:
    """Keep a write; two lanes on one granule are a conflict unless they are strong."""
    for granule in granules:
        fill(writes, granule, mine, np.int64(0))
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        before = np.int64(writes[granule, BY_LANES])
        others = before & ~(1 << lane)
        if others and not mine.word & STRONG:
            other = first_behind(mine.known[SEEN], mine.row, others, np.int64(NO_EPOCH))
            report(found, np.int64(SAME_INSTRUCTION), writes, granule, lane, other)
        writes[granule, BY_LANES] = before | 1 << lane


@part
def spread(places: Any, lanes: Any, unit: Any) -> Any:
    """(granules, lane of each or one lane for all) of units that start at `places`.

    unit: how many places a granule has, and how many granules a unit has.
    """
    places_each, count = unit
    if places_each == 1 and count == 1:
        return places, lanes
    granules = np.empty(places.size * count, np.int64)
    for i in range(places.size):
        first = places[i] // places_each
        for k in range(count):
            granules[i * count + k] = first + k
    if lanes.size == 1 or count == 1:
        return granules, lanes
    repeated = np.empty(granules.size, np.int64)
    for i in range(granules.size):
        repeated[i] = lanes[i // count]
    return granules, repeated


@part
def outside(writes: Any, granules: Any) -> bool:
    """Whether a granule is not in the memory."""
    for granule in granules:  # noqa: SIM110, a generator takes longer to compile
        if granule < 0 or granule >= writes.shape[0]:
            return True
    return False
