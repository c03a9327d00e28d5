"""Tensor maps that host code asks the driver for: cuTensorMapEncodeTiled and ...Im2col.

CuTe-DSL computes most maps itself; its low-level interface calls the driver.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import TypeVar

from fa4.emulator.errors import LaunchError
from fa4.emulator.tma.descriptor import TensorMap
from fa4.emulator.tma.im2col import Im2colMap

# In the order of the driver's enumerations (cuda.h).
ELEMENTS = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32",
    "tf32_ftz", "b4x16", "b4x16_p64", "b6x16_p32",
)  # fmt: skip
INTERLEAVES = (0, 16, 32)
# Span, and what stays together, in bytes; -1: with the 8-byte halves flipped, which is refused.
SWIZZLES = ((0, 16), (32, 16), (64, 16), (128, 16), (128, 32), (128, -1), (128, 64))
PROMOTIONS = 4
FILLS = (False, True)
# In word 1 of a map: as for sm_100a, and where the promotion to L2 lines stands. Both move no byte.
_SM100, _PROMOTION_BIT = 2, 17
T = TypeVar("T")


def encode_tiled(
    element: int, rank: int, address: int, arrays: Sequence[int], modes: Sequence[int]
) -> bytes:
    """The 128 bytes of a map, by the arguments of cuTensorMapEncodeTiled.

    arrays: addresses of the dimensions (uint64), their strides in bytes (uint64, from the second
    on), the box and the element strides (uint32). modes: interleave, swizzle, promotion, fill.
    Raises LaunchError or TensorMapError for what the driver, or the emulator, refuses.
    """
    return _tiled(element, rank, address, arrays, modes).encode()


def encode_im2col(
    element: int, rank: int, address: int, arrays: Sequence[int], sizes: tuple[int, int],
    modes: Sequence[int],
) -> bytes:  # fmt: skip
    """The 128 bytes of a map, by the arguments of cuTensorMapEncodeIm2col.

    arrays: addresses of the dimensions, their strides, the lower and the upper corner of the box
    (int32, of spatial dimensions), the element strides. sizes: channels of a pixel, pixels of a
    column. modes, errors: as `encode_tiled`.
    """
    if not 3 <= rank <= 5:
        raise LaunchError(f"cuTensorMapEncodeIm2col: rank {rank}, allowed are 3 to 5")
    dims, strides, lower, upper, steps = arrays
    box = (C.c_uint32 * rank)(sizes[0], *(1,) * (rank - 1))
    tensor = _tiled(element, rank, address, (dims, strides, C.addressof(box), steps), modes)
    first, last = (tuple((C.c_int32 * (rank - 2)).from_address(at)) for at in (lower, upper))
    return Im2colMap(tensor, first, last, sizes[1]).encode()


def _tiled(
    element: int, rank: int, address: int, arrays: Sequence[int], modes: Sequence[int]
) -> TensorMap:
    if not 1 <= rank <= 5:
        raise LaunchError(f"cuTensorMapEncodeTiled: rank {rank}, allowed are 1 to 5")
    kinds = ((C.c_uint64, rank), (C.c_uint64, rank - 1), (C.c_uint32, rank), (C.c_uint32, rank))
    dims, strides, box, steps = (
        tuple((kind * count).from_address(at)) if count else ()
        for at, (kind, count) in zip(arrays, kinds, strict=True)
    )
    interleave, swizzle, promotion, fill = modes
    span, atom = _choice("swizzle", swizzle, SWIZZLES)
    _choice("L2 promotion", promotion, range(PROMOTIONS))
    return TensorMap(
        address=address,
        element=_choice("data type", element, ELEMENTS),
        dims=dims,
        strides_bytes=strides,
        box=box,
        element_strides=steps,
        swizzle=span,
        swizzle_atom_bytes=atom,
        interleave=_choice("interleave", interleave, INTERLEAVES),
        fill_nan=_choice("out-of-bounds fill", fill, FILLS),
        hints=_SM100 | promotion << _PROMOTION_BIT,
    )


def _choice(what: str, code: int, values: Sequence[T], why: str = "") -> T:
    if not 0 <= code < len(values):
        allowed = f"0 to {len(values) - 1}{why}"
        raise LaunchError(f"cuTensorMapEncodeTiled: {what} {code}, allowed are {allowed}")
    return values[code]
