"""The shadow of one allocation of global memory: who last wrote and last read each granule.

As `shadow`, but actors come from any cluster of any launch. What a cluster does after a launch is
over is ordered after all of that launch (`Message.known_from`); what another cluster did is
ordered only if messages carried it here (`Message.foreign`).

Approximations towards fewer reports, beside those of `shadow`: a granule has at most READERS reads
that no later one stands for, the latest; a write is compared with these. A read stands for those
that are ordered before it.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from fa4.emulator.checks.conflict import MUST_BE_INITIALISED, STRONG
from fa4.emulator.checks.memory import Places, ShadowMemory, Unit
from fa4.emulator.checks.records import (
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
    by_my_row,
    check_writes,
    equally_strong,
    first_kind,
    listed,
    outside,
    part,
    pointer,
    record_write,
    report,
    spread,
    unordered,
)

READERS = 2  # of a granule, whose reads are in no order
LARGE_BYTES = 1 << 30
MAP_NORESERVE = 0x4000  # of Linux's mmap; Python names it from 3.13 on


class GlobalRecords(NamedTuple):
    """The state of a shadow, for compiled code."""

    writes: np.ndarray  # int64 (granules,): the last write
    # int64 (READERS, granules): the reads since, the last one first; those behind an UNWRITTEN
    # one do not count
    reads: np.ndarray
    accesses: np.ndarray  # uint32 (room, FIELDS)
    found: np.ndarray  # int64: SHADOW's


@part
def _check_reads(records: Any, granules: Any, lanes: Any, mine: Any) -> None:
    """Compare a write with the reads of each granule since its last write, the latest first."""
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        for k in range(READERS):
            record = records.reads[k, granule]
            if record == UNWRITTEN:
                break
            other = unordered(records.accesses, record, mine, lane)
            if other >= 0:
                report(records, np.int64(WAR), record, granule, lane, other)


@part
def _record_read(records: Any, granules: Any, lanes: Any, mine: Any, record: Any) -> None:
    """Keep a read; those of a row in the same epoch are one record, of several lanes."""
    reads, accesses = records.reads, records.accesses
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        mask, before = np.int64(1) << lane, reads[0, granule]
        if before != UNWRITTEN:
            if _same_time(accesses[before >> LANE_BITS], mine):
                mask |= before & LANE_MASK
            else:
                mask = _make_room(reads, accesses, granule, lane, mine)
        reads[0, granule] = record | mask


@part
def _same_time(by: Any, mine: Any) -> bool:
    """Was an access made by my row in my epoch, as strongly?"""
    return by[EPOCH] == mine.epoch and by_my_row(by, mine) and equally_strong(by[WORD], mine)


@part
def _make_room(reads: Any, accesses: Any, granule: int, lane: int, mine: Any) -> Any:
    """Move the records of a granule on by one place, without those that my read stands for; the
    lanes of my record."""
    mask, kept = np.int64(1) << lane, 0
    for k in range(READERS):
        record = reads[k, granule]
        if record == UNWRITTEN:
            break
        if _same_time(accesses[record >> LANE_BITS], mine):
            mask |= record & LANE_MASK
        elif not _stands_for(accesses, record, lane, mask, mine):
            reads[kept, granule] = record
            kept += 1
    if kept + 1 < READERS:
        reads[kept + 1, granule] = UNWRITTEN
    for k in range(min(kept, READERS - 1), 0, -1):
        reads[k, granule] = reads[k - 1, granule]
    return mask


@part
def _stands_for(accesses: Any, record: Any, lane: int, mask: Any, mine: Any) -> bool:
    """Does my read stand for a recorded one: is whatever is ordered after mine ordered after it?"""
    by = accesses[record >> LANE_BITS]
    if not equally_strong(by[WORD], mine):
        return False
    if by_my_row(by, mine) and record & LANE_MASK & ~mask == 0:
        return True
    return not mine.word & STRONG and unordered(accesses, record, mine, lane) < 0


@part
def visit(
    at: int, places: Any, lanes: Any, unit: Any, mine: Any, is_write: bool, always: bool
) -> int:
    """As `shadow.visit`."""
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    if state.listed == state.room:
        return FULL
    records = GlobalRecords(
        numba.carray(pointer(state.writes), state.granules, np.int64),
        numba.carray(pointer(state.reads), (READERS, state.granules), np.int64),
        numba.carray(pointer(state.accesses), (state.room, FIELDS), np.uint32),
        state.found,
    )
    records.found[0, 0] = 0
    granules, lanes = spread(places, lanes, unit)
    if is_write:  # a read still under way tells more than the write that it read
        _check_reads(records, granules, lanes, mine)
    check_writes(records, granules, lanes, mine, is_write)
    if records.found[0, 0] and not always:
        return first_kind(records)
    record = listed(state, records.accesses, mine)
    if is_write:
        for granule in granules:
            records.reads[0, granule] = UNWRITTEN
        record_write(records, granules, lanes, mine, record)
    else:
        _record_read(records, granules, lanes, mine, record)
    return first_kind(records)


@numba.njit(cache=True)
def _access(at: int, places: Any, lanes: Any, unit: Any, mine: Any, is_write: bool) -> int:
    """Check and record one access; as `visit`, or OUTSIDE: a granule is outside the memory."""
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    if outside(places, unit, state.granules):
        return OUTSIDE
    return visit(at, places, lanes, unit, mine, is_write, True)


def _untouched(*shape: int) -> np.ndarray:
    """int64 zeros that take memory only where they are written. Linux refuses to reserve more in
    one piece than the machine has, unless it is told that most will not be used."""
    size_bytes = 8 * math.prod(shape)
    if size_bytes < LARGE_BYTES or sys.platform != "linux":
        return np.zeros(shape, dtype=np.int64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=np.int64).reshape(shape)


class GlobalShadow(ShadowMemory):
    """Records of the accesses to one allocation of global memory.

    size_bytes: of the allocation. initialised: the host filled it. Memory is taken only for the
    granules that are used, 8 bytes for each and for each of its readers.
    """

    def __init__(self, size_bytes: int, granule_bytes: int, initialised: bool = False) -> None:
        super().__init__(-(-size_bytes // granule_bytes), granule_bytes)
        self._initialised = initialised
        self._writes = _untouched(self.granules)
        self._reads = _untouched(READERS, self.granules)
        self._describe(
            writes=self._writes.ctypes.data,
            reads=self._reads.ctypes.data,
            dropped=MUST_BE_INITIALISED if initialised else 0,
        )

    @property
    def initialised(self) -> bool:
        """Whether all of it was written before everything."""
        return self._initialised

    def mark_written(self, granules: NDArray[np.bool_]) -> None:
        """These were written before everything."""
        self._writes[granules] = GIVEN

    def never_written(self, offsets: Places, size_bytes: int) -> NDArray[np.bool_]:
        """Which units at byte offsets nothing has written any part of."""
        first = offsets // self.granule_bytes
        last = (offsets + size_bytes - 1) // self.granule_bytes
        states = [
            self._writes[first + k] == UNWRITTEN
            for k in range(int((last - first).max(initial=0)) + 1)
        ]
        return np.logical_and.reduce(states)

    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""
        self.reset(start, stop)
        self._writes[start:stop] = GIVEN

    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they are as at the start."""
        granules = self._check_range(start, stop)
        self._writes[granules] = UNWRITTEN
        self._reads[:, granules] = UNWRITTEN

    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Mine, is_write: bool
    ) -> int:
        if self._initialised:
            mine = mine._replace(word=mine.word & ~MUST_BE_INITIALISED)
        return _access(self.state_address, places, lanes, unit, mine, is_write)
