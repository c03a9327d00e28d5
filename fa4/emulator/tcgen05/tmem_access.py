"""tcgen05.ld and tcgen05.st: which cell of tensor memory each register of a warp holds.

PTX ISA 9.7.16.2.3 (shapes), 9.7.16.8.1 (a warp reaches only its quarter of the lanes), 9.7.16.8.2
(packing), 9.7.16.8.3 (tcgen05.ld and .red). All maps are (32 threads, registers).

The manual asks for an address in the warp's own quarter and does not say what another one does. It
does the same: the hardware takes the quarter from the number of the warp, and of the lane field
only what lies within a quarter (published: deepseek-ai/DeepGEMM, pull request 341, whose kernels
give the same address to all warps; assumed for lane fields of 128 and above, which other kernels
compute from the number of a warp of a second warpgroup). The check at run time that -G compiles
into a kernel stops it; `names_own_lanes` is that check.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import (
    WARP_LANES,
    Indices,
    TmemAddress,
    Words,
    check_columns,
)

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_REGISTERS = 128


@dataclass(frozen=True)
class _Shape:
    """lanes and columns: of the .x1 access; registers: per thread of the .x1 access."""

    lanes: int
    columns: int
    registers: int


_SHAPES = {
    "32x32b": _Shape(32, 1, 1),
    "16x64b": _Shape(16, 2, 1),
    "16x128b": _Shape(16, 4, 2),
    "16x256b": _Shape(16, 8, 4),
    "16x32bx2": _Shape(16, 1, 1),
}


class AccessMap(NamedTuple):
    """Lane and column of each register, (32, registers); with packing, of each half register."""

    lanes: Indices
    columns: Indices


def register_count(shape: str, count: int) -> int:
    """Registers per thread (PTX ISA Table 49). Raises TmemError if there is no such access."""
    if shape not in _SHAPES:
        raise TmemError(f"shape .{shape} does not exist; there are {', '.join(_SHAPES)}")
    registers = _SHAPES[shape].registers * count
    if count not in _COUNTS or registers > _MAX_REGISTERS:
        raise TmemError(f"shape .{shape} has no .x{count}")
    return registers


@lru_cache(maxsize=4096)
def access_map(
    shape: str,
    count: int,
    warp_in_group: int,
    address: int,
    half_split: int | None = None,
    packed: bool = False,
) -> AccessMap:
    """Cells that a warp's tcgen05.ld or .st touches.

    warp_in_group: warp id modulo 4, the quarter. address: as in the register; the quarter in it
    does not count. half_split: columns from the first to the second half of .16x32bx2, for that
    shape only. packed: .pack::16b/.unpack::16b; then each register stands for two neighbouring
    columns and the maps are (32, 2 * registers). Raises TmemError if the access does not exist,
    leaves the columns, or starts within a quarter where its shape cannot.
    """
    registers = register_count(shape, count)
    if (half_split is not None) != (shape == "16x32bx2"):
        raise TmemError("a half-split offset belongs to .16x32bx2, and only to it")
    start = _own_place(shape, warp_in_group, address)
    rows, columns = _relative_map(shape, registers)
    if packed:
        rows = rows.repeat(2, axis=1)
        columns = (2 * columns[:, :, None] + np.arange(2)).reshape(rows.shape)
    columns = columns + start.column
    if half_split is not None:
        columns[16:] += half_split
        if columns[16:].min() < 0:
            raise TmemError(f"half-split offset {half_split} reaches a negative column")
    check_columns(f"tcgen05 access .{shape}.x{count}", int(columns.max()), 1)
    result = AccessMap(rows + start.lane, columns)
    for array in result:
        array.flags.writeable = False
    return result


def names_own_lanes(warp_in_group: int, address: int) -> bool:
    """Whether an address lies in the quarter of a warp, as the manual asks (9.7.16.8.1)."""
    return (address >> 16 & 0xFFFF) // WARP_LANES == warp_in_group


def _own_place(shape: str, warp_in_group: int, address: int) -> TmemAddress:
    """The place in the warp's quarter that an address stands for."""
    lane, lanes = (address >> 16) % WARP_LANES, _SHAPES[shape].lanes
    if lane % lanes:
        raise TmemError(
            f"tcgen05 access .{shape} at lane {lane} of a quarter: it must start at "
            + " or ".join(str(first) for first in range(0, WARP_LANES, lanes))
        )
    return TmemAddress.decode(WARP_LANES * warp_in_group + lane << 16 | address & 0xFFFF)


