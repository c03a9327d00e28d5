"""cp.async, the copies of the generic proxy that threads issue: PTX ISA 9.7.9.25.3.

The data move when the copy completes, at some time after its issue; a thread knows of it after
wait_group, wait_all, or the mbarrier phase that cp.async.mbarrier.arrive takes part in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.bulk import Side, pass_unwritten
from fa4.emulator.isa.copy_groups import commit_handler, wait_handler
from fa4.emulator.isa.loads import PREFETCHES
from fa4.emulator.isa.mbarriers import find_barrier
from fa4.emulator.isa.signals import MBarrierSignal
from fa4.emulator.isa.spaces import Piece, Space, record, units
from fa4.emulator.machine.copies import CopyGroups, IssuedCopy
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.memory import check_alignment
from fa4.emulator.machine.shadows import READ, WRITE, Touch
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.machine.waits import Blocked
from fa4.emulator.ptx.syntax import Integer, Operand, PtxInstruction, Register
from fa4.emulator.translate.context import Handler, KernelContext, Reader
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lanes_of

ROWS = TableRows()

SIZES = {"ca": (4, 8, 16), "cg": (16,)}
_SHARED, _GLOBAL = Space("shared"), Space("global")


def _groups(warp: Warp) -> CopyGroups:
    return warp.thread_copies.groups


@dataclass
class _Sources:
    """Where the bytes of a warp's cp.async come from: rows (lanes) that copy `size_bytes` each."""

    rows: Array
    size_bytes: int
    piece: Piece


def _source_size(
    instruction: PtxInstruction, context: KernelContext, operands: tuple[Operand, ...], size: int
) -> Reader:
    """Reads how many bytes of the source each lane copies; the rest of `size` is zero."""
    if not operands:
        return lambda warp: np.full(32, size, np.uint32)
    if isinstance(operands[0], Register) and context.locate(operands[0].name)[1] == 1:
        ignore = context.reader(operands[0], "pred")
        return lambda warp: np.where(ignore(warp), 0, size)
    return context.reader(operands[0], "b32")


