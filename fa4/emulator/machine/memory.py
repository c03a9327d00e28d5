"""The address spaces: from an address to the bytes behind it, or to a clear fault."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.errors import EmulatorError
from fa4.emulator.machine.state_addresses import BUFFER
from fa4.emulator.translate.layout import (
    LOCAL_WINDOW,
    MODULE_WINDOW,
    PARAMETER_WINDOW,
    SHARED_WINDOW,
)
from fa4.emulator.warp_lanes import Array


class MemoryFault(EmulatorError):
    """An access that hardware would refuse. kind: "out-of-bounds" or "misaligned"."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(eq=False)
class GlobalBuffer:
    """A registered piece of global memory. data: its bytes; shadow: its record of accesses."""

    name: str
    address: int
    data: Array
    writable: bool
    shadow: ShadowMemory | None = None

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + len(self.data)


def buffer_at(name: str, address: int, size_bytes: int, writable: bool) -> GlobalBuffer:
    """A buffer over real memory of this process, which the caller keeps alive."""
    if size_bytes == 0:
        return GlobalBuffer(name, address, np.zeros(0, np.uint8), writable)
    raw = (ctypes.c_uint8 * size_bytes).from_address(address)
    return GlobalBuffer(name, address, np.ctypeslib.as_array(raw), writable)


class OwnBuffers(Protocol):
    """What every grid has for itself: its parameters and its module's variables."""

    @property
    def parameter_buffer(self) -> GlobalBuffer:
        """What the kernel was launched with."""

    @property
    def module_buffer(self) -> GlobalBuffer:
        """The variables of its module."""


def _describe(buffers: list[GlobalBuffer]) -> Any:
    """The BUFFERs of buffers, in the same order; they are valid as long as these live."""
    rows = np.zeros(len(buffers), BUFFER)
    for row, buffer in zip(rows, buffers, strict=True):
        row["start"], row["end"] = buffer.address, buffer.end
        row["data"], row["writable"] = buffer.data.ctypes.data, buffer.writable
        row["shadow"] = buffer.shadow.state_address if buffer.shadow is not None else 0
    return rows


class Memory:
    """The global memory that kernels may touch: the registered buffers, nothing else."""

    def __init__(self, buffers: list[GlobalBuffer]) -> None:
        self.buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = [buffer.address for buffer in self.buffers]
        # What strong writes published, by location: see fa4.emulator.isa.ordering.
        self.flags: dict[tuple[int, int], Any] = {}
        self._table: Array = np.zeros(2, np.int64)
        self.refresh()

    def add(self, buffer: GlobalBuffer) -> None:
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
        self._rows = _describe(self.buffers)
        self._table[:] = self._rows.ctypes.data, len(self._rows)

    def find(self, address: int) -> GlobalBuffer | None:
        """The buffer that holds an address. Several may start together: the longest counts."""
        index = bisect.bisect_right(self._starts, address) - 1
        while index >= 0:
            if address < self.buffers[index].end:
                return self.buffers[index]
            index -= 1
        return None

    def outside(self, own: OwnBuffers, address: int) -> str:
        """Where a global address lies, in words, if that is no memory; nothing if it is."""
        return "" if self._lookup(own, address) is not None else self.near(address)

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
        self, own: OwnBuffers, addresses: Array, size_bytes: int, write: bool
    ) -> Iterator[tuple[GlobalBuffer, Array, Array | None]]:
        """The buffers behind global addresses (any integer dtype, shape (n,)) of n units.

        Yields (buffer, int64 byte offsets, indices of the units or None for all). Raises
        MemoryFault for a unit that is not wholly inside one buffer, or read-only and written.
        """
        if not len(addresses):
            return
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self._lookup(own, low)
        if buffer is not None and high + size_bytes <= buffer.end:
            self._check_write(buffer, low, write)
            yield buffer, _offsets(addresses, buffer.address), None
            return
        left = np.arange(len(addresses))
        while len(left):
            first = int(addresses[left[0]])
            buffer = self._lookup(own, first)
            if buffer is None or first + size_bytes > buffer.end:
                raise self._outside(first, size_bytes, buffer, write)
            self._check_write(buffer, first, write)
            offsets = _offsets(addresses[left], buffer.address)
            inside = (offsets >= 0) & (offsets + size_bytes <= len(buffer.data))
            yield buffer, offsets[inside], left[inside]
            left = left[~inside]

    def _lookup(self, own: OwnBuffers, address: int) -> GlobalBuffer | None:
        if address >= MODULE_WINDOW:
            if address >= PARAMETER_WINDOW:
                return own.parameter_buffer if address < SHARED_WINDOW else None
            return own.module_buffer
        return self.find(address)

    def _outside(
        self, address: int, size_bytes: int, buffer: GlobalBuffer | None, write: bool
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
    def _check_write(buffer: GlobalBuffer, address: int, write: bool) -> None:
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
