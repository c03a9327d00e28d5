"""Which bytes one TMA copy moves: pairs of global and shared addresses (PTX ISA 5.5.3).

`plan_tile` is the main path. What depends on the map alone is computed once and cached, so that a
copy costs two additions on arrays, and a bounds check per dimension where the box crosses an edge.
Where the manual is silent (narrow swizzled rows, edges that cut a chunk, what traps), this follows
an H200, compared copy by copy on random maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.tma.descriptor import (
    PADDED_BOX,
    SUB_BYTE,
    TensorMap,
    TensorMapError,
    TmaError,
)
from fa4.emulator.tma.swizzle import PERIOD_BYTES, swizzle_addresses

CHUNK_BYTES = 16  # the swizzles move whole chunks
SMEM_ALIGN_BYTES = 128  # of the shared address of a tensor copy (CUDA programming guide, TMA)


@dataclass(frozen=True)
class Transfer:
    """One copy as units of `unit_bytes` (a power of two up to 16), contiguous on both sides.

    global_addresses, smem_addresses: (n,) absolute byte addresses, in the order of the box
    (dimension 0 innermost); both are multiples of the unit. valid: (n,) False where a load fills
    the unit with `fill_pattern` and a store drops it (its global address means nothing then).
    total_bytes: what complete_tx counts, the whole box. The arrays may be shared between transfers
    and must not be written to.
    """

    unit_bytes: int
    global_addresses: NDArray[np.int64]
    valid: NDArray[np.bool_]
    smem_addresses: NDArray[np.int64]
    total_bytes: int


def plan_tile(
    tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int, store: bool = False
) -> Transfer:
    """The copy of the box at `coordinates` (elements, dimension 0 first).

    smem_base: absolute shared address, a multiple of 128. Loads may start at negative coordinates.
    Stores (and reductions) may not, and write a 16-byte chunk whole if its first element is in
    bounds, so that they reach past the end of dimension 0 when that is no multiple of 16 bytes.

    Raises TmaError for coordinates of another rank, a start of the box that is not 16-byte aligned,
    negative coordinates of a store (the hardware traps on these two), or a misaligned smem_base;
    TensorMapError for interleaved maps.
    """
    if tensor_map.is_sub_byte:
        return _plan_sub_byte(tensor_map, coordinates, smem_base, store)
    check_operands(tensor_map, coordinates, tensor_map.rank, smem_base, store)
    inside = all(
        c >= 0 and c + (n - 1) * s < d
        for c, n, s, d in zip(
            coordinates, tensor_map.counts, tensor_map.steps, tensor_map.dims, strict=True
        )
    )
    unit_bytes = CHUNK_BYTES if inside or store else unit_bytes_of(tensor_map, coordinates[0])
    offsets = _global_offsets(tensor_map, unit_bytes)
    start = tensor_map.address + coordinates[0] * tensor_map.element_bytes
    for coordinate, stride in zip(coordinates[1:], tensor_map.strides_bytes, strict=True):
        start += coordinate * stride
    return Transfer(
        unit_bytes,
        offsets + wrapped(start),
        _all_true(offsets.size) if inside else _in_bounds(tensor_map, coordinates, unit_bytes),
        smem_addresses(tensor_map, offsets.size, unit_bytes, smem_base),
        tensor_map.box_bytes,
    )


def _plan_sub_byte(
    tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int, store: bool
) -> Transfer:
    """Of types below a byte: 4-bit elements as they are, or 16 elements to 16 bytes, padded.

    What is in the padding is left as it was.
    """
    bits, shared_bits = SUB_BYTE[tensor_map.element]
    places = (coordinates[0] * bits // 8, *coordinates[1:])
    packed = tensor_map.of_bytes(bits, tensor_map.swizzle if shared_bits == bits else 0)
    if shared_bits == bits:
        _require_multiple(coordinates[0], 32, tensor_map.element)
        return plan_tile(packed, places, smem_base, store)
    if store:
        raise TensorMapError("element", tensor_map.element, "a whole byte, or b4x16, for stores")
    _require_multiple(coordinates[0], PADDED_BOX, tensor_map.element)
    check_operands(packed, places, packed.rank, smem_base, store)
    unit_bytes = gcd(2 * bits, 8)
    offsets = _global_offsets(packed, unit_bytes)
    start = packed.address + places[0]
    for coordinate, stride in zip(places[1:], packed.strides_bytes, strict=True):
        start += coordinate * stride
    whole = tensor_map.of_bytes(shared_bits, tensor_map.swizzle)
    of_unit = 2 * bits // unit_bytes
    chunks = smem_addresses(whole, offsets.size // of_unit, CHUNK_BYTES, smem_base)
    return Transfer(
        unit_bytes,
        offsets + wrapped(start),
        _in_bounds(packed, places, unit_bytes),
        np.add.outer(chunks, np.arange(of_unit) * unit_bytes).reshape(-1),
        packed.box_bytes,  # without padding, as Triton counts them
    )


def _require_multiple(coordinate: int, of: int, element: str) -> None:
    if coordinate % of:
        raise TmaError("coordinate 0", coordinate, f"a multiple of {of} for {element}")


def plan_gather4(
    tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int, store: bool = False
) -> Transfer:
    """The copy of `.tile::gather4`: four rows of a 2D tensor, one below the other in shared memory.

    coordinates: (column, row 0, ..., row 3). The map's box is one row high. Raises as `plan_tile`.
    """
    if tensor_map.is_sub_byte:
        raise TensorMapError("element", tensor_map.element, "a whole byte or more for gather4")
    check_operands(tensor_map, coordinates, 5, smem_base, store)
    if tensor_map.rank != 2:
        raise TensorMapError("rank", tensor_map.rank, "2 for gather4 and scatter4")
    if tensor_map.box[1] != 1:
        raise TensorMapError("box", tensor_map.box, "1 row for gather4 and scatter4")
    column, *rows = coordinates
    unit_bytes = CHUNK_BYTES if store else unit_bytes_of(tensor_map, column)
    row_offsets = _global_offsets(tensor_map, unit_bytes)
    start = tensor_map.address + column * tensor_map.element_bytes
    starts = [wrapped(start + row * tensor_map.strides_bytes[0]) for row in rows]
    return Transfer(
        unit_bytes,
        np.add.outer(np.array(starts, np.int64), row_offsets).reshape(-1),
        np.concatenate([_in_bounds(tensor_map, (column, row), unit_bytes) for row in rows]),
        smem_addresses(tensor_map, len(rows) * row_offsets.size, unit_bytes, smem_base),
        len(rows) * tensor_map.box_bytes,
    )


def plan_scatter4(tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int) -> Transfer:
    """The copy of `.tile::scatter4`: `plan_gather4` the other way, with the rules of stores.

    The order in which equal rows are written is not defined.
    """
    return plan_gather4(tensor_map, coordinates, smem_base, store=True)


def check_bulk(address: int, size_bytes: int) -> None:
    """Raises TmaError unless a plain bulk copy accepts the address and the size.

    Both are multiples of 16 (PTX ISA 9.7.9.25.4.1, cp.async.bulk); call once for each side.
    """
    if address % 16:
        raise TmaError("bulk copy address", hex(address), "a multiple of 16")
    if size_bytes % 16 or size_bytes < 0:
        raise TmaError("bulk copy size", size_bytes, "a multiple of 16 bytes")


def check_operands(
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    expected: int,
    smem_base: int,
    store: bool,
) -> None:
    """Raises TmaError for coordinates or a shared address that no copy has."""
    if len(coordinates) != expected:
        raise TmaError("number of coordinates", len(coordinates), f"{expected} for this map")
    if tensor_map.interleave:
        raise TensorMapError("interleave", tensor_map.interleave, "0 (others are not supported)")
    if smem_base % SMEM_ALIGN_BYTES or smem_base < 0:
        raise TmaError("shared address", hex(smem_base), f"a multiple of {SMEM_ALIGN_BYTES}")
    if coordinates[0] * tensor_map.element_bytes % CHUNK_BYTES:
        elements = CHUNK_BYTES // tensor_map.element_bytes
        raise TmaError(
            "coordinate 0",
            coordinates[0],
            f"a multiple of {elements} (16 bytes of {tensor_map.element})",
        )
    if store and min(coordinates) < 0:
        raise TmaError("coordinates", coordinates, "not negative for a store")


def wrapped(address: int) -> int:
    """The address as int64. Far out of bounds it exceeds 64 bits, where nothing reads it."""
    return (address + (1 << 63)) % (1 << 64) - (1 << 63)


def unit_bytes_of(tensor_map: TensorMap, column: int) -> int:
    """The largest unit of a load that the end of dimension 0 does not cut."""
    end = tensor_map.dims[0] - column
    cut = 0 < end < tensor_map.counts[0]
    return gcd(CHUNK_BYTES, end * tensor_map.element_bytes) if cut else CHUNK_BYTES


@lru_cache(maxsize=256)
def _global_offsets(tensor_map: TensorMap, unit_bytes: int) -> NDArray[np.int64]:
    """Global address of each unit of the box, relative to the first element."""
    inner_bytes = tensor_map.counts[0] * tensor_map.element_bytes
    offsets = np.arange(0, inner_bytes, unit_bytes, dtype=np.int64)
    for d in range(1, tensor_map.rank):
        step = tensor_map.strides_bytes[d - 1] * tensor_map.steps[d]
        steps = np.arange(tensor_map.counts[d], dtype=np.int64) * step
        offsets = np.add.outer(steps, offsets).reshape(-1)
    return _frozen(offsets)


def smem_addresses(
    tensor_map: TensorMap, units: int, unit_bytes: int, smem_base: int
) -> NDArray[np.int64]:
    """Shared address of each unit of a box, or column, of so many units."""
    phase = smem_base % PERIOD_BYTES
    return _smem_offsets(tensor_map, units, unit_bytes, phase) + (smem_base - phase)


@lru_cache(maxsize=256)
def _smem_offsets(
    tensor_map: TensorMap, units: int, unit_bytes: int, phase: int
) -> NDArray[np.int64]:
    """Shared address of each unit, for a box that starts at `phase`."""
    row_units = tensor_map.counts[0] * tensor_map.element_bytes // unit_bytes
    rows = np.arange(
        phase,
        phase + units // row_units * tensor_map.row_pitch_bytes,
        tensor_map.row_pitch_bytes,
        dtype=np.int64,
    )
    linear = np.add.outer(rows, np.arange(row_units, dtype=np.int64) * unit_bytes).reshape(-1)
    return _frozen(swizzle_addresses(linear, tensor_map.swizzle, tensor_map.swizzle_atom_bytes))


def _in_bounds(
    tensor_map: TensorMap, coordinates: tuple[int, ...], unit_bytes: int
) -> NDArray[np.bool_]:
    """Whether the first element of each unit lies in the tensor."""
    unit_elements = unit_bytes // tensor_map.element_bytes
    counts = (tensor_map.counts[0] // unit_elements, *tensor_map.counts[1:])
    steps = (unit_elements, *tensor_map.steps[1:])
    valid = np.ones(1, bool)
    for coordinate, count, step, size in zip(
        coordinates, counts, steps, tensor_map.dims, strict=True
    ):
        position = coordinate + np.arange(count, dtype=np.int64) * step
        valid = np.logical_and.outer((position >= 0) & (position < size), valid).reshape(-1)
    return valid


@lru_cache(maxsize=64)
def _all_true(count: int) -> NDArray[np.bool_]:
    valid = np.ones(count, bool)
    valid.flags.writeable = False
    return valid


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.flags.writeable = False
    return array
