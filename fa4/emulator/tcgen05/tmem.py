"""Tensor memory: its geometry, its addresses, and the regions that instructions touch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa4.emulator.tcgen05.errors import TmemError

LANES = 128
COLUMNS = 512
WARP_LANES = 32

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


class TmemAddress(NamedTuple):
    """A place in the tensor memory of one CTA (PTX ISA 9.7.16.1.1)."""

    lane: int
    column: int

    @classmethod
    def decode(cls, value: int) -> TmemAddress:
        """Lane in bits 31-16, column in bits 15-0. Raises TmemError outside the memory."""
        address = cls((value >> 16) & 0xFFFF, value & 0xFFFF)
        if address.lane >= LANES or address.column >= COLUMNS:
            raise TmemError(
                f"tensor memory address {value:#010x}: lane {address.lane}, column "
                f"{address.column} is outside {LANES} lanes x {COLUMNS} columns"
            )
        return address

    def encode(self) -> int:
        """The 32-bit address."""
        return self.lane << 16 | self.column


class TmemRegion(NamedTuple):
    """A rectangle of one CTA's tensor memory: these lanes, each in the same run of columns."""

    cta_rank: int
    lanes: Indices
    first_column: int
    columns: int


class SmemRead(NamedTuple):
    """Bytes that an instruction reads in one CTA's shared memory: equal units, any order."""

    cta_rank: int
    addresses: Indices
    unit_bytes: int


def check_columns(what: str, first_column: int, columns: int) -> None:
    """Raises TmemError if the columns do not lie within tensor memory."""
    if first_column + columns > COLUMNS:
        raise TmemError(
            f"{what} takes columns {first_column}..{first_column + columns - 1}: "
            f"tensor memory ends at column {COLUMNS - 1}"
        )