@ROWS.machine(
    "cp.async",
    "9.7.9.25.3.1",
    "cp.async{.ca .cg}.shared{::cta}.global{.L2::cache_hint}{.L2::64B .L2::128B .L2::256B} "
    "[dst], [src], 4 8 16{, src-size | ignore-src}{, cache-policy}",
    types=("ca", "cg"),
)
def bind_copy(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """One operation for the warp; each lane's part belongs to its own group."""
    operator, _, _, hint, _ = modifiers(
        instruction,
        "cp.async",
        SIZES,
        ("shared", "shared::cta"),
        ("global",),
        ("L2::cache_hint",),
        PREFETCHES,
    )
    operands = instruction.operands[:-1] if hint else instruction.operands
    if not isinstance(operands[2], Integer) or operands[2].value not in SIZES[operator]:
        raise Unsupported(f"cp.async.{operator} of {operands[2]} bytes")
    size = operands[2].value
    target, source = context.address(operands[0]), context.address(operands[1])
    source_size = _source_size(instruction, context, operands[3:], size)
    reads = Access(instruction.line, check_initialised=False)
    access = Access(instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        lanes = lanes_of(mask)
        taken = np.minimum(source_size(warp)[lanes], size)
        targets = list(_SHARED.pieces(warp, target(warp)[lanes], lanes, size, write=True))
        addresses = source(warp)[lanes]
        check_alignment(addresses[taken > 0], size, "global")
        sources = _find_sources(warp, addresses, lanes, taken)
        actor = cta.pool.begin(warp.clock.snapshot(mask))
        for part in sources:
            touch = Touch(actor, reads, READ, actor.lane)
            record(warp, part.piece, part.size_bytes, touch)
        for piece in targets:
            record(warp, piece, size, Touch(actor, access, WRITE, actor.lane))
        _pass_unwritten(cta, sources, targets, size)
        copy = IssuedCopy(mask)
        warp.thread_copies.begin(copy)

        def complete() -> None:
            _move(sources, targets, len(lanes), size)
            warp.thread_copies.end(copy, actor.completion(fenced=False))

        # Nothing asks threads to wait for their copies before they exit; flash-attn-4 does not.
        cta.submit("cp.async", instruction.line, complete).harmless = True

    return handler


def _find_sources(warp: Warp, addresses: Array, lanes: Array, taken: Array) -> list[_Sources]:
    found = []
    for count in np.unique(taken).tolist():
        rows = (taken == count).nonzero()[0]
        if count:
            for piece in _GLOBAL.resolve(warp, addresses[rows], lanes[rows], count, write=False):
                chosen = rows if piece.indices is None else rows[piece.indices]
                found.append(_Sources(chosen, count, piece))
    return found


def _pass_unwritten(
    cta: Cta, sources: list[_Sources], targets: list[Piece], size_bytes: int
) -> None:
    """Targets hold what they are copied of unwritten memory; zeros behind a source are written."""
    for part in sources:
        if part.size_bytes != size_bytes:
            continue
        side = Side([replace(part.piece, indices=None)], len(part.rows), size_bytes)
        unwritten = side.unwritten()
        for piece in targets if unwritten is not None else []:
            rows = np.arange(len(piece.offsets)) if piece.indices is None else piece.indices
            chosen = np.isin(rows, part.rows[unwritten])
            pass_unwritten(cta, piece.offsets[chosen], size_bytes)


def _move(sources: list[_Sources], targets: list[Piece], count: int, size: int) -> None:
    values = np.zeros((count, size), np.uint8)
    for part in sources:
        got = units(part.piece.data, part.size_bytes)[part.piece.offsets].view(np.uint8)
        values[part.rows, : part.size_bytes] = got.reshape(-1, part.size_bytes)
    whole = values.view(f"V{size}").reshape(-1)
    for piece in targets:
        part_of = whole if piece.indices is None else whole[piece.indices]
        units(piece.data, size)[piece.offsets] = part_of


@ROWS.machine("cp.async.commit_group", "9.7.9.25.3.2", "cp.async.commit_group")
def bind_commit(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Closes a group of each active lane."""
    return commit_handler(_groups)


@ROWS.machine("cp.async.wait_group", "9.7.9.25.3.3", "cp.async.wait_group N")
def bind_wait_group(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits until at most the N latest groups of each lane are under way."""
    count = instruction.operands[0]
    if not isinstance(count, Integer) or count.value < 0:
        raise Unsupported(f"cp.async.wait_group {count}")
    return wait_handler(_groups, count.value, False, f"cp.async.wait_group {count.value}")


@ROWS.machine("cp.async.wait_all", "9.7.9.25.3.3", "cp.async.wait_all")
def bind_wait_all(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits for every cp.async of the active lanes, committed or not."""
    wait = wait_handler(_groups, 0, False, "cp.async.wait_all")

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        groups = _groups(fragment.warp)
        if any(lanes & mask for lanes, _ in groups.open):
            groups.commit(mask)
        outcome: Blocked | None = wait(fragment, mask)
        return outcome

    return handler


@ROWS.machine(
    "cp.async.mbarrier.arrive",
    "9.7.13.15.17",
    "cp.async.mbarrier.arrive{.noinc}{.shared{::cta}}.b64 [addr]",
)
def bind_arrive(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Each lane arrives once all its earlier cp.async are done; without .noinc the phase also
    waits for one arrival more."""
    noinc, space, _ = modifiers(
        instruction, "cp.async.mbarrier.arrive", ("noinc",), ("shared", "shared::cta"), ("b64",)
    )
    address = context.address(instruction.operands[0])
    where = Space(space, own_cta_only=True)

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        lanes = lanes_of(mask)
        for piece in where.pieces(warp, address(warp)[lanes], lanes, 8, write=True):
            for offset in np.unique(piece.offsets).tolist():
                barrier = find_barrier(fragment, cta, offset, BarrierUse.ARRIVE_AFTER_COPIES)
                here = piece.offsets == offset
                chosen = lanes[here if piece.indices is None else piece.indices[here]]
                group = sum(1 << lane for lane in chosen.tolist())
                if not noinc:
                    barrier.pending += group.bit_count()
                signal = MBarrierSignal(cta, offset, barrier, instruction.line)
                _arrive_after_copies(warp, group, signal)

    return handler


def _arrive_after_copies(warp: Warp, lanes: int, signal: MBarrierSignal) -> None:
    """Submits the arrival of `lanes` once their copies under way are done."""
    cta, progress = warp.cta, warp.thread_copies
    waiting = [copy for copy in progress.under_way if copy.mask & lanes]
    left = len(waiting)

    def arrive() -> None:
        signal.arrive(lanes.bit_count(), progress.finished, warp.name)

    def one_done() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            cta.submit("cp.async.mbarrier.arrive", signal.line, arrive)

    for copy in waiting:
        copy.when_done.append(one_done)
    if not waiting:
        one_done()
