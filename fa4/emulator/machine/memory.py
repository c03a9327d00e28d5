"""The address spaces: from an address to the bytes behind it, or to a clear fault."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.emulator.errors import EmulatorError
from fa4.emulator.machine.described import describe_buffers
from fa4.emulator.masks import Array
from fa4.emulator.translate.layout import (
    LOCAL_WINDOW,
    MODULE_WINDOW,
    PARAMETER_WINDOW,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
)

if TYPE_CHECKING:
    from fa4.emulator.machine.grid import Grid
    from fa4.emulator.machine.state import Cta

_OFFSET_MASK = (1 << RANK_SHIFT) - 1


class MemoryFault(EmulatorError):
    """An access that hardware would refuse. kind: "out-of-bounds" or "misaligned"."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(eq=False)
class Buffer:
    """A registered piece of global memory. data: its bytes; shadow: its record of accesses."""

    name: str
    address: int
    data: Array
    writable: bool
    shadow: Any = None

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + len(self.data)


def buffer_at(name: str, address: int, size_bytes: int, writable: bool) -> Buffer:
    """A buffer over real memory of this process, which the caller keeps alive."""
    if size_bytes == 0:
        return Buffer(name, address, np.zeros(0, np.uint8), writable)
    raw = (ctypes.c_uint8 * size_bytes).from_address(address)
    return Buffer(name, address, np.ctypeslib.as_array(raw), writable)


