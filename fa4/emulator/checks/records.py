"""Compiled pieces that the shadows of a CTA's memories and of global memory share.

A record is one integer that says who accessed a granule: the number of an access and the mask of
the lanes that made it there. Each shadow has a list of its accesses, a row of unsigned 32-bit
fields for each: WHO (NEVER, NOBODY or the actor's row + FIRST_ROW), EPOCH, WORD (PTX line and
flags) and CLUSTER. The first two are no accesses: NEVER and NOBODY. An access to thousands of
granules is so one row, and whether two granules have the same one is one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

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
from fa4.emulator.warp_lanes import LANES

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
# WHO, and as a number of an access: never written; written before everything; a row, an access
NEVER, NOBODY, FIRST_ROW = 0, 1, 2
WHO, EPOCH, WORD, CLUSTER, FIELDS = 0, 1, 2, 3, 4
LANE_BITS, LANE_MASK = 32, (1 << 32) - 1  # of a record, below the number of the access
UNWRITTEN, GIVEN = NEVER << LANE_BITS, NOBODY << LANE_BITS  # records of no access
# Kind, granule, my lane, and of the other: WHO, lane, EPOCH, WORD, CLUSTER, mask of lanes.
FOUND_FIELDS = 9
SAME_FROM = 2  # the fields behind this one are those of one race, and the kind
MOST_FOUND = 64  # lanes of an access, and two others for each
OUTSIDE, FULL = -1, -2  # instead of the number of a kind
NO_EPOCH = 1 << 62  # above all epochs
ANY_LANE = -2

# Where a shadow's records are, for compiled code that is given an address: `rows` of actors and
# `granules` of `granule_bytes`; readers and rows are 0 where reads are not kept by row. split,
# chunk_granules, chunks and cells: those of `shadow`, for the memory of a CTA. accesses:
# where the list is, `listed` of at most `room` rows long. dropped: flags of an access that do not
# count here. found: how many conflicts a call has, MOST_FOUND + 1 for more, then each of them.
SHADOW = np.dtype(
    [
        *(
            (name, np.int64)
            for name in ("writes", "readers", "reads", "granules", "granule_bytes", "rows")
        ),
        *((name, np.int64) for name in ("split", "chunk_granules", "chunks", "cells")),
        *((name, np.int64) for name in ("accesses", "listed", "room", "dropped")),
        ("found", np.int64, (2 + MOST_FOUND, FOUND_FIELDS)),
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


def _to_pointer(context: Any, address: Any) -> Any:
    """An address as compiled code takes it for an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_to_pointer)


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
def _behind(by: Any, mine: Any, column: Int, mask: Int) -> Any:
    """The first lane of `mask` up to whose epoch in an access I do not know, or -1."""
    row, epoch = np.int64(by[WHO]) - FIRST_ROW, np.int64(by[EPOCH])
    cluster = np.int64(by[CLUSTER])
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
def by_my_row(by: Any, mine: Any) -> bool:
    """Whether an access was made by my row."""
    return by[CLUSTER] == mine.cluster and by[WHO] == mine.row + FIRST_ROW


@part
def unordered(accesses: Any, record: Int, mine: Any, lane: Int) -> Any:
    """A lane of a recorded access that is not ordered before mine, or -1."""
    by = accesses[record >> LANE_BITS]
    if np.int64(by[WORD]) & mine.word & STRONG:
        return -1
    mask = record & LANE_MASK
    if by_my_row(by, mine) and by[EPOCH] >= mine.since:
        mask &= ~(1 << lane)
    return _behind(by, mine, np.int64(SEEN), mask)


@part
def _unfenced(accesses: Any, record: Int, mine: Any) -> Any:
    """A lane of a recorded generic write that my async-proxy read may not see, or -1."""
    by = accesses[record >> LANE_BITS]
    if np.int64(by[WORD]) & ASYNC_PROXY or not mine.word & ASYNC_PROXY:
        return -1
    return _behind(by, mine, np.int64(FENCED), record & LANE_MASK)


@part
def report(records: Any, kind: Int, record: Int, granule: Int, lane: Int, other_lane: Int) -> None:
    """Keep a conflict of a call with the access recorded at that granule, once for all granules."""
    count, by = records.found[0, 0], records.accesses[record >> LANE_BITS]
    found = records.found[min(count, MOST_FOUND) + 1]
    found[0], found[1], found[2] = kind, granule, lane
    found[3], found[4] = by[WHO], other_lane
    found[5], found[6] = by[EPOCH], by[WORD]
    found[7], found[8] = by[CLUSTER], record & LANE_MASK
    for before in range(1, min(count, MOST_FOUND) + 1):
        is_kept = records.found[before, 0] == kind
        for field in range(SAME_FROM, FOUND_FIELDS):
            is_kept &= records.found[before, field] == found[field]
        if is_kept:
            return
    records.found[0, 0] = min(count, MOST_FOUND) + 1