@lru_cache(maxsize=64)
def _relative_map(shape: str, registers: int) -> tuple[Indices, Indices]:
    """Rows and columns relative to the address (second half of .16x32bx2: to its own start)."""
    thread = np.arange(32, dtype=np.int64)[:, None]
    register = np.arange(registers, dtype=np.int64)[None, :]
    quad, in_quad = thread // 4, thread % 4
    if shape == "32x32b":
        row, column = thread, register
    elif shape == "16x32bx2":
        row, column = thread % 16, register
    elif shape == "16x64b":
        row, column = quad + 8 * (in_quad % 2), in_quad // 2 + 2 * register
    elif shape == "16x128b":
        row, column = quad + 8 * (register % 2), in_quad + 4 * (register // 2)
    else:
        row = quad + 8 * (register // 2 % 2)
        column = 2 * in_quad + register % 2 + 8 * (register // 4)
    rows, columns = np.broadcast_arrays(row, column)
    return rows.copy(), columns.copy()


def pack16(values: Words) -> Words:
    """.pack::16b: low halves of neighbouring columns into one register, (..., 2 r) -> (..., r)."""
    return values[..., 0::2] & np.uint32(0xFFFF) | values[..., 1::2] << np.uint32(16)


def unpack16(values: Words) -> Words:
    """.unpack::16b: halves of a register for neighbouring columns, (..., r) -> (..., 2 r).

    The high halves of the columns become zero.
    """
    halves = np.stack([values & np.uint32(0xFFFF), values >> np.uint32(16)], axis=-1)
    return halves.reshape(*values.shape[:-1], -1)


def load(tmem: Words, cells: AccessMap, packed: bool = False) -> Words:
    """tcgen05.ld: registers (32, r)."""
    values = tmem[cells.lanes, cells.columns]
    return pack16(values) if packed else values


def store(tmem: Words, cells: AccessMap, values: Words, packed: bool = False) -> None:
    """tcgen05.st of registers (32, r)."""
    tmem[cells.lanes, cells.columns] = unpack16(values) if packed else values


def reduce_registers(
    values: Words, operation: str, element: str, absolute: bool = False, nan: bool = False
) -> Words:
    """redval of tcgen05.ld.red: the minimum or maximum of each thread's registers, (32,).

    operation: "min" or "max"; element: "f32", "u32" or "s32"; absolute (.abs) and nan (.NaN) are
    for f32. As for min.f32, a NaN counts only with .NaN or if there is nothing else, and +0 > -0.
    Raises TmemError for other combinations, and for a single register (.x1).
    """
    if operation not in ("min", "max") or element not in ("f32", "u32", "s32"):
        raise TmemError(f"tcgen05.ld.red has no .{operation}.{element}")
    if (absolute or nan) and element != "f32":
        raise TmemError("tcgen05.ld.red: .abs and .NaN are for .f32")
    if values.shape[1] < 2:
        raise TmemError("tcgen05.ld.red needs at least .x2")
    pick = np.min if operation == "min" else np.max
    if element != "f32":
        typed = values.view(np.int32) if element == "s32" else values
        reduced: Words = pick(typed, axis=1).astype(np.uint32)
        return reduced
    if absolute:
        values = values & np.uint32(0x7FFFFFFF)
    # The order of the numbers is that of sign-magnitude integers: exact, and it parts +0 from -0.
    magnitude = (values & np.uint32(0x7FFFFFFF)).astype(np.int64)
    order = np.where(values >> np.uint32(31), -magnitude - 1, magnitude)
    is_nan = magnitude > 0x7F800000
    worst = 2**40 if operation == "min" else -(2**40)
    best = pick(np.where(is_nan, worst, order), axis=1)
    words = np.where(best < 0, (-best - 1) | 0x80000000, best) & 0xFFFFFFFF
    no_number = is_nan.any(axis=1) if nan else is_nan.all(axis=1)
    return np.where(no_number, 0x7FFFFFFF, words).astype(np.uint32)
