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
    BY_LANES,
    CLUSTER,
    EPOCH,
    FIELDS,
    FIRST_ROW,
    NEVER,
    NOBODY,
    OUTSIDE,
    WAR,
    WHO,
    WORD,
    Mine,
    check_writes,
    equally_strong,
    fill,
    outside,
    part,
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

    writes: np.ndarray  # uint32 (granules, FIELDS): the last write
    # uint32 (READERS, granules, FIELDS): the reads since, the last one first; those behind a record
    # whose WHO is NEVER do not count
    reads: np.ndarray
    found: np.ndarray  # int64 (FOUND_FIELDS,)


@part
def _check_reads(records: Any, granules: Any, lanes: Any, mine: Any) -> None:
    """Compare a write with the reads of each granule since its last write, the latest first."""
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        for k in range(READERS):
            reads = records.reads[k]
            if reads[granule, WHO] == NEVER:
                break
            other = unordered(reads, granule, mine, lane)
            if other >= 0:
                report(records.found, np.int64(WAR), reads, granule, lane, other)


@part
def _record_read(reads: Any, granules: Any, lanes: Any, mine: Any) -> None:
    """Keep a read; those of a row in the same epoch are one record, of several lanes."""
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        mask = 1 << lane
        if reads[0, granule, WHO] == NEVER or _same_time(reads[0], granule, mine):
            if reads[0, granule, WHO] != NEVER:
                mask |= np.int64(reads[0, granule, BY_LANES])
        else:
            mask = _make_room(reads, granule, lane, mine)
        fill(reads[0], granule, mine, mask)


@part
def _same_time(records: Any, at: int, mine: Any) -> bool:
    """Was a record made by my row in my epoch, as strongly?"""
    return (
        records[at, EPOCH] == mine.epoch
        and records[at, WHO] == mine.row + FIRST_ROW
        and records[at, CLUSTER] == mine.cluster
        and equally_strong(records[at, WORD], mine)
    )


@part
def _make_room(reads: Any, granule: int, lane: int, mine: Any) -> Any:
    """Move the records of a granule on by one place, without those that my read stands for; the
    lanes of my record."""
    mask, kept = np.int64(1) << lane, 0
    for k in range(READERS):
        if reads[k, granule, WHO] == NEVER:
            break
        if _same_time(reads[k], granule, mine):
            mask |= np.int64(reads[k, granule, BY_LANES])
        elif not _stands_for(reads[k], granule, lane, mask, mine):
            _copy(reads, kept, k, granule)
            kept += 1
    if kept + 1 < READERS:
        reads[kept + 1, granule, WHO] = NEVER
    for k in range(min(kept, READERS - 1), 0, -1):
        _copy(reads, k, k - 1, granule)
    return mask


@part
def _copy(reads: Any, into: int, source: int, granule: int) -> None:
    for field in range(FIELDS):
        reads[into, granule, field] = reads[source, granule, field]


@part
def _stands_for(records: Any, at: int, lane: int, mask: Any, mine: Any) -> bool:
    """Does my read stand for a recorded one: is whatever is ordered after mine ordered after it?"""
    if not equally_strong(records[at, WORD], mine):
        return False
    by_my_row = records[at, CLUSTER] == mine.cluster and records[at, WHO] == mine.row + FIRST_ROW
    if by_my_row and np.int64(records[at, BY_LANES]) & ~mask == 0:
        return True
    return not mine.word & STRONG and unordered(records, at, mine, lane) < 0


@part
def visit(records: Any, granules: Any, lanes: Any, mine: Any, is_write: bool, always: bool) -> None:
    """Compare an access, and record it if nothing is found, or always.

    records.found, 0 before, is its first conflict.
    """
    if is_write:  # a read still under way tells more than the write that it read
        _check_reads(records, granules, lanes, mine)
    check_writes(records.writes, records.found, granules, lanes, mine, is_write)
    if records.found[0] and not always:
        return
    if is_write:
        for granule in granules:
            records.reads[0, granule, WHO] = NEVER
        record_write(records.writes, granules, lanes, mine, records.found)
    else:
        _record_read(records.reads, granules, lanes, mine)


@numba.njit(cache=True)
def _access(records: Any, places: Any, lanes: Any, unit: Any, mine: Any, is_write: bool) -> int:
    """Check and record one access; the number of the kind of its first conflict, 0 if none.

    OUTSIDE: a granule is outside the memory; nothing is recorded.
    """
    records.found[0] = 0
    granules, lanes = spread(places, lanes, unit)
    if outside(records.writes, granules):
        return OUTSIDE
    visit(records, granules, lanes, mine, is_write, True)
    return records.found[0]


def _untouched(*shape: int) -> np.ndarray:
    """uint32 zeros that take memory only where they are written. Linux refuses to reserve more in
    one piece than the machine has, unless it is told that most will not be used."""
    size_bytes = 4 * math.prod(shape)
    if size_bytes < LARGE_BYTES or sys.platform != "linux":
        return np.zeros(shape, dtype=np.uint32)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=np.uint32).reshape(shape)


class GlobalShadow(ShadowMemory):
    """Records of the accesses to one allocation of global memory.

    size_bytes: of the allocation. initialised: the host filled it. Memory is taken only for the
    granules that are used, 20 bytes for each and for each of its readers.
    """

    def __init__(self, size_bytes: int, granule_bytes: int, initialised: bool = False) -> None:
        super().__init__(-(-size_bytes // granule_bytes), granule_bytes)
        self._initialised = initialised
        self._records = GlobalRecords(
            writes=_untouched(self.granules, FIELDS),
            reads=_untouched(READERS, self.granules, FIELDS),
            found=self._found,
        )
        self._describe(
            writes=self._records.writes.ctypes.data,
            reads=self._records.reads.ctypes.data,
            dropped=MUST_BE_INITIALISED if initialised else 0,
        )

    @property
    def initialised(self) -> bool:
        """Whether all of it was written before everything."""
        return self._initialised

    def mark_written(self, granules: NDArray[np.bool_]) -> None:
        """These were written before everything."""
        self._records.writes[granules, WHO] = NOBODY

    def never_written(self, offsets: Places, size_bytes: int) -> NDArray[np.bool_]:
        """Which units at byte offsets nothing has written any part of."""
        first = offsets // self.granule_bytes
        last = (offsets + size_bytes - 1) // self.granule_bytes
        states = [
            self._records.writes[first + k, WHO] == NEVER
            for k in range(int((last - first).max(initial=0)) + 1)
        ]
        return np.logical_and.reduce(states)

    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""
        self.reset(start, stop)
        self._records.writes[start:stop, WHO] = NOBODY

    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they are as at the start."""
        granules = self._check_range(start, stop)
        self._records.writes[granules] = NEVER
        self._records.reads[:, granules] = NEVER

    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Mine, is_write: bool
    ) -> int:
        if self._initialised:
            mine = mine._replace(word=mine.word & ~MUST_BE_INITIALISED)
        return _access(self._records, places, lanes, unit, mine, is_write)
