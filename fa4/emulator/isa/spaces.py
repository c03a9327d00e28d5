"""From the addresses of a thread instruction to the bytes behind them (PTX ISA 5.1).

A `Space` is bound once per instruction; its `pieces` split the units that the lanes name by the
memory they lie in. `units` reads and writes the bytes of a piece, `record` tells the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np

from fa4.emulator.machine.checks import record_buffer, record_shared
from fa4.emulator.machine.memory import GlobalBuffer, MemoryFault, check_alignment
from fa4.emulator.machine.shadows import Touch
from fa4.emulator.machine.shared_memory import locate_shared
from fa4.emulator.machine.state import Cta, Warp
from fa4.emulator.ptx.syntax import FloatBits, Integer, Operand, Register, Sink
from fa4.emulator.translate.context import UNSIGNED, KernelContext, Reader
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.layout import (
    LOCAL_WINDOW,
    RANK_SHIFT,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW_BYTES,
    WINDOWS,
)
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import FULL_MASK, Array, lane_flags

SHARED = ("shared", "shared::cta", "shared::cluster")
SPACES = (*SHARED, "global", "const", "local", "param", "param::entry", "param::func")

TYPES = (
    *("b8", "b16", "b32", "b64", "b128"),
    *(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)),
    *("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"),
)
VECTORS = {"": 1, "v2": 2, "v4": 4, "v8": 8}
LARGEST_VECTOR_BYTES = 16
LARGEST_GLOBAL_VECTOR_BYTES = 32  # .v8.b32 and .v4.b64 on sm_100 and later

_WINDOW_SHIFT = 56
_LANES = np.arange(32)


@dataclass(slots=True)
class Piece:
    """Units of one access that lie in one memory.

    data: all bytes of that memory. offsets: int64, byte offset of each unit. indices: which units
    of the access these are (None: all). home: whose shadow records them, None if they are
    private.
    """

    data: Array
    offsets: Array
    indices: Array | None
    home: Cta | GlobalBuffer | None


@numba.njit(cache=True)
def survey(addresses: Any) -> Any:
    """(lowest, highest, all of their bits together) of addresses."""
    low = high = bits = addresses[0]
    for address in addresses:
        low = min(low, address)
        high = max(high, address)
        bits |= address
    return low, high, bits


def _distance(addresses: Array, base: int) -> Array:
    return (addresses - np.uint64(base)).view(np.int64)


class Space:
    """The state space of an instruction; "" is generic addressing, each lane for itself."""

    def __init__(self, name: str, own_cta_only: bool = False) -> None:
        self.name = name or "generic"
        self.shared = name in SHARED
        self.own_cta_only = own_cta_only or name in ("shared", "shared::cta")
        # What calls pass lies in frames, which are local memory.
        self.generic = not name or name.startswith("param")
        self.window = WINDOWS.get(name)

    def pieces(
        self, warp: Warp, addresses: Array, lanes: Array, size_bytes: int, write: bool
    ) -> Iterable[Piece]:
        """The memories behind the addresses (n,), one for each of `lanes`.

        Raises MemoryFault for misaligned units (a multiple of their size is needed) and for units
        outside every memory.
        """
        if not len(addresses):
            return ()
        addresses = self._whole(addresses)
        low, high, bits = survey(addresses)
        if bits & (size_bytes - 1):
            check_alignment(addresses, size_bytes, self.name)
        piece = self._one_piece(warp, addresses, int(low), int(high) + size_bytes, write)
        if piece is not None:
            return (piece,)
        return self.resolve(warp, addresses, lanes, size_bytes, write)

    def _whole(self, addresses: Array) -> Array:
        """Addresses with the window of their space, which 32-bit ones do not hold."""
        if self.window is None:
            return addresses
        return np.where(addresses < WINDOW_BYTES, addresses + np.uint64(self.window), addresses)

    def _one_piece(
        self, warp: Warp, addresses: Array, low: int, end: int, write: bool
    ) -> Piece | None:
        """The common case, all units in one place; None if it is not that, or a fault."""
        cta = warp.cta
        if not self.shared and low < LOCAL_WINDOW:
            buffer = cta.machine.memory.find(low)
            if buffer is None or end > buffer.end or (write and not buffer.writable):
                return None
            return Piece(buffer.data, _distance(addresses, buffer.address), None, buffer)
        if not self.shared and not self.generic:
            return None
        base = cta.rank << RANK_SHIFT
        if not self.shared or low >= SHARED_WINDOW:
            base += SHARED_WINDOW
        if low < base + SHARED_BASE or end > base + cta.shared_end:
            return None
        return Piece(cta.smem, _distance(addresses, base), None, cta)

    def resolve(
        self, warp: Warp, addresses: Array, lanes: Array, size_bytes: int, write: bool
    ) -> Iterator[Piece]:
        """As `pieces`, at any alignment."""
        addresses = self._whole(addresses)
        if self.shared:
            return self._shared(warp, addresses, size_bytes)
        if self.name == "local":
            return _local(warp, addresses, lanes, size_bytes)
        if not self.generic or int(addresses.max()) < LOCAL_WINDOW:
            return _global(warp, addresses, size_bytes, write)
        return self._by_window(warp, addresses, lanes, size_bytes, write)

    def _shared(self, warp: Warp, addresses: Array, size_bytes: int) -> Iterator[Piece]:
        for cta, offsets, indices in locate_shared(warp.cta, addresses, size_bytes):
            if self.own_cta_only and cta is not warp.cta:
                raise MemoryFault(
                    "out-of-bounds",
                    f"an address of CTA {cta.index} used as .shared::cta by CTA {warp.cta.index}",
                )
            yield Piece(cta.smem, offsets, indices, cta)

    def _by_window(
        self, warp: Warp, addresses: Array, lanes: Array, size_bytes: int, write: bool
    ) -> Iterator[Piece]:
        windows = addresses >> np.uint64(_WINDOW_SHIFT)
        local = windows == LOCAL_WINDOW >> _WINDOW_SHIFT
        shared = windows >= SHARED_WINDOW >> _WINDOW_SHIFT
        for chosen in (local, shared, ~(local | shared)):
            here = chosen.nonzero()[0]
            if not len(here):
                continue
            part = addresses[here]
            if chosen is local:
                found = _local(warp, part, lanes[here], size_bytes)
            elif chosen is shared:
                found = self._shared(warp, part, size_bytes)
            else:
                found = _global(warp, part, size_bytes, write)
            for piece in found:
                piece.indices = here if piece.indices is None else here[piece.indices]
                yield piece


def _global(warp: Warp, addresses: Array, size_bytes: int, write: bool) -> Iterator[Piece]:
    cta = warp.cta
    memory, grid = cta.machine.memory, cta.grid
    for buffer, offsets, indices in memory.locate(grid, addresses, size_bytes, write):
        home = None if buffer is grid.parameter_buffer else buffer
        yield Piece(buffer.data, offsets, indices, home)


def _local(warp: Warp, addresses: Array, lanes: Array, size_bytes: int) -> Iterator[Piece]:
    """Local memory: each thread has its own bytes behind the same addresses."""
    local_bytes = warp.program.variables.local_bytes
    offsets = (addresses - np.uint64(LOCAL_WINDOW)).astype(np.int64)
    low, high = int(offsets.min()), int(offsets.max())
    if low < 0 or high + size_bytes > local_bytes:
        wrong = low if low < 0 else high
        raise MemoryFault(
            "out-of-bounds",
            f"{size_bytes} bytes at byte {wrong} of local memory, which has {local_bytes}",
        )
    yield Piece(warp.local.reshape(-1), offsets + lanes * local_bytes, None, None)


def units(data: Array, size_bytes: int) -> Array:
    """An overlapping view of bytes: element i is the `size_bytes` bytes from byte i on."""
    return np.ndarray(len(data) - size_bytes + 1, _raw(size_bytes), data, 0, (1,))


@cache
def _raw(size_bytes: int) -> Any:
    return np.dtype(f"V{size_bytes}")


def record(warp: Warp, piece: Piece, size_bytes: int, touch: Touch) -> None:
    """Tells the checks of an access to a piece; touch.lanes are those of the whole access."""
    if piece.home is None:
        return
    if piece.indices is not None and isinstance(touch.lanes, np.ndarray):
        lanes = touch.lanes[piece.indices]
        touch = Touch(touch.actor, touch.how, touch.kind, lanes, touch.idle)
    if isinstance(piece.home, Cta):
        record_shared(piece.home, piece.offsets, size_bytes, touch)
    else:
        record_buffer(warp.cta, piece.home, piece.offsets, size_bytes, touch)


class Elements:
    """The register operand of a memory instruction: one value or a vector of them.

    words: how many integers of `dtype` a lane has; a 128-bit register counts as two of 64 bits.
    """

    def __init__(
        self, context: KernelContext, operand: Operand, ptx_type: str, written: bool = False
    ) -> None:
        bits = width_of(ptx_type)
        self.dtype = np.dtype(UNSIGNED[min(bits, 64)])
        elements = context.elements(operand)
        self.words = len(elements) * (2 if bits == 128 else 1)
        self.size_bytes = len(elements) * bits // 8
        self._wide = bits == 128
        self._bits = bits
        self._index = None if self._wide else _register_index(context, elements, bits)
        if self._wide:
            self._offsets = [_wide_offset(context, element) for element in elements]
        elif written:
            self._writers = [context.writer(element, ptx_type) for element in elements]
        else:
            self._readers = [element_reader(context, element, ptx_type) for element in elements]

    def read(self, warp: Warp) -> Array:
        """(32, words), a copy."""
        if self._index is not None:
            return warp.views[self._bits].take(self._index)
        values = np.empty((32, self.words), self.dtype)
        if self._wide:
            for k, offset in enumerate(self._offsets):
                if offset is not None:
                    values[:, 2 * k : 2 * k + 2] = _wide_view(warp, offset)
            return values
        for k, read in enumerate(self._readers):
            values[:, k] = read(warp)
        return values

    def write(self, warp: Warp, values: Array, mask: int) -> None:
        """values: (n, words), a row for each lane of the mask."""
        if self._index is not None:
            index = self._index if mask == FULL_MASK else self._index[lane_flags[mask]]
            warp.views[self._bits][index] = values
            return
        if mask != FULL_MASK:
            spread = np.zeros((32, self.words), self.dtype)
            spread[lane_flags[mask]] = values
            values = spread
        if self._wide:
            for k, offset in enumerate(self._offsets):
                if offset is not None:
                    chosen = lane_flags[mask]
                    _wide_view(warp, offset)[chosen] = values[chosen, 2 * k : 2 * k + 2]
            return
        for k, write in enumerate(self._writers):
            write(warp, values[:, k], mask)


def _register_index(
    context: KernelContext, operands: tuple[Operand, ...], bits: int
) -> Array | None:
    """(32, n): where each lane's value of each operand stands in the register file as integers of
    this width. None unless there are several, all of them different registers of this width."""
    registers = [operand for operand in operands if isinstance(operand, Register)]
    if len(operands) < 2 or len({register.name for register in registers}) < len(operands):
        return None
    places = [context.locate(register.name) for register in registers]
    if any(own_bits != bits for _, own_bits in places):
        return None
    return np.array([offset * 8 // bits for offset, _ in places]) + _LANES[:, None]


def _wide_offset(context: KernelContext, operand: Operand) -> int | None:
    """Where a 128-bit register starts in the register file, in bytes; None for "_"."""
    if isinstance(operand, Sink):
        return None
    if not isinstance(operand, Register):
        raise Unsupported(f"operand {operand} of 128 bits")
    offset, bits = context.locate(operand.name)
    if bits != 128:
        raise Unsupported(f"{operand.name} has {bits} bits, 128 are needed")
    return offset


def _wide_view(warp: Warp, offset: int) -> Array:
    return warp.views[64][offset // 8 : offset // 8 + 64].reshape(32, 2)


def element_reader(context: KernelContext, operand: Operand, ptx_type: str) -> Reader:
    """As context.reader, and takes literals as `st.f32 [a], 1.5` writes them: as doubles."""
    if isinstance(operand, FloatBits) and operand.width == 64 and width_of(ptx_type) == 32:
        value = np.array(operand.bits, np.uint64).view(np.float64).astype(np.float32)
        return context.reader(Integer(int(value.view(np.uint32))), ptx_type)
    return context.reader(operand, ptx_type)


def check_vector(space: str, vector: str, ptx_type: str) -> int:
    """Bytes of one lane's access. Raises Unsupported for vectors that PTX excludes."""
    size_bytes = VECTORS[vector] * width_of(ptx_type) // 8
    largest = LARGEST_GLOBAL_VECTOR_BYTES if space == "global" else LARGEST_VECTOR_BYTES
    if size_bytes > largest:
        raise Unsupported(f"{size_bytes} bytes a lane, at most {largest} here")
    return size_bytes
