"""The shadow of one CTA's shared memory or tensor memory: who last wrote and read each granule.

An access is ordered after a recorded one if the actor's vector of seen epochs has reached the
recorded epoch, or if the actor is the same. Otherwise it is a race. The record is updated in
either case, so that one fault does not report forever.

Exact up to the first race, but for these approximations, all towards fewer reports: a newer read
by a row replaces the row's older one, which matters only if other lanes made it; and a strong
write stands for those that it follows. A granule that is larger than the narrowest access would
confuse neighbours: the caller chooses it small enough.

Copies and products take whole chunks of 16 bytes. All granules of a chunk then have the same
records, which are kept once, in a cell of its own behind those of the granules, until an access to
a part of the chunk splits it. What is found is the same with a cell for each granule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

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
    first_kind,
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
from fa4.emulator.warp_lanes import LANES

ROWS_PER_WORD = 32
CHUNK_BYTES = 16


class SharedRecords(NamedTuple):
    """The state of a shadow, for compiled code."""

    writes: np.ndarray  # int64 (cells,): the last write
    readers: np.ndarray  # uint32 (cells, words): mask of the rows that read it since
    reads: np.ndarray  # int64 (rows, cells): the last read by that row
    split: np.ndarray  # uint8 (chunks,): whether its granules have cells of their own
    accesses: np.ndarray  # uint32 (room, FIELDS)
    found: np.ndarray  # int64: SHADOW's


@part
def _are_whole(places: Any, unit: Any, each: int) -> bool:
    """Whether units cover whole chunks, of so many granules each."""
    if each == 1 or unit[1] % each:
        return False
    for place in places:  # noqa: SIM110, a generator takes longer to compile
        if place & (unit[0] * each - 1):
            return False
    return True


@part
def _opened(split: Any, chunks: Any, lanes: Any, each: int) -> Any:
    """The cells of chunks, and their lanes: those of its granules for one that is split."""
    first = split.size * each
    is_split = False
    for chunk in chunks:
        is_split |= split[chunk - first] != 0
    if not is_split:
        return chunks, lanes
    cells, by = np.empty(chunks.size * each, np.int64), np.empty(chunks.size * each, np.int64)
    count = 0
    for i in range(chunks.size):
        chunk, of_granules = chunks[i], split[chunks[i] - first] != 0
        for k in range(each if of_granules else 1):
            cells[count] = (chunk - first) * each + k if of_granules else chunk
            by[count] = lanes[min(i, lanes.size - 1)]
            count += 1
    return cells[:count], by[:count]


@part
def _split(records: Any, granules: Any, each: int) -> None:
    """Give the granules of these ones' chunks cells of their own."""
    first = records.split.size * each
    for granule in granules:
        chunk = granule // each
        if records.split[chunk]:
            continue
        records.split[chunk] = 1
        for cell in range(chunk * each, chunk * each + each):
            records.writes[cell] = records.writes[first + chunk]
            for word in range(records.readers.shape[1]):
                records.readers[cell, word] = records.readers[first + chunk, word]
        for row in range(records.reads.shape[0]):
            if records.readers[first + chunk, row // ROWS_PER_WORD] >> row % ROWS_PER_WORD & 1:
                for cell in range(chunk * each, chunk * each + each):
                    records.reads[row, cell] = records.reads[row, first + chunk]


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
def _records(state: Any) -> Any:
    """The arrays that a SHADOW tells of."""
    cells, rows, chunks = state.cells, state.rows, state.chunks
    return SharedRecords(
        numba.carray(pointer(state.writes), cells, np.int64),
        numba.carray(pointer(state.readers), (cells, -(-rows // ROWS_PER_WORD)), np.uint32),
        numba.carray(pointer(state.reads), (rows, cells), np.int64),
        numba.carray(pointer(state.split), chunks, np.uint8),
        numba.carray(pointer(state.accesses), (state.room, FIELDS), np.uint32),
        state.found,
    )


@part
def visit(
    at: int, places: Any, lanes: Any, unit: Any, mine: Any, is_write: bool, always: bool
) -> int:
    """Compare an access with the shadow whose SHADOW is at an address, and record it if nothing is
    found, or always; the number of the kind of its first conflict, 0 if none.

    FULL: its list of accesses is; nothing is recorded.
    """
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    if state.listed == state.room:
        return FULL
    records, each = _records(state), state.chunk_granules
    first = records.split.size * each
    records.found[0, 0] = 0
    whole = _are_whole(places, unit, each)
    if whole:
        cells, by = spread(places, lanes, (unit[0] * each, unit[1] // each))
        cells = cells + first
        compared, compared_by = _opened(records.split, cells, by, each)
    else:
        cells, by = spread(places, lanes, unit)
        if each > 1:
            _split(records, cells, each)
        compared, compared_by = cells, by
    if is_write:  # a read still under way tells more than the write that it read
        _check_reads(records, compared, compared_by, mine)
    check_writes(records, compared, compared_by, mine, is_write)
    if records.found[0, 0] == 0 or always:
        record = listed(state, records.accesses, mine)
        if is_write:
            for cell in cells:
                for word in range(records.readers.shape[1]):
                    records.readers[cell, word] = 0
            if whole:
                for cell in cells:
                    records.split[cell - first] = 0
            record_write(records, cells, by, mine, record)
        else:
            _record_read(records, compared, compared_by, mine, record)
    for one in records.found[1 : 1 + records.found[0, 0]]:
        if one[1] >= first:
            one[1] = (one[1] - first) * each
    return first_kind(records)


@numba.njit(cache=True)
def _access(at: int, places: Any, lanes: Any, unit: Any, mine: Any, is_write: bool) -> int:
    """Check and record one access; as `visit`, or OUTSIDE: a granule is outside the memory."""
    if outside(places, unit, numba.carray(pointer(at), 1, SHADOW)[0].granules):
        return OUTSIDE
    return visit(at, places, lanes, unit, mine, is_write, True)


@numba.njit(cache=True)
def split_chunks(at: int, granules: Any) -> None:
    """Give the granules of some chunks cells of their own, in the shadow at an address."""
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    _split(_records(state), granules, state.chunk_granules)


class Shadow(ShadowMemory):
    """Records of the accesses to the shared memory or tensor memory of a CTA.

    granules: how many. granule_bytes: bytes per granule, for the messages. rows: rows of actors
    in the cluster. Memory is taken only for the granules and rows that are used.
    """

    def __init__(self, granules: int, granule_bytes: int, rows: int) -> None:
        super().__init__(granules, granule_bytes)
        self._rows = rows
        self._each = max(CHUNK_BYTES // granule_bytes, 1)
        chunks = -(-granules // self._each) if self._each > 1 else 0
        cells = chunks * (self._each + 1) if chunks else granules
        self._split = np.zeros(chunks, dtype=np.uint8)
        self._writes = np.zeros(cells, dtype=np.int64)
        self._readers = np.zeros((cells, -(-rows // ROWS_PER_WORD)), dtype=np.uint32)
        self._reads = np.zeros((rows, cells), dtype=np.int64)
        self._describe(
            writes=self._writes.ctypes.data,
            readers=self._readers.ctypes.data,
            reads=self._reads.ctypes.data,
            split=self._split.ctypes.data,
            chunk_granules=self._each,
            chunks=chunks,
            cells=cells,
            rows=rows,
        )

    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""
        self._check_range(start, stop)
        self._set(np.arange(start, stop), GIVEN)

    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they hold nothing."""
        self._check_range(start, stop)
        self._set(np.arange(start, stop), UNWRITTEN)

    def forget(self, granules: Places) -> None:
        """These granules hold nothing."""
        self._set(granules, UNWRITTEN)

    def _set(self, granules: Places, record: int) -> None:
        if len(self._split):
            split_chunks(self.state_address, granules)
        self._writes[granules] = record
        self._readers[granules] = 0

    def written_by_async_proxy(self, granule: int) -> bool:
        """Whether the last write of a granule, if there was one, came through the async proxy."""
        chunk = granule // self._each
        if len(self._split) and not self._split[chunk]:
            granule = len(self._split) * self._each + chunk
        record = int(self._writes[granule])
        return record > GIVEN and bool(self._accesses[record >> LANE_BITS, WORD] & ASYNC_PROXY)

    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Mine, is_write: bool
    ) -> int:
        if mine.row >= self._rows or mine.known.shape[1] != self._rows * LANES:
            of = mine.known.shape[1] // LANES
            raise ValueError(f"row {mine.row} of {of}, not of {self._rows}")
        return _access(self.state_address, places, lanes, unit, mine, is_write)
