"""Where the elements of an operand lie in shared memory, under a shared memory descriptor.

Canonical layouts (PTX ISA 9.7.16.3, 9.7.16.4.1 and 9.7.16.10.6). The unit is 16 bytes: whatever the
swizzle, 16 aligned bytes stay together. Along the contiguous dimension an atom is `row_bytes`
long, across it `rows_per_atom` rows; LBO and SBO are the distances between atoms:

              contiguous         atoms along contiguous   atoms across
K-major       K                  (never more than one)    SBO: next 8 rows of M or N
K-major none  K, 16 bytes        LBO                      SBO
MN-major      M or N             LBO                      SBO: next rows of K
MN-major none M or N, 16 bytes   SBO                      LBO: next 8 rows of K
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

import numpy as np

from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.tmem import Indices

UNIT_BYTES = 16


class Major(Enum):
    """Which dimension of an operand is contiguous in shared memory."""

    K = "K"
    MN = "MN"


def unit_addresses(
    desc: SmemDescriptor, rows: int, k_elements: int, element_bytes: int, major: Major
) -> Indices:
    """Byte addresses of the 16-byte units of a (rows, k_elements) operand.

    rows counts M or N. Returns (rows, units along K) for K-major, (k_elements, units along rows)
    for MN-major. Raises DescriptorError if the layout does not exist.
    """
    if major is Major.K:
        across, contiguous_bytes = rows, k_elements * element_bytes
    else:
        across, contiguous_bytes = k_elements, rows * element_bytes
    if contiguous_bytes % UNIT_BYTES:
        raise DescriptorError(
            f"{major.value}-major operand of {contiguous_bytes} contiguous bytes: "
            f"not a multiple of {UNIT_BYTES}"
        )
    if major is Major.K and desc.swizzle is Swizzle.B128_BASE32:
        raise DescriptorError("128B swizzling with 32B atoms is for MN-major operands only")
    row_bytes = desc.swizzle.row_bytes
    too_wide = desc.swizzle is not Swizzle.NONE and contiguous_bytes > row_bytes
    if major is Major.K and too_wide:
        raise DescriptorError(
            f"K-major operand of {contiguous_bytes} bytes of K is wider than its {row_bytes}-byte "
            "swizzle row"
        )
    along, between = desc.leading_byte_offset, desc.stride_byte_offset
    if major is Major.MN and desc.swizzle is Swizzle.NONE:
        along, between = between, along
    offsets = _unit_offsets(desc.swizzle, across, contiguous_bytes // UNIT_BYTES, along, between)
    return desc.swizzle.apply(offsets + desc.start_address, desc.base_offset)


@lru_cache(maxsize=256)
def _unit_offsets(swizzle: Swizzle, across: int, units: int, along: int, between: int) -> Indices:
    """Offsets (across, units) before swizzling; `along` and `between` are distances of atoms."""
    units_per_row = swizzle.row_bytes // UNIT_BYTES
    unit = np.arange(units, dtype=np.int64)
    row = np.arange(across, dtype=np.int64)[:, None]
    within_row = unit % units_per_row * UNIT_BYTES + unit // units_per_row * along
    atom_rows = swizzle.rows_per_atom
    offsets = row % atom_rows * swizzle.row_bytes + row // atom_rows * between + within_row
    offsets.flags.writeable = False
    return offsets


def operand_addresses(
    desc: SmemDescriptor, rows: int, k_elements: int, element_bytes: int, major: Major
) -> Indices:
    """Byte address of the container of each element, (rows, k_elements).

    Sub-byte elements (e2m3, e3m2, e2m1) share a 16-byte unit of 16 one-byte containers; their bits
    are packed within it (see formats.unpack_padded). Raises as unit_addresses.
    """
    units = unit_addresses(desc, rows, k_elements, element_bytes, major)
    within = np.arange(0, UNIT_BYTES, element_bytes, dtype=np.int64)
    addresses = (units[:, :, None] + within).reshape(units.shape[0], -1)
    return addresses if major is Major.K else addresses.T
