"""Block scaling of tcgen05.mma (PTX ISA 9.7.16.10.7): factors in tensor memory, per row and block.

    D = sum over blocks of K of (scale_a A) (scale_b B) + D

A block is 16 or 32 elements of K; one factor of 8 bits belongs to each row of A, or column of B,
and block. Factors of row r lie in lane r mod 32 and column r / 32 behind the address, one byte
for each block of the instruction, from the byte on that the descriptor's data id names. Each
quarter of the lanes has a copy of its own, as tcgen05.cp.32x128b.warpx4 makes them: it serves the
rows of D there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, bit_field
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import Format, Values
from fa4.emulator.tcgen05.tmem import (
    LANES,
    WARP_LANES,
    TmemAddress,
    TmemRegion,
    Words,
    check_columns,
)

# Kind -> elements of K for one factor, by the opcode's .scale_vec or .block; "" is the default.
VECTORS: dict[str, dict[str, int]] = {
    "mxf8f6f4": {"": 32, "scale_vec::1X": 32, "block32": 32},
    "mxf4": {"": 32, "scale_vec::2X": 32, "block32": 32},
    "mxf4nvf4": {"scale_vec::2X": 32, "scale_vec::4X": 16, "block32": 32, "block16": 16},
}
_OPERANDS: dict[str, dict[int, Format]] = {
    "mxf8f6f4": {
        0: Format.E4M3, 1: Format.E5M2, 3: Format.E2M3, 4: Format.E3M2, 5: Format.E2M1,
    },
    "mxf4": {1: Format.E2M1_PACKED},
    "mxf4nvf4": {1: Format.E2M1_PACKED},
}  # fmt: skip
_SCALE_TYPES: dict[int, npt.DTypeLike] = {
    0: ml_dtypes.float8_e4m3fn,  # ue4m3: positive
    1: ml_dtypes.float8_e8m0fnu,
}
_E8M0 = 1
_ID_BITS = 0x3FFFFFFF  # of a scale factors' address; CUTLASS keeps the data id above


@dataclass(frozen=True)
class Scales:
    """The factors of one instruction. a, b: where they start; a_id, b_id: the byte of the first.

    vector: elements of K for one. kind: of the type, as in the descriptor.
    """

    a: TmemAddress
    b: TmemAddress
    a_id: int
    b_id: int
    vector: int
    kind: int

    def regions(self, rank: int, m: int, n: int) -> tuple[TmemRegion, TmemRegion]:
        """What they take of the tensor memory of a CTA with m rows of A, which has all n of B."""
        lanes = np.arange(LANES, dtype=np.int64)
        places = ((self.a, m), (self.b, n))
        first, second = (
            TmemRegion(rank, lanes, place.column, -(-rows // WARP_LANES)) for place, rows in places
        )
        return first, second

    def read(self, tmem: Words, which: str, rows: int, k: int) -> Values:
        """Factors (quarter, row, element of K) of A ("a") or B."""
        place, first = (self.a, self.a_id) if which == "a" else (self.b, self.b_id)
        columns = -(-rows // WARP_LANES)
        words = np.ascontiguousarray(tmem[:, place.column : place.column + columns])
        codes = words.view(np.uint8).reshape(LANES // WARP_LANES, WARP_LANES, columns, 4)
        blocks = k // self.vector
        # (quarter, column, lane, byte) -> rows in order
        codes = codes[..., first : first + blocks].transpose(0, 2, 1, 3)
        ordered = codes.reshape(len(codes), -1, blocks)[:, :rows]
        return np.repeat(_table(self.kind).take(ordered), self.vector, axis=2)


@cache
def _table(kind: int) -> Values:
    """The value of each of the 256 codes; a sign is ignored, and NaN stays."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(_SCALE_TYPES[kind]).astype(np.float64)
    return np.abs(values)


@lru_cache(maxsize=1024)
def decode_scaled(
    value: int, kind: str, vector: str
) -> tuple[InstructionDescriptor, int, int, int]:
    """Descriptor of a block-scaled kind: (types and shape, data id of A, of B, type of factors).

    Raises DescriptorError for sparse A and invalid fields (PTX ISA Tables 43 and 44).
    """

    def refuse(why: str) -> DescriptorError:
        return DescriptorError(f"instruction descriptor {value:#010x} of kind::{kind}: {why}")

    def look_up(first_bit: int, bits: int, what: str) -> Format:
        code = bit_field(value, first_bit, bits)
        if code not in _OPERANDS[kind]:
            raise refuse(f"{what} type {code} does not exist")
        return _OPERANDS[kind][code]

    if bit_field(value, 2, 1):
        raise refuse("sparse matrix A is not supported")
    if bit_field(value, 31, 1):
        raise refuse("K = 96 is for sm_103a only, and not supported")
    if bit_field(value, 3, 1) or bit_field(value, 6, 1):
        raise refuse("reserved bits 3 and 6 must be zero")
    elements = VECTORS[kind][vector]
    instruction = InstructionDescriptor(
        kind=kind,
        m=bit_field(value, 24, 5) << 4,
        n=bit_field(value, 17, 6) << 3,
        a_format=look_up(7, 3, "A"),
        b_format=look_up(10, 2 if kind != "mxf8f6f4" else 3, "B"),
        d_format=Format.F32,
        negate_a=bool(bit_field(value, 13, 1)),
        negate_b=bool(bit_field(value, 14, 1)),
        transpose_a=bool(bit_field(value, 15, 1)),
        transpose_b=bool(bit_field(value, 16, 1)),
    )
    a_id, b_id, scale = (bit_field(value, *place) for place in ((29, 2), (4, 2), (23, 1)))
    _check(instruction, (a_id, b_id), instruction.k // elements, refuse)
    if scale != _E8M0 and kind != "mxf4nvf4":
        raise refuse("factors are of type ue8m0")
    return instruction, a_id, b_id, scale


def _check(
    instruction: InstructionDescriptor,
    ids: tuple[int, int],
    blocks: int,
    refuse: Callable[[str], Exception],
) -> None:
    for transposed, element in (
        (instruction.transpose_a, instruction.a_format),
        (instruction.transpose_b, instruction.b_format),
    ):
        if transposed and element.bits < 8:
            raise refuse(f"{element} operands are K-major only")
    if any(first % blocks for first in ids):
        raise refuse(
            f"data ids {ids}: {blocks} factors of an instruction start at a multiple of it"
        )


def scales_of(
    addresses: tuple[int, int], ids: tuple[int, int], vector: int, kind: int, n: int
) -> Scales:
    """The factors at these addresses. Raises TmemError where they are outside, or not at lane 0."""
    a, b = (TmemAddress.decode(address & _ID_BITS) for address in addresses)
    for name, place, rows in (("A", a, LANES), ("B", b, n)):
        if place.lane:
            raise DescriptorError(f"scale factors of {name} start at lane {place.lane}, must be 0")
        check_columns(f"scale factors of {name}", place.column, -(-rows // WARP_LANES))
    return Scales(a, b, *ids, vector, kind)
