"""Descriptors of tcgen05.mma and tcgen05.cp: 64 bits for a matrix in shared memory, 32 for the MMA.

Bit fields: PTX ISA 9.7.16.4.1 (shared memory descriptor) and 9.7.16.4.2, Table 42 (instruction
descriptor of the kinds without block scaling).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.tmem import Indices


def bit_field(value: int, first_bit: int, bits: int) -> int:
    """Bits of a descriptor."""
    return (value >> first_bit) & ((1 << bits) - 1)


class Swizzle(IntEnum):
    """How 16-byte (or 32-byte) chunks are permuted within a row; values as in bits 61-63."""

    NONE = 0
    B128_BASE32 = 1
    B128 = 2
    B64 = 4
    B32 = 6

    @property
    def row_bytes(self) -> int:
        """Bytes of the contiguous dimension that one atom covers."""
        return {Swizzle.NONE: 16, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, 128)

    @property
    def rows_per_atom(self) -> int:
        """Rows of the other dimension that one atom covers, row_bytes apart."""
        return 4 if self is Swizzle.B128_BASE32 else 8

    def apply(self, addresses: Indices, base_offset: int = 0) -> Indices:
        """The address where each byte really lies: chunk bits XOR address bits 7 and up.

        The pattern starts at 1024-byte boundaries (512 and 256 for 64B and 32B); base_offset
        moves its start by that many 128-byte rows.
        """
        if self is Swizzle.NONE:
            return addresses
        row = (addresses >> 7) - base_offset
        if self is Swizzle.B128_BASE32:
            return addresses ^ ((row & 3) << 5)
        return addresses ^ ((row & (self.row_bytes // 16 - 1)) << 4)


@dataclass(frozen=True)
class SmemDescriptor:
    """A matrix in shared memory. Addresses and offsets are in bytes, multiples of 16."""

    start_address: int
    leading_byte_offset: int
    stride_byte_offset: int
    base_offset: int
    swizzle: Swizzle

    @classmethod
    def decode(cls, value: int) -> SmemDescriptor:
        """Reads the 64-bit descriptor. Raises DescriptorError if a field is invalid on sm_100."""
        value &= (1 << 64) - 1
        return _decode_smem(value)

    def encode(self) -> int:
        """The 64-bit descriptor."""
        return (
            self.start_address >> 4
            | self.leading_byte_offset >> 4 << 16
            | self.stride_byte_offset >> 4 << 32
            | 1 << 46
            | self.base_offset << 49
            | int(self.swizzle) << 61
        )


@lru_cache(maxsize=4096)
def _decode_smem(value: int) -> SmemDescriptor:
    def refuse(why: str) -> DescriptorError:
        return DescriptorError(f"shared memory descriptor {value:#018x}: {why}")

    if bit_field(value, 46, 3) != 0b001:
        raise refuse(f"bits 46-48 are {bit_field(value, 46, 3):#05b}, must be 0b001")
    if bit_field(value, 52, 1):
        raise refuse("bit 52, absolute leading dimension, is for sm_103a only")
    if bit_field(value, 53, 8):
        raise refuse("bits 53-60 must be zero")
    if bit_field(value, 14, 2) or bit_field(value, 30, 2):
        raise refuse(
            "reserved bits 14-15 and 30-31 must be zero (an address increment carried over?)"
        )
    mode = bit_field(value, 61, 3)
    if mode not in Swizzle.__members__.values():
        raise refuse(f"swizzling mode {mode} does not exist")
    return SmemDescriptor(
        start_address=bit_field(value, 0, 14) << 4,
        leading_byte_offset=bit_field(value, 16, 14) << 4,
        stride_byte_offset=bit_field(value, 32, 14) << 4,
        base_offset=bit_field(value, 49, 3),
        swizzle=Swizzle(mode),
    )


_FP8_FORMATS = {0: Format.E4M3, 1: Format.E5M2, 3: Format.E2M3, 4: Format.E3M2, 5: Format.E2M1}
_OPERAND_FORMATS: dict[str, dict[int, Format]] = {
    "f16": {0: Format.F16, 1: Format.BF16},
    "tf32": {2: Format.TF32},
    "f8f6f4": _FP8_FORMATS,
    "i8": {0: Format.U8, 1: Format.S8},
}
_RESULT_FORMATS: dict[str, dict[int, Format]] = {
    "f16": {0: Format.F16, 1: Format.F32},
    "tf32": {1: Format.F32},
    "f8f6f4": {0: Format.F16, 1: Format.F32},
    "i8": {2: Format.S32},
}
# Elements of K in one instruction: always 32 bytes of containers.
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one tcgen05.mma computes: types, shape, signs and major-ness.

    transpose_a: A is M-major in shared memory (else K-major); transpose_b: B is N-major. sparse:
    half the elements of A are there; selector: which part of the metadata is meant.
    """

    kind: str
    m: int
    n: int
    a_format: Format
    b_format: Format
    d_format: Format
    saturate: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    max_shift: int = 0
    sparse: bool = False
    selector: int = 0

    @property
    def is_scaled(self) -> bool:
        """Whether it is a kind with block scaling."""
        return self.kind.startswith("mx")

    @property
    def k(self) -> int:
        """Elements of the K dimension of one instruction."""
        return self.a_elements * (1 + self.sparse)

    @property
    def a_elements(self) -> int:
        """Elements of a row of A that one instruction reads."""
        return _K[self.kind]

    @classmethod
    def decode(cls, value: int, kind: str) -> InstructionDescriptor:
        """Reads the 32-bit descriptor of `kind` ("f16", "tf32", "f8f6f4" or "i8").

        Raises DescriptorError for the block-scaled kinds and invalid fields.
        """
        return _decode_instruction(value & 0xFFFFFFFF, kind)

    def check_shape(self, cta_group: int, ws: bool) -> None:
        """Raises DescriptorError if PTX ISA Table 39 or 50 lacks this shape."""
        allowed_m: tuple[int, ...]
        allowed_m = (32, 64, 128) if ws else (64, 128) if cta_group == 1 else (128, 256)
        if self.is_scaled:
            allowed_m = (128 * cta_group,)
        why = ""
        if ws and cta_group != 1:
            why = ".ws needs .cta_group::1"
        elif self.m not in allowed_m:
            why = f"M must be one of {allowed_m}"
        elif not self._n_allowed(cta_group, ws):
            why = "this N does not exist"
        elif self.max_shift and not ws:
            why = "a maximum shift needs .ws"
        if why:
            form = f"kind::{self.kind}.cta_group::{cta_group}{'.ws' if ws else ''}"
            raise DescriptorError(f"tcgen05.mma {form} with M={self.m}, N={self.n}: {why}")

    def _n_allowed(self, cta_group: int, ws: bool) -> bool:
        if ws:
            return self.n in (64, 128, 256)
        step = 8 * cta_group
        if self.kind == "i8" and (cta_group == 2 or self.n > 32):
            step = 16 * cta_group
        if self.transpose_b and self.b_format.container_bytes == 1:
            step = 16 * cta_group
        return step <= self.n <= 256 and self.n % step == 0