class Memory:
    """The global memory that kernels may touch: the registered buffers, nothing else."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self.buffers]
        # What strong writes published, by location: see fa4.emulator.isa.ordering.
        self.flags: dict[tuple[int, int], Any] = {}
        self._table: Array = np.zeros(2, np.int64)
        self.refresh()

    def add(self, buffer: Buffer) -> None:
        """Registers one more buffer."""
        index = bisect.bisect(self._starts, buffer.address)
        self.buffers.insert(index, buffer)
        self._starts.insert(index, buffer.address)
        self.refresh()

    @property
    def table_address(self) -> int:
        """Where two integers say where compiled code finds the table of buffers, and its length."""
        return int(self._table.ctypes.data)

    def refresh(self) -> None:
        """Brings the table for compiled code up to date: a buffer or its shadow is new."""
        self._rows = describe_buffers(self.buffers)
        self._table[:] = self._rows.ctypes.data, len(self._rows)

    def find(self, address: int) -> Buffer | None:
        """The buffer that holds an address. Several may start together: the longest counts."""
        index = bisect.bisect_right(self._starts, address) - 1
        while index >= 0:
            if address < self.buffers[index].end:
                return self.buffers[index]
            index -= 1
        return None

    def near(self, address: int) -> str:
        """Where an address lies that is in no buffer, in words."""
        below = [b for b in self.buffers if b.end <= address]
        above = [b for b in self.buffers if b.address > address]
        places = []
        if below:
            last = max(below, key=lambda buffer: buffer.end)
            places.append(f"{address - last.end} bytes behind the end of {last.name}")
        if above:
            places.append(f"{above[0].address - address} bytes before {above[0].name}")
        return " and ".join(places) or "no memory is registered"

    def locate(
        self, grid: Grid, addresses: Array, size_bytes: int, write: bool
    ) -> Iterator[tuple[Buffer, Array, Array | None]]:
        """The buffers behind global addresses (any integer dtype, shape (n,)) of n units.

        Yields (buffer, int64 byte offsets, indices of the units or None for all). Raises
        MemoryFault for a unit that is not wholly inside one buffer, or read-only and written.
        """
        if not len(addresses):
            return
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self._lookup(grid, low)
        if buffer is not None and high + size_bytes <= buffer.end:
            self._check_write(buffer, low, write)
            yield buffer, _offsets(addresses, buffer.address), None
            return
        left = np.arange(len(addresses))
        while len(left):
            first = int(addresses[left[0]])
            buffer = self._lookup(grid, first)
            if buffer is None or first + size_bytes > buffer.end:
                raise self._outside(first, size_bytes, buffer, write)
            self._check_write(buffer, first, write)
            offsets = _offsets(addresses[left], buffer.address)
            inside = (offsets >= 0) & (offsets + size_bytes <= len(buffer.data))
            yield buffer, offsets[inside], left[inside]
            left = left[~inside]

    def _lookup(self, grid: Grid, address: int) -> Buffer | None:
        if address >= MODULE_WINDOW:
            if address >= PARAMETER_WINDOW:
                return grid.parameter_buffer if address < SHARED_WINDOW else None
            return grid.module_buffer
        return self.find(address)

    def _outside(
        self, address: int, size_bytes: int, buffer: Buffer | None, write: bool
    ) -> MemoryFault:
        doing = "writes" if write else "reads"
        if LOCAL_WINDOW <= address < MODULE_WINDOW:
            return MemoryFault("out-of-bounds", f"{doing} local memory through this instruction")
        if address >= SHARED_WINDOW:
            return MemoryFault("out-of-bounds", f"{doing} shared memory as global memory")
        place = f"past the end of {buffer.name}" if buffer is not None else f"{self.near(address)}"
        return MemoryFault(
            "out-of-bounds", f"{doing} {size_bytes} bytes at global address {address:#x}: {place}"
        )

    @staticmethod
    def _check_write(buffer: Buffer, address: int, write: bool) -> None:
        if write and not buffer.writable:
            raise MemoryFault(
                "out-of-bounds", f"writes {buffer.name}, which is read-only, at {address:#x}"
            )


def _offsets(addresses: Array, start: int) -> Array:
    return (addresses.astype(np.uint64) - np.uint64(start)).astype(np.int64)


def check_alignment(addresses: Array, alignment_bytes: int, space: str) -> None:
    """Raises MemoryFault unless all addresses are multiples of the alignment."""
    wrong = addresses & addresses.dtype.type(alignment_bytes - 1)
    if wrong.any():
        address = int(addresses[wrong.nonzero()[0][0]])
        raise MemoryFault(
            "misaligned", f"{space} address {address:#x} is not a multiple of {alignment_bytes}"
        )


def locate_shared(
    cta: Cta, addresses: Array, size_bytes: int
) -> Iterator[tuple[Cta, Array, Array | None]]:
    """The CTAs behind shared addresses (n,), which may carry a CTA rank or be generic.

    Yields (CTA, int64 byte offsets into its smem, indices or None for all). Raises MemoryFault for
    a unit outside the CTA's shared memory, a rank outside the cluster, a CTA that has exited.
    """
    if not len(addresses):
        return
    values = addresses.astype(np.uint64)
    if int(values.max()) >= SHARED_WINDOW:
        values = values - np.uint64(SHARED_WINDOW)
    ranks = (values >> np.uint64(RANK_SHIFT)).astype(np.int64)
    offsets = (values & np.uint64(_OFFSET_MASK)).astype(np.int64)
    ctas = cta.cluster.ctas
    low, high = int(ranks.min()), int(ranks.max())
    if high >= len(ctas):
        raise MemoryFault(
            "out-of-bounds",
            f"shared address {int(values.max()):#x} names CTA rank {high} of a cluster of "
            f"{len(ctas)}",
        )
    for rank in range(low, high + 1):
        here = None if low == high else (ranks == rank).nonzero()[0]
        part = offsets if here is None else offsets[here]
        if len(part):
            _check_shared(cta, ctas[rank], part, size_bytes)
            yield ctas[rank], part, here


def locate_one_shared(cta: Cta, address: int, size_bytes: int) -> tuple[Cta, int]:
    """The CTA and the offset behind one shared address. Raises MemoryFault as locate_shared."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    rank, offset = address >> RANK_SHIFT, address & _OFFSET_MASK
    ctas = cta.cluster.ctas
    if rank < len(ctas):
        target = ctas[rank]
        inside = offset >= SHARED_BASE and offset + size_bytes <= target.shared_end
        if inside and (target is cta or not target.done):
            return target, offset
    ((target, offsets, _),) = locate_shared(cta, np.array([address], np.uint64), size_bytes)
    return target, int(offsets[0])


def _check_shared(cta: Cta, target: Cta, offsets: Array, size_bytes: int) -> None:
    low, high = int(offsets.min()), int(offsets.max()) + size_bytes
    if low < SHARED_BASE or high > target.shared_end:
        wrong = low if low < SHARED_BASE else high - size_bytes
        raise MemoryFault(
            "out-of-bounds",
            f"{size_bytes} bytes at shared address {wrong:#x} of CTA {target.index}: its shared "
            f"memory is {SHARED_BASE:#x}..{target.shared_end - 1:#x}",
        )
    if target.done and target is not cta:
        raise MemoryFault("exit", f"uses the shared memory of CTA {target.index}, which has exited")
