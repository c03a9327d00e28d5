"""Operands of wgmma.mma_async in shared memory (PTX ISA 9.7.15.5.1).

The canonical layouts are those of `fa4.emulator.tcgen05.operands`; only the descriptor's bits
differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.operands import UNIT_BYTES, Major, unit_addresses
from fa4.emulator.tcgen05.tmem import Bytes, Indices
from fa4.emulator.wgmma.forms import ROWS, WARPS, ProductForm

_SWIZZLES = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_MODES = {swizzle: mode for mode, swizzle in _SWIZZLES.items()}


def _field(value: int, first_bit: int, bits: int) -> int:
    return (value >> first_bit) & ((1 << bits) - 1)


@lru_cache(maxsize=4096)
def decode_descriptor(value: int) -> SmemDescriptor:
    """Reads a 64-bit matrix descriptor of wgmma. Raises DescriptorError if it is invalid."""
    for first, bits in ((14, 2), (30, 2), (46, 3), (52, 10)):
        if _field(value, first, bits):
            raise DescriptorError(
                f"matrix descriptor {value:#018x}: bits {first}-{first + bits - 1} must be zero "
                "(an address increment carried over, or a descriptor of tcgen05?)"
            )
    return SmemDescriptor(
        start_address=_field(value, 0, 14) << 4,
        leading_byte_offset=_field(value, 16, 14) << 4,
        stride_byte_offset=_field(value, 32, 14) << 4,
        base_offset=_field(value, 49, 3),
        swizzle=_SWIZZLES[_field(value, 62, 2)],
    )


def encode_descriptor(descriptor: SmemDescriptor) -> int:
    """The 64 bits that `decode_descriptor` reads."""
    return (
        descriptor.start_address >> 4
        | descriptor.leading_byte_offset >> 4 << 16
        | descriptor.stride_byte_offset >> 4 << 32
        | descriptor.base_offset << 49
        | _MODES[descriptor.swizzle] << 62
    )


@dataclass(frozen=True, eq=False)
class MatrixInSmem:
    """An operand in shared memory, "a" or "b".

    units: addresses of its 16-byte units, (rows, 2) or, if it is M- or N-major, (16, rows / 8); of
    the B of a sparse A twice as many.
    first, stop: the first byte of all, and the one behind the last. by_warp: of A, the units that
    hold the 16 rows of each warp, which no other warp reads; of B all.
    """

    name: str
    descriptor: SmemDescriptor
    units: Indices
    transposed: bool
    first: int
    stop: int
    by_warp: tuple[Indices, ...]

    def read(self, smem: Bytes) -> Bytes:
        """Bytes of the rows, (rows, 32 or 64)."""
        # complex128 is NumPy's fastest 16-byte item; it is only moved, never computed with.
        whole = smem[: len(smem) // UNIT_BYTES * UNIT_BYTES].view(np.complex128)
        found = whole.take(self.units // UNIT_BYTES)
        if not self.transposed:
            return found.view(np.uint8)
        return np.ascontiguousarray(found.view(np.uint16).T).view(np.uint8)


@lru_cache(maxsize=4096)
def operand_at(form: ProductForm, which: str, value: int) -> MatrixInSmem:
    """Operand "a" or "b" at a descriptor. Raises DescriptorError if there is no such layout."""
    descriptor = decode_descriptor(value)
    rows, element = (ROWS, form.a) if which == "a" else (form.n, form.b)
    depth = form.a_elements if which == "a" else form.k
    transposed = form.transpose_a if which == "a" else form.transpose_b
    major = Major.MN if transposed else Major.K
    units = unit_addresses(descriptor, rows, depth, element.container_bytes, major)
    if which == "b":
        by_warp = (units.ravel(),) * WARPS
    else:
        parts = np.split(units, WARPS, axis=1 if transposed else 0)
        by_warp = tuple(np.ascontiguousarray(part).ravel() for part in parts)
    first, stop = int(units.min()), int(units.max()) + UNIT_BYTES
    return MatrixInSmem(which, descriptor, units, transposed, first, stop, by_warp)