@lru_cache(maxsize=1024)
def _decode_instruction(value: int, kind: str) -> InstructionDescriptor:
    def refuse(why: str) -> DescriptorError:
        return DescriptorError(f"instruction descriptor {value:#010x} of kind::{kind}: {why}")

    def look_up(table: dict[int, Format], first_bit: int, bits: int, what: str) -> Format:
        code = bit_field(value, first_bit, bits)
        if code not in table:
            raise refuse(f"{what} type {code} does not exist")
        return table[code]

    if kind not in _OPERAND_FORMATS:
        raise refuse("only the kinds f16, tf32, f8f6f4 and i8 are supported")
    sparse = bool(bit_field(value, 2, 1))
    if bit_field(value, 6, 1) or bit_field(value, 23, 1) or bit_field(value, 29, 1):
        raise refuse("reserved bits 6, 23 and 29 must be zero")
    instruction = InstructionDescriptor(
        kind=kind,
        m=bit_field(value, 24, 5) << 4,
        n=bit_field(value, 17, 6) << 3,
        a_format=look_up(_OPERAND_FORMATS[kind], 7, 3, "A"),
        b_format=look_up(_OPERAND_FORMATS[kind], 10, 3, "B"),
        d_format=look_up(_RESULT_FORMATS[kind], 4, 2, "D"),
        saturate=bool(bit_field(value, 3, 1)),
        negate_a=bool(bit_field(value, 13, 1)),
        negate_b=bool(bit_field(value, 14, 1)),
        transpose_a=bool(bit_field(value, 15, 1)),
        transpose_b=bool(bit_field(value, 16, 1)),
        max_shift=(0, 8, 16, 32)[bit_field(value, 30, 2)],
        sparse=sparse,
        selector=bit_field(value, 0, 2) if sparse else 0,
    )
    _check_types(instruction, refuse)
    return instruction


def _check_types(instruction: InstructionDescriptor, refuse: Callable[[str], Exception]) -> None:
    """Combinations of types and flags, whatever the shape (PTX ISA Tables 39, 49 and 52)."""
    kind = instruction.kind
    if instruction.saturate and kind != "i8":
        raise refuse("only integers saturate")
    if kind == "i8" and (instruction.negate_a or instruction.negate_b):
        raise refuse("integers cannot be negated")
    if (
        kind == "f16"
        and instruction.d_format is Format.F16
        and Format.BF16 in (instruction.a_format, instruction.b_format)
    ):
        raise refuse("bf16 operands need an f32 result")
    for transposed, element in (
        (instruction.transpose_a, instruction.a_format),
        (instruction.transpose_b, instruction.b_format),
    ):
        if transposed and element.bits < 8:
            raise refuse(f"{element} operands are K-major only")
