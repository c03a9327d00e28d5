"""The tensor operand of a tensor copy: a tensor map in memory, and the coordinates of a box.

The map is read when the copy is issued (PTX ISA 9.7.9.25.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.errors import EmulatorError
from fa4.emulator.isa.spaces import Space, record, units
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, Touch
from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import Address, Operand
from fa4.emulator.tma.descriptor import MAP_BYTES, TensorMap
from fa4.emulator.tma.im2col import Im2colMap, plan_im2col
from fa4.emulator.tma.transfer import SMEM_ALIGN_BYTES, Transfer, plan_gather4, plan_tile
from fa4.emulator.translate.context import KernelContext, Reader, ScalarReader
from fa4.emulator.translate.table import Unsupported

MAP_ALIGN_BYTES = 64
DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
MODES = ("tile", "tile::gather4", "tile::scatter4")
IMAGES = ("im2col", "im2col_no_offs")
_GENERIC = Space("")


@dataclass(frozen=True)
class Box:
    """The operand [tensorMap, {coordinates}] of an instruction, and its mode.

    readers: of all lanes at once, first the address, then the coordinates. offsets: those of an
    im2col load, none of them in an im2col store; None: the map is tiled.
    """

    address: ScalarReader
    coordinates: tuple[ScalarReader, ...]
    packed_rows: bool
    access: Access
    readers: tuple[Reader, ...]
    offsets: tuple[ScalarReader, ...] | None = None

    def plan(
        self, fragment: Fragment, lane: int, smem_offset: int, store: bool = False
    ) -> tuple[TensorMap, Transfer]:
        """The map and the bytes that a copy of one lane moves; `store`: to global memory.

        Raises MemoryFault for a misaligned shared address; a bad map is a fatal finding.
        """
        if smem_offset % SMEM_ALIGN_BYTES:
            raise MemoryFault(
                "misaligned",
                f"shared address {smem_offset:#x} of a tensor copy is not a multiple of "
                f"{SMEM_ALIGN_BYTES}",
            )
        raw = self.read_map(fragment, lane)
        values = self._place(fragment, lane)
        try:
            if self.offsets is not None:
                return self._column(fragment, lane, raw, values, smem_offset)
            tensor_map = TensorMap.decode(raw)
            plan = plan_gather4 if self.packed_rows else plan_tile
            transfer = plan(tensor_map, values, smem_offset, store=store)
        except EmulatorError as error:
            raise fragment.fatal("descriptor", str(error)) from None
        return tensor_map, transfer

    def _column(
        self, fragment: Fragment, lane: int, raw: bytes, values: tuple[int, ...], smem_offset: int
    ) -> tuple[TensorMap, Transfer]:
        """As `plan`, of an im2col copy: the map of one pixel."""
        image = Im2colMap.decode(raw)
        assert self.offsets is not None
        offsets = tuple(read(fragment.warp, lane) for read in self.offsets)
        offsets = offsets or (0,) * len(image.lower)
        return image.tensor, plan_im2col(image, values, offsets, smem_offset)

    def plan_load(
        self, fragment: Fragment, lane: int, smem_offset: int
    ) -> tuple[TensorMap, Transfer]:
        """As `plan`, of a copy to shared memory.

        Raises MemoryFault where its box has nothing in the tensor, or begins before it, and the
        map's address is no memory, too: hardware translates that address although it fetches
        nothing there. Measured on an H100 and an H200 (lab/hardware/guarded): of loads in each
        dimension; not of boxes that cross the end of one, nor of prefetches, stores, reductions.
        """
        tensor_map, transfer = self.plan(fragment, lane, smem_offset)
        begins = "begins before" if min(self._place(fragment, lane)) < 0 else ""
        how = begins if transfer.valid.any() else "lies wholly outside"
        if how:
            cta = fragment.warp.cta
            outside = cta.machine.memory.outside(cta.grid, tensor_map.address)
            if outside:
                raise MemoryFault(
                    "out-of-bounds",
                    f"the box at {self._place(fragment, lane)} {how} its tensor, so "
                    f"that TMA touches the tensor map's own address, {tensor_map.address:#x}: "
                    f"{outside}",
                )
        return tensor_map, transfer

    def _place(self, fragment: Fragment, lane: int) -> tuple[int, ...]:
        return tuple(_signed(read(fragment.warp, lane)) for read in self.coordinates)

    def read_map(self, fragment: Fragment, lane: int) -> bytes:
        """The 128 bytes of the tensor map."""
        warp = fragment.warp
        address = self.address(warp, lane)
        if address % MAP_ALIGN_BYTES:
            raise fragment.fatal(
                "descriptor", f"a tensor map at {address:#x}, not a multiple of 64"
            )
        place, who = np.array([address], np.uint64), np.array([lane])
        (piece,) = _GENERIC.resolve(warp, place, who, MAP_BYTES, write=False)
        record(warp, piece, MAP_BYTES, Touch(warp.clock, self.access, READ, who))
        return bytes(units(piece.data, MAP_BYTES)[piece.offsets].tobytes())


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def bind_box(
    operand: Operand,
    context: KernelContext,
    dimensions: str,
    mode: str,
    line: int,
    offsets: Operand | None = None,
) -> Box:
    """Binds the operand [tensorMap, {coordinates}]; offsets: the vector of an im2col load."""
    if not isinstance(operand, Address):
        raise Unsupported(f"tensor operand {operand}")
    packed = mode in ("tile::gather4", "tile::scatter4")
    if packed and dimensions != "2d":
        raise Unsupported(f".{dimensions} with .{mode}")
    expected = 5 if packed else int(dimensions[0])
    if len(operand.coordinates) != expected:
        raise Unsupported(f"{len(operand.coordinates)} coordinates, {expected} are needed")
    base = Address(operand.base, operand.offset)
    coordinates = tuple(context.scalar(c, "s32") for c in operand.coordinates)
    readers = (context.address(base), *(context.reader(c, "s32") for c in operand.coordinates))
    moved: tuple[ScalarReader, ...] | None = None
    if mode in IMAGES:
        moved = ()
        if offsets is not None:
            moved = tuple(context.scalar(o, "b16") for o in context.elements(offsets))
            if len(moved) != expected - 2:
                raise Unsupported(f"{len(moved)} im2col offsets, {expected - 2} are needed")
    return Box(context.scalar_address(base), coordinates, packed, Access(line), readers, moved)
