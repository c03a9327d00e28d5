"""A warp's load or store in one compiled call, where nothing is unusual about it.

`transfer` takes the addresses from the registers, finds the memory behind them, compares the
access with the shadow, moves the bytes and records the access. Whatever it cannot do or would
have to report (a fault, a conflict, several memories, two lanes at one place) it leaves untouched
and answers MISSED: then the handlers of `fa4.emulator.isa.loads` do the whole of it. It knows the
state of the machine by address, from the records WARP, BUFFER, SHADOW and PLAN.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import types

from fa4.emulator.checks import global_shadow, shadow
from fa4.emulator.checks.records import SHADOW, Int, Mine, part, pointer
from fa4.emulator.machine.state_addresses import (
    ANY_SPACE,
    BUFFER,
    GLOBAL_SPACE,
    PLAN,
    REGISTER_32,
    REGISTER_64,
    SHARED_SPACE,
    WARP,
    WITH_RANK,
)
from fa4.emulator.translate.layout import LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW

DONE, MISSED = 0, 1
_LANES = 32
_kept: list[Any] = []  # whose machine code is in use


@part
def _get(at: int, size_bytes: Int, signed: Int) -> Any:
    """The integer of 1, 2, 4 or 8 bytes at an address."""
    if size_bytes == 4:
        if signed:
            return np.int64(numba.carray(pointer(at), 1, np.int32)[0])
        return np.int64(numba.carray(pointer(at), 1, np.uint32)[0])
    if size_bytes == 8:
        return numba.carray(pointer(at), 1, np.int64)[0]
    if size_bytes == 2:
        if signed:
            return np.int64(numba.carray(pointer(at), 1, np.int16)[0])
        return np.int64(numba.carray(pointer(at), 1, np.uint16)[0])
    if signed:
        return np.int64(numba.carray(pointer(at), 1, np.int8)[0])
    return np.int64(numba.carray(pointer(at), 1, np.uint8)[0])


@part
def _put(at: int, size_bytes: int, value: Any) -> None:
    """Writes the low 1, 2, 4 or 8 bytes of an integer."""
    if size_bytes == 4:
        numba.carray(pointer(at), 1, np.uint32)[0] = np.uint32(value)
    elif size_bytes == 8:
        numba.carray(pointer(at), 1, np.int64)[0] = value
    elif size_bytes == 2:
        numba.carray(pointer(at), 1, np.uint16)[0] = np.uint16(value)
    else:
        numba.carray(pointer(at), 1, np.uint8)[0] = np.uint8(value)


@part
def _addresses(warp: Any, plan: Any, lanes: Any) -> Any:
    """The address of each lane's unit (PTX ISA 5.1); 32-bit ones wrap at 32 bits."""
    found = np.empty(lanes.size, np.int64)
    at, fixed = warp.registers + plan.register, plan.fixed
    if plan.base == REGISTER_32:
        for i in range(lanes.size):
            found[i] = (_get(at + 4 * lanes[i], np.int64(4), np.int64(0)) + fixed) & 0xFFFF_FFFF
    elif plan.base == REGISTER_64:
        for i in range(lanes.size):
            found[i] = _get(at + 8 * lanes[i], np.int64(8), np.int64(0)) + fixed
    else:
        for i in range(lanes.size):
            found[i] = fixed + (warp.shared_base if plan.base == WITH_RANK else 0)
    return found


@part
def _buffer_at(table: Any, address: int) -> int:
    """The index of the BUFFER that holds an address, as Memory.find, or -1."""
    low, high = 0, table.size
    while low < high:
        middle = (low + high) // 2
        if table[middle].start <= address:
            low = middle + 1
        else:
            high = middle
    index = low - 1
    while index >= 0 and address >= table[index].end:
        index -= 1
    return index


@part
def _memory_at(warp: Any, plan: Any, low: int, high: int) -> Any:
    """(address of the unit at byte 0, where that byte is, shadow, whether it is shared memory) of
    the memory that holds all units from `low` to `high`. The second is 0 if there is none."""
    nothing = (0, 0, 0, False)
    if plan.space != SHARED_SPACE and low < LOCAL_WINDOW:
        header = numba.carray(pointer(warp.buffers), 2, np.int64)
        table = numba.carray(pointer(header[0]), header[1], BUFFER)
        index = _buffer_at(table, low)
        if index < 0 or high > table[index].end - plan.size_bytes:
            return nothing
        if plan.is_write and not table[index].writable:
            return nothing
        return table[index].start, table[index].data, table[index].shadow, False
    if plan.space == GLOBAL_SPACE:
        return nothing
    base = warp.shared_base
    if plan.space == ANY_SPACE or low >= SHARED_WINDOW:
        base += SHARED_WINDOW
    if low < base + SHARED_BASE or high > base + warp.shared_end - plan.size_bytes:
        return nothing
    return base, warp.smem, warp.shadow, True