@part
def first_kind(records: Any) -> Any:
    """The number of the kind of a call's first conflict, 0 if it has none."""
    return records.found[1, 0] if records.found[0, 0] else np.int64(0)


@part
def lane_matters(accesses: Any, record: Int, mine: Any, lane: Int) -> Any:
    """The lane for which a record that is in order was judged, ANY_LANE if it is all the same."""
    return lane if by_my_row(accesses[record >> LANE_BITS], mine) else np.int64(ANY_LANE)


@part
def check_writes(records: Any, granules: Any, lanes: Any, mine: Any, is_write: bool) -> None:
    """Compare an access with the last write of each granule."""
    writes, accesses = records.writes, records.accesses
    good, good_lane = np.int64(-1), np.int64(-1)  # the latest record that was in order, for whom
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        record = writes[granule]
        if record == good and (good_lane == ANY_LANE or lane == good_lane):
            continue
        other, kind = np.int64(0), np.int64(WAW if is_write else RAW)
        if record <= GIVEN:
            if record != UNWRITTEN or not mine.word & MUST_BE_INITIALISED:
                continue
            kind = np.int64(NOT_INITIALISED)
        else:
            other = unordered(accesses, record, mine, lane)
            if other < 0 and not is_write:
                other, kind = _unfenced(accesses, record, mine), np.int64(NOT_FENCED)
        if other >= 0:
            report(records, kind, record, granule, lane, other)
        else:
            good, good_lane = record, lane_matters(accesses, record, mine, lane)


@part
def equally_strong(word: Int, mine: Any) -> bool:
    """Whether a recorded access and mine are both strong or both plain."""
    return (np.int64(word) ^ mine.word) & STRONG == 0


@part
def listed(state: Any, accesses: Any, mine: Any) -> Any:
    """The record of my access by no lane; it is put on the list, where there must be room."""
    latest = accesses[state.listed - 1]
    if not (by_my_row(latest, mine) and latest[EPOCH] == mine.epoch and latest[WORD] == mine.word):
        by = accesses[state.listed]
        by[WHO], by[EPOCH] = mine.row + FIRST_ROW, mine.epoch
        by[WORD], by[CLUSTER] = mine.word, mine.cluster
        state.listed += 1
    return (state.listed - 1) << LANE_BITS


@part
def record_write(records: Any, granules: Any, lanes: Any, mine: Any, record: Int) -> None:
    """Keep a write; two lanes on one granule are a conflict unless they are strong."""
    writes = records.writes
    if lanes.size == 1:
        record |= 1 << lanes[0]
        for granule in granules:
            writes[granule] = record
        return
    for granule in granules:
        writes[granule] = record
    for i in range(granules.size):
        granule, lane = granules[i], lanes[i]
        before = writes[granule]
        others = before & LANE_MASK & ~(1 << lane)
        if others and not mine.word & STRONG:
            other = first_behind(mine.known[SEEN], mine.row, others, np.int64(NO_EPOCH))
            report(records, np.int64(SAME_INSTRUCTION), before, granule, lane, other)
        writes[granule] = before | 1 << lane


@part
def spread(places: Any, lanes: Any, unit: Any) -> Any:
    """(granules, lane of each or one lane for all) of units that start at `places`.

    unit: how many places a granule has, a power of two, and how many granules a unit has.
    """
    places_each, count = unit
    if places_each == 1 and count == 1:
        return places, lanes
    shift = 0
    while 1 << shift < places_each:
        shift += 1
    granules = np.empty(places.size * count, np.int64)
    for i in range(places.size):
        first = places[i] >> shift
        for k in range(count):
            granules[i * count + k] = first + k
    if lanes.size == 1 or count == 1:
        return granules, lanes
    repeated = np.empty(granules.size, np.int64)
    for i in range(granules.size):
        repeated[i] = lanes[i // count]
    return granules, repeated


@part
def outside(places: Any, unit: Any, granules: int) -> bool:
    """Whether a unit reaches out of so many granules."""
    low = high = np.int64(0)
    for place in places:
        low, high = min(low, place), max(high, place)
    return bool(low < 0 or high // unit[0] + unit[1] > granules)
