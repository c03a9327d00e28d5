"""What bulk and tensor copies share: sides of a copy, and the operations that move its bytes.

A copy into shared memory is one operation for each CTA it writes. A copy into global memory is
two: the first has read shared memory, the second has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np

from fa4.emulator.checks.clocks import AsyncActor, Message
from fa4.emulator.checks.conflict import Access
from fa4.emulator.checks.global_shadow import GlobalShadow
from fa4.emulator.isa.atomics import in_rounds
from fa4.emulator.isa.mbarriers import check_visible_to_copies, find_barrier
from fa4.emulator.isa.signals import MBarrierSignal
from fa4.emulator.isa.spaces import Piece, units
from fa4.emulator.machine.checks import record_buffer, record_shared
from fa4.emulator.machine.copies import IssuedCopy
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.memory import GlobalBuffer, MemoryFault, check_alignment
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.shadows import READ, WRITE, Touch
from fa4.emulator.machine.shared_memory import locate_one_shared
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.tma.reduction import reduce_bytes
from fa4.emulator.warp_lanes import Array

CHUNK_BYTES = 16


@dataclass
class Side:
    """One side of a copy: n units of unit_bytes in one or more memories."""

    pieces: list[Piece]
    count: int
    unit_bytes: int

    def gather(self) -> Array:
        """The units (n,), dtype V."""
        values = np.empty(self.count, f"V{self.unit_bytes}")
        for piece in self.pieces:
            rows = slice(None) if piece.indices is None else piece.indices
            values[rows] = units(piece.data, self.unit_bytes)[piece.offsets]
        return values

    def scatter(self, values: Array) -> None:
        """Writes the units."""
        for piece in self.pieces:
            rows = slice(None) if piece.indices is None else piece.indices
            units(piece.data, self.unit_bytes)[piece.offsets] = values[rows]

    def reduce(self, operation: str, element: str, values: Array) -> None:
        """Combines the units with what is there; a place that occurs twice is updated twice."""
        for piece in self.pieces:
            part = values if piece.indices is None else values[piece.indices]
            memory = units(piece.data, self.unit_bytes)
            for now in in_rounds(piece.offsets):
                places = piece.offsets[now]
                old, new = (_rows(v) for v in (memory[places], part[now]))
                total = np.ascontiguousarray(reduce_bytes(operation, element, old, new))
                memory[places] = total.view(memory.dtype).reshape(-1)

    def touch(self, cta: Cta, actor: AsyncActor, line: int, kind: str) -> None:
        """Records the accesses of an operation, at its issue."""
        granule = cta.machine.shadows.global_granule
        # What a copy reads of unwritten global memory its target holds: see `pass_unwritten`.
        loose = kind == READ and not isinstance(self.pieces[0].home, Cta) if self.pieces else False
        access = Access(line, async_proxy=True, check_initialised=not loose)
        touch = Touch(actor, access, kind, actor.lane)
        for piece in self.pieces:
            if isinstance(piece.home, Cta):
                cta.note_moved(piece.home, line, len(piece.offsets) * self.unit_bytes)
                record_shared(piece.home, piece.offsets, self.unit_bytes, touch)
            elif piece.home is not None:
                offsets, size = self._granules(piece, granule)
                record_buffer(cta, piece.home, offsets, size, touch)

    def _granules(self, piece: Piece, granule: int) -> tuple[Array, int]:
        """(offsets, bytes) of what the shadow records: whole granules only, so that copies that
        share a granule at their edges do not seem to race."""
        offsets, unit = piece.offsets, self.unit_bytes
        if unit % granule == 0 and not (offsets % granule).any():
            return offsets, unit
        step = gcd(granule, unit, *np.unique(offsets % granule).tolist())
        parts = (offsets[:, None] + np.arange(0, unit, step)).reshape(-1)
        starts, counts = np.unique(parts // granule, return_counts=True)
        return starts[counts * step >= granule] * granule, granule

    def unwritten(self) -> Array | None:
        """Which units of global memory nothing has written, bool (n,); None: none of them."""
        found = np.zeros(self.count, bool)
        for piece in self.pieces:
            shadow = piece.home.shadow if isinstance(piece.home, GlobalBuffer) else None
            if isinstance(shadow, GlobalShadow) and not shadow.initialised:
                rows = slice(None) if piece.indices is None else piece.indices
                found[rows] = shadow.never_written(piece.offsets, self.unit_bytes)
        return found if found.any() else None


def pass_unwritten(cta: Cta, offsets: Array, unit_bytes: int) -> None:
    """Shared memory at these offsets holds what was copied of unwritten memory: whoever reads it
    reads what nothing has written, and a copy that nobody uses harms nothing."""
    shadow = cta.smem_shadow
    if shadow is None or not len(offsets):
        return
    granule = shadow.granule_bytes
    step = gcd(granule, unit_bytes)
    parts = (offsets[:, None] + np.arange(0, unit_bytes, step)).reshape(-1)
    starts, counts = np.unique(parts // granule, return_counts=True)
    shadow.forget(starts[counts * step >= granule])


def _rows(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def shared_side(warp: Warp, address: int, size_bytes: int, own_cta: bool) -> tuple[Cta, int]:
    """(CTA, offset) of a range of shared memory.

    Raises MemoryFault outside it, and for another CTA's memory where `own_cta` excludes that.
    """
    cta, offset = locate_one_shared(warp.cta, address, max(size_bytes, 1))
    if own_cta and cta is not warp.cta:
        raise MemoryFault(
            "out-of-bounds", f"{address:#x} of CTA {cta.index} used as .shared::cta address"
        )
    return cta, offset


def shared_chunks(cta: Cta, offset: int, size_bytes: int) -> Side:
    """A contiguous range of shared memory, in units of 16 bytes."""
    offsets = np.arange(offset, offset + size_bytes, CHUNK_BYTES, dtype=np.int64)
    return Side([Piece(cta.smem, offsets, None, cta)], len(offsets), CHUNK_BYTES)


def global_side(warp: Warp, addresses: Array, unit_bytes: int, write: bool) -> Side:
    """Units of global memory. Raises MemoryFault outside the registered buffers."""
    cta = warp.cta
    found = cta.machine.memory.locate(cta.grid, addresses, unit_bytes, write)
    pieces = [
        Piece(buffer.data, offsets, indices, _home(cta, buffer))
        for buffer, offsets, indices in found
    ]
    return Side(pieces, len(addresses), unit_bytes)


def _home(cta: Cta, buffer: GlobalBuffer) -> GlobalBuffer | None:
    return None if buffer is cta.grid.parameter_buffer else buffer


def check_bulk(what: str, address: int, size_bytes: int) -> None:
    """Raises MemoryFault unless address and size are multiples of 16 (PTX ISA 9.7.9.25.4.1)."""
    check_alignment(np.array([address], np.uint64), CHUNK_BYTES, what)
    if size_bytes % CHUNK_BYTES:
        raise MemoryFault("misaligned", f"a bulk copy of {size_bytes} bytes: not a multiple of 16")


def barrier_signal(fragment: Fragment, cta: Cta, address: int, line: int) -> MBarrierSignal:
    """The mbarrier at the CTA-relative part of a shared address, in `cta`."""
    _, offset = shared_side(fragment.warp, address, 8, own_cta=False)
    barrier = find_barrier(fragment, cta, offset, BarrierUse.COPY)
    check_visible_to_copies(fragment, cta, barrier)
    return MBarrierSignal(cta, offset, barrier, line)


def begin(warp: Warp, lane: int) -> Message:
    """What an operation carries that one lane issues now."""
    return warp.clock.snapshot(1 << lane)


def submit_fill(
    cta: Cta,
    what: str,
    actor: AsyncActor,
    move: Callable[[], None],
    done: tuple[MBarrierSignal, int],
) -> None:
    """An operation that writes shared memory and then counts bytes at an mbarrier.

    done: the mbarrier and the bytes.
    """
    signal, size_bytes = done

    def complete() -> None:
        move()
        signal.complete(size_bytes, actor.completion())

    cta.submit(what, signal.line, complete)


def submit_drain(
    warp: Warp, lane: int, what: str, line: int, source: Side, write: Callable[[Array], None],
    target: Side, kind: str = WRITE,
) -> None:  # fmt: skip
    """Two operations: shared memory is read, then `write` is called with what was read.

    kind: how the target is accessed, WRITE or ATOMIC.
    """
    cta = warp.cta
    snapshot = begin(warp, lane)
    reader, writer = cta.pool.begin(snapshot), cta.pool.begin(snapshot)
    source.touch(cta, reader, line, READ)
    target.touch(cta, writer, line, kind)
    copy = IssuedCopy(1 << lane, line)
    warp.bulk_copies.add(copy)
    queue: deque[AsyncOperation] = deque()
    held: list[Array] = []

    def read() -> None:
        held.append(source.gather())
        copy.finish_read(reader.completion())

    def finish() -> None:
        write(held[0])
        copy.finish(writer.completion())

    cta.submit(f"{what} (reading shared memory)", line, read, queue)
    # The write needs nothing of the CTA, which may exit before.
    cta.submit(f"{what} (writing)", line, finish, queue).harmless = True
