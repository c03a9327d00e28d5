"""Definitions that the tcgen05 tests compare with: CuTe's layout algebra, and formulas by element.

Nothing here uses the package under test, except to build its descriptors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.formats import Format


def _leaves(nested: Any) -> Iterator[int]:
    if isinstance(nested, int):
        yield nested
    else:
        for part in nested:
            yield from _leaves(part)


def cute_layout(shape: Any, stride: Any) -> np.ndarray:
    """Offsets of the coordinates 0 .. size - 1."""
    sizes, strides = list(_leaves(shape)), list(_leaves(stride))
    assert len(sizes) == len(strides)
    rest = np.arange(math.prod(sizes))
    offsets = np.zeros_like(rest)
    for size, distance in zip(sizes, strides, strict=True):
        offsets += rest % size * distance
        rest = rest // size
    return offsets


def cute_swizzle(bits: int, base: int, shift: int, offset: int) -> int:
    """CuTe's Swizzle<bits, base, shift> of a byte offset."""
    source = offset & (((1 << bits) - 1) << (base + shift))
    return offset ^ source >> shift


SWIZZLE_BITS = {
    Swizzle.NONE: (0, 4, 3),
    Swizzle.B32: (1, 4, 3),
    Swizzle.B64: (2, 4, 3),
    Swizzle.B128: (3, 4, 3),
    Swizzle.B128_BASE32: (2, 5, 2),
}
ROW_BYTES = {
    Swizzle.NONE: 16,
    Swizzle.B32: 32,
    Swizzle.B64: 64,
    Swizzle.B128: 128,
    Swizzle.B128_BASE32: 128,
}


def element_address(
    desc: SmemDescriptor, row: int, k: int, element_bytes: int, k_major: bool
) -> int:
    """The canonical layouts of PTX ISA 9.7.16.3 and 9.7.16.4, for base offset 0."""
    width = ROW_BYTES[desc.swizzle]
    lbo, sbo = desc.leading_byte_offset, desc.stride_byte_offset
    atom_rows = 4 if desc.swizzle is Swizzle.B128_BASE32 else 8
    across, byte = (row, k * element_bytes) if k_major else (k, row * element_bytes)
    offset = across % atom_rows * width + byte % width
    if k_major:
        offset += across // atom_rows * sbo + byte // width * lbo
    elif desc.swizzle is Swizzle.NONE:
        offset += across // atom_rows * lbo + byte // width * sbo
    else:
        offset += across // atom_rows * sbo + byte // width * lbo
    return cute_swizzle(*SWIZZLE_BITS[desc.swizzle], desc.start_address + offset)


def packed_descriptor(
    start: int, swizzle: Swizzle, rows: int, k: int, element_bytes: int, k_major: bool
) -> SmemDescriptor:
    """A descriptor whose atoms lie side by side, without overlap."""
    width = ROW_BYTES[swizzle]
    atom_bytes = width * (4 if swizzle is Swizzle.B128_BASE32 else 8)
    if k_major:
        sbo, lbo = atom_bytes, rows // 8 * atom_bytes
    elif swizzle is Swizzle.NONE:
        sbo, lbo = atom_bytes, rows * element_bytes // width * atom_bytes
    else:
        lbo, sbo = atom_bytes, -(-rows * element_bytes // width) * atom_bytes
    return SmemDescriptor(start, lbo % (1 << 18), sbo % (1 << 18), 0, swizzle)


# exponent bits, mantissa bits, exponent bias, has infinities
_FLOATS = {
    Format.F16: (5, 10, 15, True),
    Format.BF16: (8, 7, 127, True),
    Format.TF32: (8, 10, 127, True),
    Format.E4M3: (4, 3, 7, False),
    Format.E5M2: (5, 2, 15, True),
    Format.E2M3: (2, 3, 1, False),
    Format.E3M2: (3, 2, 3, False),
    Format.E2M1: (2, 1, 1, False),
}


def code_value(element: Format, code: int) -> float:
    """The number that a code of the format's own bits stands for (tf32: its top 19 bits)."""
    if element is Format.U8:
        return float(code)
    if element is Format.S8:
        return float(code - 256 if code >= 128 else code)
    exponent_bits, mantissa_bits, bias, infinities = _FLOATS[element]
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) & 1 else 1.0
    top = (1 << exponent_bits) - 1
    if infinities and exponent == top:
        return sign * math.inf if mantissa == 0 else math.nan
    if element is Format.E4M3 and exponent == top and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def code_bits(element: Format) -> int:
    """Bits of a code: the format's, 19 for tf32."""
    return 19 if element is Format.TF32 else element.bits


def write_code(smem: np.ndarray, address: int, element: Format, code: int) -> None:
    """Stores a code at the address of its container; sub-byte codes in their 16-byte unit."""
    if element.bits < 8:
        unit, place = address // 16 * 16, address % 16
        for bit in range(element.bits):
            position = place * element.bits + bit
            byte, mask = unit + position // 8, 1 << position % 8
            smem[byte] = int(smem[byte]) & ~mask | (mask if code >> bit & 1 else 0)
        return
    if element is Format.TF32:  # the tensor core must not look at the low bits
        code = code << 13 | (address * 2654435761 & 0x1FFF)
    for i in range(element.container_bytes):
        smem[address + i] = code >> 8 * i & 0xFF


def instruction_bits(instruction: InstructionDescriptor) -> int:
    """The 32-bit descriptor, from PTX ISA Table 42."""
    codes = {
        Format.F16: 0,
        Format.BF16: 1,
        Format.TF32: 2,
        Format.E4M3: 0,
        Format.E5M2: 1,
        Format.E2M3: 3,
        Format.E3M2: 4,
        Format.E2M1: 5,
        Format.U8: 0,
        Format.S8: 1,
    }
    d_code = {Format.F16: 0, Format.F32: 1, Format.S32: 2}[instruction.d_format]
    return (
        instruction.saturate << 3
        | d_code << 4
        | codes[instruction.a_format] << 7
        | codes[instruction.b_format] << 10
        | instruction.negate_a << 13
        | instruction.negate_b << 14
        | instruction.transpose_a << 15
        | instruction.transpose_b << 16
        | instruction.n // 8 << 17
        | instruction.m // 16 << 24
        | (0, 8, 16, 32).index(instruction.max_shift) << 30
    )
