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

from fa4.emulator.checks.conflict import ASYNC_PROXY
from fa4.emulator.checks.memory import Places, ShadowMemory, Unit
from fa4.emulator.checks.records import (
    BY_LANES,
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
    same,
    spread,
    unordered,
)
from fa4.emulator.masks import LANES

ROWS_PER_WORD = 32


class SharedRecords(NamedTuple):
    """The state of a shadow, for compiled code."""

    writes: np.ndarray  # uint32 (granules, FIELDS): the last write
    readers: np.ndarray  # uint32 (granules, words): mask of the rows that read it since
    reads: np.ndarray  # uint32 (rows, granules, FIELDS): the last read by that row
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
    good, good_lane = granules[0], -1
    for i in range(granules.size):
        granule, lane = granules[i], lanes[min(i, lanes.size - 1)]
        if not np.int64(records.readers[granule, word]) >> bit & 1:
            continue
        if lane == good_lane and same(reads, granule, good):
            continue
        other = unordered(reads, granule, mine, lane)
        if other >= 0:
            report(records.found, np.int64(WAR), reads, granule, lane, other)
        else:
            good, good_lane = granule, lane


@part
def _record_read(records: Any, granules: Any, lanes: Any, mine: Any) -> None:
    """Keep a read; reads of a row in the same epoch are one record, of several lanes."""
    reads, readers = records.reads[mine.row], records.readers
    word, bit = mine.row // ROWS_PER_WORD, 1 << mine.row % ROWS_PER_WORD
    for i in range(granules.size):
        granule, mask = granules[i], 1 << lanes[min(i, lanes.size - 1)]
        rows = np.int64(readers[granule, word])
        if rows & bit == 0:
            readers[granule, word] = rows | bit
        elif reads[granule, EPOCH] == mine.epoch and equally_strong(reads[granule, WORD], mine):
            mask |= np.int64(reads[granule, BY_LANES])
        fill(reads, granule, mine, mask)


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
            for word in range(records.readers.shape[1]):
                records.readers[granule, word] = 0
        record_write(records.writes, granules, lanes, mine, records.found)
    else:
        _record_read(records, granules, lanes, mine)


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


class Shadow(ShadowMemory):
    """Records of the accesses to the shared memory or tensor memory of a CTA.

    granules: how many. granule_bytes: bytes per granule, for the messages. rows: rows of actors
    in the cluster. Memory is taken only for the granules and rows that are used.
    """

    def __init__(self, granules: int, granule_bytes: int, rows: int) -> None:
        super().__init__(granules, granule_bytes)
        words = -(-rows // ROWS_PER_WORD)
        self._records = SharedRecords(
            writes=np.zeros((granules, FIELDS), dtype=np.uint32),
            readers=np.zeros((granules, words), dtype=np.uint32),
            reads=np.zeros((rows, granules, FIELDS), dtype=np.uint32),
            found=self._found,
        )
        self._describe(
            writes=self._records.writes.ctypes.data,
            readers=self._records.readers.ctypes.data,
            reads=self._records.reads.ctypes.data,
            rows=rows,
        )

    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""
        self.reset(start, stop)
        self._records.writes[start:stop, WHO] = NOBODY

    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they hold nothing."""
        granules = self._check_range(start, stop)
        self._records.writes[granules] = NEVER
        self._records.readers[granules] = 0

    def forget(self, granules: Places) -> None:
        """These granules hold nothing."""
        self._records.writes[granules] = NEVER
        self._records.readers[granules] = 0

    def written_by_async_proxy(self, granule: int) -> bool:
        """Whether the last write of a granule, if there was one, came through the async proxy."""
        record = self._records.writes[granule]
        return bool(record[WHO] >= FIRST_ROW and record[WORD] & ASYNC_PROXY)

    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Mine, is_write: bool
    ) -> int:
        rows = self._records.reads.shape[0]
        if mine.row >= rows or mine.known.shape[1] != rows * LANES:
            raise ValueError(f"row {mine.row} of {mine.known.shape[1] // LANES}, not of {rows}")
        return _access(self._records, places, lanes, unit, mine, is_write)
