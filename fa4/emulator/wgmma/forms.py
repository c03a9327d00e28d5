"""The forms of wgmma.mma_async, and which register of which lane holds what (PTX ISA 9.7.15.5)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.tmem import Bytes, Words

ROWS, WARPS, WARP_ROWS = 64, 4, 16
K_BYTES = 32  # of a row of A or B in one instruction, whatever the type
A_REGISTERS = 4

_KINDS: dict[Format, frozenset[Format]] = {
    Format.F16: frozenset({Format.F16, Format.F32}),
    Format.BF16: frozenset({Format.F32}),
    Format.TF32: frozenset({Format.F32}),
    Format.E4M3: frozenset({Format.F16, Format.F32}),
    Format.E5M2: frozenset({Format.F16, Format.F32}),
    Format.S8: frozenset({Format.S32}),
    Format.U8: frozenset({Format.S32}),
}
_MIXED = (frozenset({Format.E4M3, Format.E5M2}), frozenset({Format.S8, Format.U8}))
_BY_NAME = {str(element): element for element in (*_KINDS, Format.F32, Format.S32)}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


class FormError(Exception):
    """A combination of shape and types that wgmma.mma_async does not have."""


@dataclass(frozen=True)
class ProductForm:
    """What the opcode and the immediates of a wgmma.mma_async say.

    D (64, n) = A (64, k) B (n, k)^T + D. a_in_registers: each thread holds a fragment of A.
    negate_*: imm-scale is -1. transpose_*: the operand is M- or N-major in shared memory. sparse:
    half the elements of A are there.
    """

    n: int
    a: Format
    b: Format
    d: Format
    saturate: bool = False
    a_in_registers: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    sparse: bool = False

    @property
    def a_elements(self) -> int:
        """Elements of a row of A that one instruction reads."""
        return K_BYTES // self.a.container_bytes

    @property
    def k(self) -> int:
        """Elements of K of one instruction."""
        return self.a_elements * (1 + self.sparse)

    @property
    def d_registers(self) -> int:
        """32-bit registers of each thread that hold D."""
        return self.n // (4 if self.d is Format.F16 else 2)

    @property
    def macs(self) -> int:
        """Multiplications of one instruction."""
        return ROWS * self.n * self.a_elements

    @property
    def is_integer(self) -> bool:
        """Whether the operands are 8-bit integers."""
        return self.d is Format.S32


def parse_types(
    shape: str, types: tuple[str, ...], saturate: bool, sparse: bool = False
) -> ProductForm:
    """The form of a shape such as "m64n128k16" and the types (D, A, B).

    Raises FormError if the instruction set lacks it (PTX ISA 9.7.15.2 and 9.7.15.5).
    """
    found = _SHAPE.fullmatch(shape)
    if found is None or len(types) != 3 or any(name not in _BY_NAME for name in types):
        raise FormError(f"shape .{shape} with types .{'.'.join(types)} does not exist")
    d, a, b = (_BY_NAME[name] for name in types)
    alike = a is b or any({a, b} == pair for pair in _MIXED)
    if a not in _KINDS or not alike or d not in _KINDS[a]:
        raise FormError(f"types .{d}.{a}.{b} do not exist")
    n, k = int(found[1]), int(found[2])
    form = ProductForm(n, a, b, d, saturate, sparse=sparse)
    step = 16 if form.is_integer and n > 32 else 8
    if not 8 <= n <= 256 or n % step:
        raise FormError(f"n{n} does not exist for .{a} (8 to 256 in steps of {step})")
    if k != form.k:
        raise FormError(f"k{k}: {'sparse ' * sparse}instructions of .{a} have k{form.k}")
    if saturate and not form.is_integer:
        raise FormError(f".satfinite is for integers, not .{a}")
    return form


# Fragments. Lane 4 g + t of warp w holds, of A, in register i the 4 bytes of K from 4 t +
# 16 (i / 2) on of row 16 w + g + 8 (i % 2); of D pairs of columns 8 j + 2 t and one more in rows
# 16 w + g + 8 h: registers 4 j + 2 h and the next, 16-bit types both in register 2 j + h.


def gather_a(words: npt.NDArray[np.uint32]) -> Bytes:
    """Bytes of A (64, 32) from the registers of four warps, uint32 (4 warps, 4, 32 lanes)."""
    by_place = words.reshape(WARPS, 2, 2, 8, 4)  # warp, half of K, half of the rows, g, t
    return np.ascontiguousarray(by_place.transpose(0, 2, 3, 1, 4)).view(np.uint8).reshape(ROWS, -1)


def gather_d(form: ProductForm, words: npt.NDArray[np.uint32]) -> Words:
    """Elements of D, bits (64, n), from the registers of four warps (4, registers, 32 lanes)."""
    if form.d is Format.F16:
        halves = words.reshape(WARPS, -1, 2, 8, 4, 1).view(np.uint16)
        ordered = halves.transpose(0, 2, 3, 1, 4, 5).reshape(ROWS, form.n)
        return ordered.astype(np.uint32)
    pairs = words.reshape(WARPS, -1, 2, 2, 8, 4)  # warp, j, h, one of the pair, g, t
    return pairs.transpose(0, 2, 4, 1, 5, 3).reshape(ROWS, form.n)


def scatter_d(form: ProductForm, elements: Words) -> npt.NDArray[np.uint32]:
    """The registers of four warps, uint32 (4, registers, 32), that hold D; see `gather_d`."""
    by_place = elements.reshape(WARPS, 2, 8, form.n // 8, 4, 2)  # warp, h, g, j, t, one of the pair
    if form.d is Format.F16:
        halves = np.ascontiguousarray(by_place.transpose(0, 3, 1, 2, 4, 5).astype(np.uint16))
        return halves.view(np.uint32).reshape(WARPS, form.d_registers, 32)
    ordered = by_place.transpose(0, 3, 1, 5, 2, 4)
    return np.ascontiguousarray(ordered).reshape(WARPS, form.d_registers, 32)
