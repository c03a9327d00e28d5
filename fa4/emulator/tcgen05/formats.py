"""Element formats of the tensor core: bytes to float64 values, results to 32-bit words.

Every operand format is a subset of float64, so that decoding is exact and the product of two
operands (at most 11 + 11 significant bits) is exact in float64 too.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.emulator.tcgen05.tmem import Bytes, Words

Values = npt.NDArray[np.float64]

# Written for any NaN, whatever its payload was: the canonical NaNs of the other PTX instructions.
CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)
CANONICAL_NAN_F16 = np.uint32(0x7FFF)


class Format(Enum):
    """An element type; the value is (name in PTX, bits of one value, bytes of its container)."""

    F16 = ("f16", 16, 2)
    BF16 = ("bf16", 16, 2)
    TF32 = ("tf32", 32, 4)
    F32 = ("f32", 32, 4)
    E4M3 = ("e4m3", 8, 1)
    E5M2 = ("e5m2", 8, 1)
    E2M3 = ("e2m3", 6, 1)
    E3M2 = ("e3m2", 6, 1)
    E2M1 = ("e2m1", 4, 1)
    E2M1_PACKED = ("e2m1, two to a byte", 4, 1)
    U8 = ("u8", 8, 1)
    S8 = ("s8", 8, 1)
    S32 = ("s32", 32, 4)

    def __str__(self) -> str:
        return self.value[0]

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return self.value[1]

    @property
    def container_bytes(self) -> int:
        """Bytes per element where elements are addressed: 1 for the 4-, 6- and 8-bit types."""
        return self.value[2]

    @property
    def used_unit_bytes(self) -> int:
        """Of the 16 bytes of a unit in shared memory, those that hold elements; padding is last."""
        return 16 if self.bits >= 8 or self is Format.E2M1_PACKED else 2 * self.bits

    @property
    def per_container(self) -> int:
        """Elements of a container."""
        return 2 if self is Format.E2M1_PACKED else 1


_BYTE_TYPES: dict[Format, npt.DTypeLike] = {
    Format.E4M3: ml_dtypes.float8_e4m3fn,
    Format.E5M2: ml_dtypes.float8_e5m2,
    Format.E2M3: ml_dtypes.float6_e2m3fn,
    Format.E3M2: ml_dtypes.float6_e3m2fn,
    Format.E2M1: ml_dtypes.float4_e2m1fn,
    Format.U8: np.uint8,
    Format.S8: np.int8,
}


@cache
def _byte_table(element: Format) -> Values:
    """The value of each of the 256 bytes; bits above the format's are ignored."""
    codes = (np.arange(256) & ((1 << element.bits) - 1)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        return codes.view(_BYTE_TYPES[element]).astype(np.float64)


def _decode_bf16(data: Bytes) -> Values:
    widened = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32).astype(np.float64)


def _decode_tf32(data: Bytes) -> Values:
    # tf32 has 10 mantissa bits: the tensor core does not look at the low 13 bits of the word.
    return (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


_WIDE_DECODERS: dict[Format, Callable[[Bytes], Values]] = {
    Format.F16: lambda data: data.view(np.float16).astype(np.float64),
    Format.BF16: _decode_bf16,
    Format.TF32: _decode_tf32,
}


def unpack_padded(element: Format, data: Bytes) -> Bytes:
    """One code per byte, of 4- or 6-bit elements packed 16 to a 16-byte unit, padding last.

    The 16 elements fill the first 8 (4-bit) or 12 (6-bit) bytes of the unit, lowest bits first
    (PTX ISA 9.7.16.10.4.4 and 9.7.16.9.1). The last axis keeps its length.
    """
    used_bytes = 2 * element.bits
    packed = data.reshape(*data.shape[:-1], -1, 16)[..., :used_bytes]
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    codes = bits.reshape(*packed.shape[:-1], 16, element.bits)
    return np.packbits(codes, axis=-1, bitorder="little").reshape(data.shape)


def place_in_container(element: Format, codes: Bytes) -> Bytes:
    """Codes as tensor memory holds them, one to a byte (PTX ISA 9.7.16.10.4.3).

    6-bit codes lie in bits 5-0 and 4-bit codes in bits 5-2; the remaining bits are zero.
    """
    return codes << np.uint8(2) if element is Format.E2M1 else codes


def decode_shared(element: Format, data: Bytes) -> Values:
    """Values of operand bytes in shared memory; the last axis is whole 16-byte units."""
    if element in _WIDE_DECODERS:
        return _decode_wide(element, data)
    if element is Format.E2M1_PACKED:
        pairs = np.stack([data & np.uint8(15), data >> np.uint8(4)], -1)
        return _byte_table(Format.E2M1).take(pairs.reshape(*data.shape[:-1], -1))
    codes = unpack_padded(element, data) if element.bits < 8 else data
    return _byte_table(element).take(codes)


def decode_tensor(element: Format, words: Words) -> Values:
    """Values of operand A in tensor memory; elements are packed in the columns, lowest first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if element in _WIDE_DECODERS:
        return _decode_wide(element, data)
    codes = data >> np.uint8(2) if element is Format.E2M1 else data
    return _byte_table(element).take(codes)


def _decode_wide(element: Format, data: Bytes) -> Values:
    with np.errstate(invalid="ignore"):  # a signalling NaN is as good an operand as any
        return _WIDE_DECODERS[element](data)


def decode_accumulator(element: Format, words: Words) -> Values:
    """Values of matrix D: one element per 32-bit column, 16-bit ones in the low half."""
    with np.errstate(invalid="ignore"):
        if element is Format.F16:
            return words.astype(np.uint16).view(np.float16).astype(np.float64)
        if element is Format.S32:
            return words.view(np.int32).astype(np.float64)
        return words.view(np.float32).astype(np.float64)


def encode_accumulator(element: Format, values: Values, saturate: bool) -> Words:
    """Words of matrix D, rounded once to nearest even; 16-bit results leave the high half zero.

    s32 results are exact in float64; they wrap around, or clamp with saturate.
    """
    if element is Format.S32:
        exact = values.astype(np.int64)
        if saturate:
            exact = exact.clip(-(2**31), 2**31 - 1)
        return exact.astype(np.uint32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if element is Format.F16:
            words = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            words = values.astype(np.float32).view(np.uint32)
    not_a_number = values != values
    if not_a_number.any():
        words[not_a_number] = CANONICAL_NAN_F16 if element is Format.F16 else CANONICAL_NAN_F32
    return words
