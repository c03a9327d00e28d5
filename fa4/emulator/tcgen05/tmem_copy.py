"""tcgen05.cp (shared to tensor memory) and tcgen05.shift (PTX ISA 9.7.16.9).

The source of a copy is a K-major matrix under a shared memory descriptor; row i of it becomes one
lane, or two or four with multicast. With cta_group 2 each CTA of the pair copies from its own
shared memory into its own tensor memory, under the same descriptor and address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.tcgen05.descriptors import SmemDescriptor
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.formats import Format, place_in_container, unpack_padded
from fa4.emulator.tcgen05.operands import UNIT_BYTES, Major, unit_addresses
from fa4.emulator.tcgen05.tmem import (
    WARP_LANES,
    Bytes,
    Indices,
    SmemRead,
    TmemAddress,
    TmemRegion,
    Words,
    check_columns,
)

# (shape, multicast): bytes per row, and the lanes of each row, (rows, copies).
_ROW = np.arange(128, dtype=np.int64)[:, None]
_LAYOUTS: dict[tuple[str, str], tuple[int, Indices]] = {
    ("128x256b", ""): (32, _ROW),
    ("128x128b", ""): (16, _ROW),
    # One lane in the quarter of each warp, all at the same place in it.
    ("4x256b", ""): (32, WARP_LANES * _ROW[:4]),
    ("64x128b", "warpx2::02_13"): (16, _ROW[:64] + np.array([0, 64])),
    ("64x128b", "warpx2::01_23"): (
        16,
        _ROW[:64] % 32 + 64 * (_ROW[:64] // 32) + np.array([0, 32]),
    ),
    ("32x128b", "warpx4"): (16, _ROW[:32] + np.array([0, 32, 64, 96])),
}
_SOURCE_FORMATS = {"": None, "b8x16.b6x16_p32": Format.E2M3, "b8x16.b4x16_p64": Format.E2M1}
_SHIFT_COLUMNS = 8


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """A tcgen05.cp ready to execute. Ranks are positions in the CTA pair."""

    units: Indices
    source: Format | None
    lanes: Indices
    first_column: int
    smem_reads: tuple[SmemRead, ...]
    tmem_writes: tuple[TmemRegion, ...]
    tmem_reads: tuple[TmemRegion, ...] = ()

    def execute(self, smem: Sequence[Bytes], tmem: Sequence[Words]) -> None:
        """Copies; one shared and one tensor memory per CTA of the group.

        Raises IndexError if a unit lies outside the shared memory.
        """
        for memory, tensor in zip(smem, tmem, strict=True):
            units = memory[: len(memory) // UNIT_BYTES * UNIT_BYTES].reshape(-1, UNIT_BYTES)
            data = units[self.units // UNIT_BYTES].reshape(len(self.units), -1)
            if self.source is not None:
                data = place_in_container(self.source, unpack_padded(self.source, data))
            words = np.ascontiguousarray(data).view(np.uint32)
            columns = slice(self.first_column, self.first_column + words.shape[1])
            tensor[self.lanes, columns] = words[:, None, :]


@lru_cache(maxsize=1024)
def plan_copy(
    shape: str,
    multicast: str,
    source_format: str,
    cta_group: int,
    address: TmemAddress,
    desc: SmemDescriptor,
) -> CopyPlan:
    """What a tcgen05.cp touches.

    multicast: "", "warpx2::02_13", "warpx2::01_23" or "warpx4". source_format: "" or the
    decompression "b8x16.b6x16_p32" or "b8x16.b4x16_p64".
    Raises TmemError or DescriptorError if the instruction is invalid.
    """
    if (shape, multicast) not in _LAYOUTS:
        raise TmemError(f"tcgen05.cp has no .{shape} with multicast {multicast or 'none'}")
    if source_format not in _SOURCE_FORMATS:
        raise TmemError(f"tcgen05.cp cannot decompress .{source_format}")
    row_bytes, lanes = _LAYOUTS[shape, multicast]
    last_first_lane = WARP_LANES - 1 if shape == "4x256b" else 0
    if address.lane > last_first_lane:
        raise TmemError(f"tcgen05.cp.{shape} at lane {address.lane}: at most {last_first_lane}")
    columns = row_bytes // 4
    check_columns(f"tcgen05.cp.{shape}", address.column, columns)
    units = unit_addresses(desc, len(lanes), row_bytes, 1, Major.K)
    lanes = lanes + address.lane
    ranks = range(cta_group)
    return CopyPlan(
        units=units,
        source=_SOURCE_FORMATS[source_format],
        lanes=lanes,
        first_column=address.column,
        smem_reads=tuple(SmemRead(rank, units.ravel(), UNIT_BYTES) for rank in ranks),
        tmem_writes=tuple(
            TmemRegion(rank, np.sort(lanes.ravel()), address.column, columns) for rank in ranks
        ),
    )


@dataclass(frozen=True, eq=False)
class ShiftPlan:
    """A tcgen05.shift.down ready to execute."""

    address: TmemAddress
    tmem_reads: tuple[TmemRegion, ...]
    tmem_writes: tuple[TmemRegion, ...]
    smem_reads: tuple[SmemRead, ...] = ()

    def execute(self, smem: Sequence[Bytes], tmem: Sequence[Words]) -> None:
        """Shifts in place; one tensor memory per CTA of the group."""
        lane, column = self.address
        for tensor in tmem:
            window = tensor[lane : lane + WARP_LANES, column : column + _SHIFT_COLUMNS]
            window[:-1] = window[1:].copy()


def plan_shift(cta_group: int, address: TmemAddress) -> ShiftPlan:
    """tcgen05.shift.down of one warp's 32 lanes, 32 bytes wide (shape 31x256b).

    Lane i receives lane i + 1; the last lane keeps its row, to be refilled by tcgen05.cp.4x256b.
    Raises TmemError unless the lane is a multiple of 32.
    """
    if address.lane % WARP_LANES:
        raise TmemError(f"tcgen05.shift at lane {address.lane}: must be a multiple of 32")
    check_columns("tcgen05.shift", address.column, _SHIFT_COLUMNS)
    lanes = np.arange(address.lane, address.lane + WARP_LANES, dtype=np.int64)
    ranks = range(cta_group)

    def regions(rows: Indices) -> tuple[TmemRegion, ...]:
        return tuple(TmemRegion(rank, rows, address.column, _SHIFT_COLUMNS) for rank in ranks)

    return ShiftPlan(address, tmem_reads=regions(lanes[1:]), tmem_writes=regions(lanes[:-1]))
