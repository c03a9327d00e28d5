"""What a tensor load writes to shared memory that is not a copy of global bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.tma.descriptor import TF32_CODES, TensorMap

# OOB-NaN (PTX ISA 5.5.3.3), the same in every 16 bits of every floating-point type, as an H200
# writes it: 0x7ff7.
NAN_HALF = b"\xf7\x7f"
TF32_NAN = 0x7FFFE000


def fill_pattern(tensor_map: TensorMap) -> bytes:
    """16 bytes of what a load writes out of bounds; a smaller unit takes its prefix."""
    return NAN_HALF * 8 if tensor_map.fill_nan else bytes(16)


def convert_loaded(tensor_map: TensorMap, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """In-bounds bytes as a load writes them: (n, unit_bytes), the same array if nothing changes.

    tf32 maps round each f32 to 10 bits of mantissa, to nearest even, keep subnormals and write one
    NaN (measured on an H200). All other types are copied bit for bit, f32_ftz too. Stores never
    convert.
    """
    if tensor_map.element not in TF32_CODES:
        return data
    bits = np.ascontiguousarray(data).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (np.where(nan, 0, bits) + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(TF32_NAN), rounded).view(np.uint8)
