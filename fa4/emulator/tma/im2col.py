"""Tensor maps of images, and which bytes an im2col copy moves (PTX ISA 5.5.4).

A tensor (C, W, H, D, N), dimension 0 first, with one to three spatial dimensions. A copy moves
`channels` of a column of `pixels`: from the pixel at its coordinates on, through a box of the
spatial dimensions, W first, then H, D and N, each spatial dimension in steps of its element stride.
To each pixel the instruction's offsets are added. What lies outside the tensor loads as the fill.

How the driver encodes such a map is not known: `encode` has a form of its own, which only
`cuTensorMapEncodeIm2col` of the emulator writes and only `decode` reads. Nothing here was compared
with a GPU.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.tma.descriptor import IM2COL_BIT, MAP_BYTES, TensorMap, TensorMapError, TmaError
from fa4.emulator.tma.transfer import (
    Transfer,
    check_operands,
    smem_addresses,
    unit_bytes_of,
    wrapped,
)

MOST_PIXELS = 1024
# Bits of a corner's coordinate, by the rank of the tensor (cuTensorMapEncodeIm2col).
CORNER_BITS = {3: 16, 4: 8, 5: 5}
MOST_OFFSET = 1 << 16
_MAGIC = b"fa4 im2col\0\0\0\0\0\0"
_PLACE = 64  # of what a map of images has more than a tiled one, in the bytes that those ignore
_FORM = "<I6i"

Pixels = NDArray[np.int64]


@dataclass(frozen=True)
class Im2colMap:
    """tensor: the map, whose box is `channels` of one pixel; its element strides are the steps
    along spatial dimensions. lower, upper: corners of the box, from the first and from the last
    pixel of each spatial dimension. pixels: of a column.

    Raises TensorMapError for what cuTensorMapEncodeIm2col forbids.
    """

    tensor: TensorMap
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    pixels: int

    def __post_init__(self) -> None:
        rank = self.tensor.rank
        if rank not in CORNER_BITS:
            raise TensorMapError("rank", rank, "3 to 5 of an image")
        if self.tensor.interleave or self.tensor.is_sub_byte:
            raise TensorMapError("image", self.tensor.element, "whole bytes without interleave")
        if prod(self.tensor.box[1:]) != 1:
            raise TensorMapError("box", self.tensor.box, "one pixel")
        if not 1 <= self.pixels <= MOST_PIXELS:
            raise TensorMapError("pixels per column", self.pixels, f"1 to {MOST_PIXELS}")
        half = 1 << CORNER_BITS[rank] - 1
        for name, corner in (("lower corner", self.lower), ("upper corner", self.upper)):
            if len(corner) != rank - 2 or not all(-half <= c < half for c in corner):
                allowed = f"{rank - 2} values from {-half} to {half - 1}"
                raise TensorMapError(name, corner, allowed)
        if min(self.extents) < 1:
            raise TensorMapError("corners", (self.lower, self.upper), "a box that has pixels")

    @property
    def extents(self) -> tuple[int, ...]:
        """Pixels of the box that are visited along each spatial dimension."""
        spans = (
            size + upper - lower
            for size, lower, upper in zip(
                self.tensor.dims[1:-1], self.lower, self.upper, strict=True
            )
        )
        return tuple(-(-s // t) for s, t in zip(spans, self.steps, strict=True))

    @property
    def steps(self) -> tuple[int, ...]:
        """From one visited pixel to the next along each spatial dimension."""
        return self.tensor.element_strides[1:-1]

    def encode(self) -> bytes:
        """128 bytes that `decode` reads back as this map."""
        raw = bytearray(self.tensor.encode())
        raw[8] |= IM2COL_BIT
        corners = [0] * 6
        corners[: len(self.lower)] = self.lower
        corners[3 : 3 + len(self.upper)] = self.upper
        more = struct.pack(_FORM, self.pixels, *corners)
        raw[_PLACE : _PLACE + len(more)] = more
        raw[-len(_MAGIC) :] = _MAGIC
        return bytes(raw)

    @staticmethod
    def decode(raw: bytes) -> Im2colMap:
        """The map in `raw` (128 bytes). Raises TensorMapError."""
        return _decode(bytes(raw))


@lru_cache(maxsize=256)
def _decode(raw: bytes) -> Im2colMap:
    if len(raw) != MAP_BYTES or not raw[8] & IM2COL_BIT:
        raise TensorMapError("mode", "tiled", "im2col, as the instruction is")
    if not raw.endswith(_MAGIC):
        allowed = "one of cuTensorMapEncodeIm2col in the emulator: another encoding is not known"
        raise TensorMapError("im2col map", "not known", allowed)
    tiled = bytearray(raw)
    tiled[8] &= ~IM2COL_BIT
    tensor = TensorMap.decode(bytes(tiled))
    pixels, *corners = struct.unpack_from(_FORM, raw, _PLACE)
    spatial = tensor.rank - 2
    return Im2colMap(tensor, tuple(corners[:spatial]), tuple(corners[3 : 3 + spatial]), pixels)


def plan_im2col(
    image: Im2colMap,
    coordinates: tuple[int, ...],
    offsets: tuple[int, ...],
    smem_base: int,
    store: bool = False,
) -> Transfer:
    """The copy of the column that begins at `coordinates` (elements, dimension 0 first).

    offsets: of the instruction, along each spatial dimension; none for stores. smem_base: absolute
    shared address, a multiple of 128. Raises TmaError for operands that do not fit.
    """
    tensor = image.tensor
    check_operands(tensor, coordinates, tensor.rank, smem_base, False)
    if len(offsets) != len(image.lower) or not all(0 <= o < MOST_OFFSET for o in offsets):
        allowed = f"{len(image.lower)} values from 0 to {MOST_OFFSET - 1}"
        raise TmaError("im2col offsets", offsets, allowed)
    unit_bytes = unit_bytes_of(tensor, coordinates[0])
    unit_elements = unit_bytes // tensor.element_bytes
    channel = coordinates[0] + np.arange(0, tensor.counts[0], unit_elements, dtype=np.int64)
    pixels = _visited(image, coordinates)
    pixels[:, :-1] += np.array(offsets, np.int64)
    inside = ((pixels >= 0) & (pixels < np.array(tensor.dims[1:]))).all(axis=1)
    strides = np.array(tensor.strides_bytes, np.int64)
    places = pixels @ strides + wrapped(tensor.address)
    return Transfer(
        unit_bytes,
        np.add.outer(places, channel * tensor.element_bytes).reshape(-1),
        np.logical_and.outer(inside, (channel >= 0) & (channel < tensor.dims[0])).reshape(-1),
        smem_addresses(tensor, len(pixels) * len(channel), unit_bytes, smem_base),
        len(pixels) * tensor.inner_bytes,
    )


def _visited(image: Im2colMap, coordinates: tuple[int, ...]) -> Pixels:
    """Coordinates from dimension 1 on of the pixels of a column, in order, without offsets."""
    *spatial, first_image = coordinates[1:]
    place, stride = 0, 1
    for at, lower, step, extent in zip(
        spatial, image.lower, image.steps, image.extents, strict=True
    ):
        number, rest = divmod(at - lower, step)
        if rest or not 0 <= number < extent:
            allowed = f"{lower} and {extent - 1} more in steps of {step}"
            raise TmaError("coordinate of a pixel", at, allowed)
        place += number * stride
        stride *= extent
    order = place + np.arange(image.pixels, dtype=np.int64)
    columns = []
    for lower, step, extent in zip(image.lower, image.steps, image.extents, strict=True):
        columns.append(lower + order % extent * step)
        order = order // extent
    return np.stack([*columns, first_image + order], axis=1)