@part
def _twice(offsets: Any) -> bool:
    """Whether two units are the same."""
    ascending = True
    for i in range(1, offsets.size):
        ascending &= offsets[i - 1] < offsets[i]
    if ascending:
        return False
    for i in range(offsets.size):
        same = False
        for j in range(i):
            same |= offsets[i] == offsets[j]
        if same:
            return True
    return False


@part
def _move(warp: Any, plan: Any, lanes: Any, first: Any) -> None:
    """Moves the words of all lanes; first: where the unit of each lane is."""
    word_bytes, signed = plan.word_bytes, plan.signed
    for k in range(plan.words):
        place, stride, width = plan.places[k], plan.strides[k], plan.widths[k]
        at = warp.registers + place
        if plan.is_write:
            for i in range(lanes.size):
                value = plan.constants[k]
                if place >= 0:
                    value = _get(at + lanes[i] * stride, word_bytes, np.int64(0))
                _put(first[i] + k * word_bytes, word_bytes, value)
        elif place >= 0:
            for i in range(lanes.size):
                value = _get(first[i] + k * word_bytes, word_bytes, signed)
                _put(at + lanes[i] * stride, width, value)


@part
def _mine(warp: Any, state: Any, plan: Any, epoch: int, known_from: int) -> Any:
    """The warp as an actor. What it knows of other clusters is left out: that is for the general
    way to look at."""
    nothing = pointer(warp.known)
    return Mine(
        warp.row,
        epoch,
        0,
        plan.access & ~state.dropped,
        warp.cluster,
        known_from,
        numba.carray(pointer(warp.known), (2, warp.ids), np.int32),
        numba.carray(nothing, (0, 2), np.int64),
        numba.carray(nothing, (2, 0), np.int32),
    )


@part
def _admitted(
    at: int, is_shared: bool, offsets: Any, lanes: Any, warp: Any, plan: Any, clock: Any
) -> bool:
    """Whether the shadow at an address has nothing against an access; then it is recorded."""
    state = numba.carray(pointer(at), 1, SHADOW)[0]
    unit = (state.granule_bytes, max(plan.size_bytes // state.granule_bytes, 1))
    mine = _mine(warp, state, plan, clock[0], clock[1])
    if is_shared:
        return shadow.visit(at, offsets, lanes, unit, mine, plan.is_write != 0, False) == 0
    return global_shadow.visit(at, offsets, lanes, unit, mine, plan.is_write != 0, False) == 0


@part
def _lanes_of(mask: int) -> Any:
    lanes = np.empty(_LANES, np.int64)
    count = 0
    for lane in range(_LANES):
        if mask >> lane & 1:
            lanes[count] = lane
            count += 1
    return lanes[:count]


@part
def _transfer(warp: Any, plan: Any, mask: int, epoch: int, known_from: int) -> int:
    lanes = _lanes_of(mask)
    addresses = _addresses(warp, plan, lanes)
    low = high = bits = addresses[0]
    for address in addresses:
        low, high, bits = min(low, address), max(high, address), bits | address
    if bits & (plan.size_bytes - 1):
        return MISSED
    base, data, shadow_at, is_shared = _memory_at(warp, plan, low, high)
    if not data:
        return MISSED
    for i in range(addresses.size):
        addresses[i] -= base
    if plan.is_write and _twice(addresses):
        return MISSED
    if warp.shadow:
        clock = (epoch, known_from)
        if not shadow_at or not _admitted(
            shadow_at, is_shared, addresses, lanes, warp, plan, clock
        ):
            return MISSED
    for i in range(addresses.size):
        addresses[i] += data
    _move(warp, plan, lanes, addresses)
    return DONE


@cache
def transfer() -> Any:
    """The compiled function (WARP, PLAN: addresses; mask of lanes; the warp's epoch and
    known_from) -> DONE or MISSED, as a C function."""
    signature = types.int32(*(types.int64 for _ in range(5)))

    def enter(warp: int, plan: int, mask: int, epoch: int, known_from: int) -> int:
        here = numba.carray(pointer(warp), 1, WARP)[0]
        planned = numba.carray(pointer(plan), 1, PLAN)[0]
        return _transfer(here, planned, mask, epoch, known_from)

    compiled: Any = numba.cfunc(signature, cache=True)(enter)

    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_int64 for _ in range(5)))
    _kept.append(compiled)
    return prototype(compiled.address)
