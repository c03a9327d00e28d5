"""The shadow of one CTA's shared memory or tensor memory: who last wrote and read each granule.

An access is ordered after a recorded one if the actor's vector of seen epochs has reached the
recorded epoch, or if the actor is the same. Otherwise it is a race. The record is updated in
either case, so that one fault does not report forever.

Exact up to the first race, but for these approximations, all towards fewer reports: a newer read
by a row replaces the row's older one, which matters only if other lanes made it; and a strong
write stands for those that it follows. A granule that is larger than the narrowest access would
confuse neighbours: the caller chooses it small enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import ASYNC_PROXY
from fa4.emulator.checks.memory import Places, ShadowMemory, Unit
from fa4.emulator.checks.records import (
    ANY_LANE,
    EPOCH,
    FIELDS,
    FULL,
    GIVEN,
    LANE_BITS,
    LANE_MASK,
    OUTSIDE,
    SHADOW,
    UNWRITTEN,
    WAR,
    WORD,
    Mine,
    check_writes,
    equally_strong,
    lane_matters,
    listed,
    outside,
    part,
    pointer,
    record_write,
    report,
    spread,
    unordered,
)
from fa4.emulator.masks import LANES

ROWS_PER_WORD = 32


class SharedRecords(NamedTuple):
    """The state of a shadow, for compiled code."""

    writes: np.ndarray  # int64 (granules,): the last write
    readers: np.ndarray  # uint32 (granules, words): mask of the rows that read it since
    reads: np.ndarray  # int64 (rows, granules): the last read by that row
    accesses: np.ndarray  # uint32 (room, FIELDS)
    found: np.ndarray  # int64 (FOUND_FIELDS,)


@part
def _check_reads(records: Any, granules: Any, lanes: Any, mine: Any) -> None:
    """Compare a write with the reads of each granule since its last write."""
    for word in range(records.readers.shape[1]):
        rows = np.int64(0)
        for granule in granules:
            rows |= np.int64(records.readers[granule, word])
        for bit in range(ROWS_PER_WORD):
            if rows >> bit & 1:
                _check_reads_of(records, granules, lanes, mine, word * ROWS_PER_WORD + bit)


@part
def _check_reads_of(records: Any, granules: Any, lanes: Any, mine: Any, row: int) -> None:
    """Compare a write with the reads by one row."""
    reads, word, bit = records.reads[row], row // ROWS_PER_WORD, row % ROWS_PER_WORD
    good, good_lane = np.int64(-1), np.int64(-1)
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        if not np.int64(records.readers[granule, word]) >> bit & 1:
            continue
        record = reads[granule]
        if record == good and (good_lane == ANY_LANE or lane == good_lane):
            continue
        other = unordered(records.accesses, record, mine, lane)
        if other >= 0:
            report(records, np.int64(WAR), record, granule, lane, other)
        else:
            good, good_lane = record, lane_matters(records.accesses, record, mine, lane)


@part
def _record_read(records: Any, granules: Any, lanes: Any, mine: Any, record: Any) -> None:
    """Keep a read; reads of a row in the same epoch are one record, of several lanes."""
    reads, readers = records.reads[mine.row], records.readers
    word, bit = mine.row // ROWS_PER_WORD, 1 << mine.row % ROWS_PER_WORD
    latest, is_joined = np.int64(-1), False  # the access judged last, and whether mine joins it
    for i in range(granules.size):
        granule = granules[i]
        lane = np.int64(1) << lanes[min(i, lanes.size - 1)]
        rows = np.int64(readers[granule, word])
        if rows & bit == 0:
            readers[granule, word] = rows | bit
        else:
            before = reads[granule]
            if before >> LANE_BITS != latest:
                latest = before >> LANE_BITS
                by = records.accesses[latest]
                is_joined = by[EPOCH] == mine.epoch and equally_strong(by[WORD], mine)
            if is_joined:
                lane |= before & LANE_MASK
        reads[granule] = record | lane


@part
def visit(at: int, granules: Any, lanes: Any, mine: Any, is_write: bool, always: bool) -> int:
    """Compare an access with the shadow whose SHADOW is at an address, and record it if nothing is
    found, or always; the number of the kind of its first conflict, 0 if none.

    FULL: its list of accesses is; nothing is recorded.
    """
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    if state.listed == state.room:
        return FULL
    size, rows = state.granules, state.rows
    records = SharedRecords(
        numba.carray(pointer(state.writes), size, np.int64),
        numba.carray(pointer(state.readers), (size, -(-rows // ROWS_PER_WORD)), np.uint32),
        numba.carray(pointer(state.reads), (rows, size), np.int64),
        numba.carray(pointer(state.accesses), (state.room, FIELDS), np.uint32),
        state.found,
    )
    records.found[0] = 0
    if is_write:  # a read still under way tells more than the write that it read
        _check_reads(records, granules, lanes, mine)
    check_writes(records, granules, lanes, mine, is_write)
    if records.found[0] and not always:
        return records.found[0]
    record = listed(state, records.accesses, mine)
    if is_write:
        for granule in granules:
            for word in range(records.readers.shape[1]):
                records.readers[granule, word] = 0
        record_write(records, granules, lanes, mine, record)
    else:
        _record_read(records, granules, lanes, mine, record)
    return records.found[0]


@numba.njit(cache=True)
def _access(
    at: int, places: Any, lanes: Any, each: int, count: int, row: int, epoch: int, since: int,
    word: int, cluster: int, known_from: int, known: Any, index: Any, foreign: Any, is_write: bool,
) -> int:  # fmt: skip
    """Check and record one access; as `visit`, or OUTSIDE: a granule is outside the memory."""
    mine = Mine(row, epoch, since, word, cluster, known_from, known, index, foreign)
    granules, lanes = spread(places, lanes, (each, count))
    if outside(granules, numba.carray(pointer(at), 1, SHADOW)[0].granules):
        return OUTSIDE
    return visit(at, granules, lanes, mine, is_write, True)


class Shadow(ShadowMemory):
    """Records of the accesses to the shared memory or tensor memory of a CTA.

    granules: how many. granule_bytes: bytes per granule, for the messages. rows: rows of actors
    in the cluster. Memory is taken only for the granules and rows that are used.
    """

    def __init__(self, granules: int, granule_bytes: int, rows: int) -> None:
        super().__init__(granules, granule_bytes)
        self._rows = rows
        self._writes = np.zeros(granules, dtype=np.int64)
        self._readers = np.zeros((granules, -(-rows // ROWS_PER_WORD)), dtype=np.uint32)
        self._reads = np.zeros((rows, granules), dtype=np.int64)
        self._describe(
            writes=self._writes.ctypes.data,
            readers=self._readers.ctypes.data,
            reads=self._reads.ctypes.data,
            rows=rows,
        )

    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""
        self.reset(start, stop)
        self._writes[start:stop] = GIVEN

    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they hold nothing."""
        granules = self._check_range(start, stop)
        self._writes[granules] = UNWRITTEN
        self._readers[granules] = 0

    def forget(self, granules: Places) -> None:
        """These granules hold nothing."""
        self._writes[granules] = UNWRITTEN
        self._readers[granules] = 0

    def written_by_async_proxy(self, granule: int) -> bool:
        """Whether the last write of a granule, if there was one, came through the async proxy."""
        record = int(self._writes[granule])
        return record > GIVEN and bool(self._accesses[record >> LANE_BITS, WORD] & ASYNC_PROXY)

    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Actor, word: int,
        is_write: bool,
    ) -> int:  # fmt: skip
        known = mine.knowledge
        if mine.row >= self._rows or known.known.shape[1] != self._rows * LANES:
            of = known.known.shape[1] // LANES
            raise ValueError(f"row {mine.row} of {of}, not of {self._rows}")
        return _access(
            self.state_address, places, lanes, *unit, mine.row, mine.epoch, mine.since, word,
            known.cluster, known.known_from, known.known, *known.foreign.flat(), is_write,
        )  # fmt: skip
