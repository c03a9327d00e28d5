"""Heads whose rows begin in the middle of a sector of memory are loaded from its start.

Memory gives sectors of 32 bytes. Where a head dimension is an odd multiple of 8 elements of 16
bits, every other head begins 16 bytes into one, and TMA is slower by up to a third (measured).
There a box begins 8 columns earlier, which TMA fills with zeros: no element of these is read. Its
products have as many columns as they have anyway, padded to a multiple of 16; those of zeros add
nothing to S, and give columns of O that are not stored.

Not where a sequence of keys may end before its tensor: of a box that begins before its map, TMA
touches the map's own address, and there the map begins in front of the tensor (`ending_views`).
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.tiles import WorkTile

SECTOR_BYTES = 32
SHIFT = 8  # columns: half of a sector


def halves(tensor: cute.Tensor, packed: bool) -> tuple[Int32, Int32, Int32]:
    """Of (batch, seqlen, heads, dim), or (total, heads, dim) where packed: halves of a sector that
    the first row begins at, and that a head and a batch entry move it."""
    stride = tensor.layout.stride
    first = Int32(tensor.iterator.toint() // (SECTOR_BYTES // 2) % 2)
    batch = Int32(0) if packed else Int32(stride[0] // SHIFT % 2)
    return first, Int32(stride[-2] // SHIFT % 2), batch


def shift_of(found: Any, tile: WorkTile) -> Int32 | int:
    """Columns by which a work tile's boxes begin earlier; found: of K or V, or None for never."""
    if found is None:
        return 0
    first, head, batch = found
    return (first + head * tile.head_k + batch * tile.batch) % 2 * SHIFT


def shifted(tensor: cute.Tensor, start: Any, shift: Int32 | int) -> cute.Tensor:
    """TMA's coordinates (rows, dim) from a row on, so many columns earlier."""
    return cute.domain_offset((start, -shift), tensor)
