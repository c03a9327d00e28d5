"""The mbarrier instructions (PTX ISA 9.7.13.15)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.machine.checks import record_shared
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.mbarrier import MBarrier, MBarrierFault
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import WRITE, Touch
from fa4.emulator.machine.shared_memory import locate_one_shared
from fa4.emulator.machine.state import Cta, Fragment, RemoteArrival, Warp
from fa4.emulator.machine.waits import SPIN, Blocked, Spin
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lane_flags, lanes_of, lowest, mask_of

ROWS = TableRows()

OBJECT_BYTES = 8
SEMANTICS = ("release", "relaxed", "acquire")
SCOPES = ("cta", "cluster")
SPACES = ("shared", "shared::cta", "shared::cluster")
WAIT, ARRIVE = BarrierUse.WAIT, BarrierUse.ARRIVE  # looked up once
_ONCE = np.ones(32, np.uint32)  # how often each lane arrives


def _addressed(fragment: Fragment, mask: int, addresses: Array) -> Iterator[tuple[Cta, int, int]]:
    """(CTA, offset, mask of the lanes) for each mbarrier that the lanes name."""
    left = mask
    while left:
        first = int(addresses[lowest(left)])
        if first % OBJECT_BYTES:
            raise MemoryFault(
                "misaligned", f"mbarrier address {first:#x} is not a multiple of {OBJECT_BYTES}"
            )
        group = left
        if left & (left - 1):
            group &= mask_of(addresses == addresses.dtype.type(first))
        left &= ~group
        cta, offset = locate_one_shared(fragment.warp.cta, first, OBJECT_BYTES)
        yield cta, offset, group


def find_barrier(fragment: Fragment, cta: Cta, offset: int, use: BarrierUse) -> MBarrier:
    """The initialised mbarrier at a shared address; a fatal finding if there is none."""
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise fragment.fatal(
            "mbarrier",
            f"{use.value} shared address {offset:#x} of CTA {cta.index}, "
            "which holds no initialised mbarrier",
        )
    events = cta.machine.events
    if events is not None and use is not WAIT:  # which may not succeed
        events.barrier_used(fragment, cta, offset, use)
    return barrier


def describe_barrier(cta: Cta, barrier: MBarrier) -> str:
    """ "mbarrier 0x440 of CTA 0 (initialised at PTX line 12)"."""
    return (
        f"mbarrier {barrier.address:#x} of CTA {cta.index} "
        f"(initialised at PTX line {barrier.line}; {barrier.describe()})"
    )


def _parts(group: int, pending: int) -> list[int]:
    """The lanes that still belong to the current phase of an mbarrier, and those behind them: what
    the latter publish comes too late for the phase."""
    if group.bit_count() <= pending or not pending:
        return [group]
    first = 0
    for lane in lanes_of(group)[:pending]:
        first |= 1 << int(lane)
    return [first, group & ~first]


def _report_split(fragment: Fragment, parts: list[int], cta: Cta, barrier: MBarrier) -> None:
    """Lanes of one instruction arrive in two phases: the count does not fit the threads."""
    first, second = (part.bit_count() for part in parts)
    fragment.fault(
        "mbarrier",
        f"{first} of its lanes complete the phase of {describe_barrier(cta, barrier)}, and the "
        f"other {second} arrive in the next phase: more threads arrive than it was initialised for",
    )


def _total(amounts: Array, part: int) -> int:
    return part.bit_count() if amounts is _ONCE else int(amounts[lane_flags[part]].sum())


def _arrive(barrier: MBarrier, amounts: Array, part: int, expect: bool, message: Any) -> int:
    """All lanes of a part arrive. amounts: bytes to expect, or how often each arrives."""
    total = _total(amounts, part)
    if expect:
        barrier.expect(total)
        total = part.bit_count()
    return barrier.arrive(total, message)


class _FaultsOf:
    """Turns a forbidden use of an mbarrier into a fatal finding."""

    __slots__ = ("_barrier", "_cta", "_fragment")

    def __init__(self, fragment: Fragment, cta: Cta, barrier: MBarrier) -> None:
        self._fragment, self._cta, self._barrier = fragment, cta, barrier

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, _kind: Any, fault: BaseException | None, _trace: Any) -> None:
        if isinstance(fault, MBarrierFault):
            text = f"{describe_barrier(self._cta, self._barrier)}: {fault}"
            raise self._fragment.fatal("mbarrier", text) from None


def _write_object(fragment: Fragment, cta: Cta, offset: int, mask: int, how: Access) -> None:
    """Records that the object's bytes are written."""
    touch = Touch(fragment.warp.clock, how, WRITE, lowest(mask))
    record_shared(cta, np.array([offset]), OBJECT_BYTES, touch)


def _check_visible(fragment: Fragment, mask: int, cta: Cta, barrier: MBarrier) -> None:
    """The initialisation must have happened before the use, for every lane that uses it."""
    warp = fragment.warp
    if warp.row in barrier.visible_to or not cta.machine.shadows.enabled:
        return
    cluster, actor, epoch = barrier.made_by
    knowledge = warp.clock.knowledge
    if cluster != knowledge.cluster or knowledge.seen[actor] >= epoch:
        barrier.visible_to.add(warp.row)
    elif actor != warp.row * 32 + lowest(mask) or mask & (mask - 1):
        barrier.visible_to.add(warp.row)
        fragment.fault(
            "mbarrier",
            f"uses {describe_barrier(cta, barrier)} although nothing orders the initialisation "
            "before this use",
        )


def fence_initialisations(warp: Warp, mask: int) -> None:
    """fence.mbarrier_init: what the lanes in `mask` have initialised is visible to bulk copies, for
    whoever knows of the fence."""
    cluster = warp.cta.cluster.number
    for barrier in warp.cta.mbarriers.values():
        made_in, actor, _ = barrier.made_by
        row, lane = divmod(actor, 32)
        own = made_in == cluster and row == warp.row and mask >> lane & 1
        if own and barrier.fenced_in is None:
            barrier.fenced_in = warp.clock.epoch


def check_visible_to_copies(fragment: Fragment, cta: Cta, barrier: MBarrier) -> None:
    """The initialisation must be visible to the async proxy before a bulk copy signals the mbarrier
    (CUDA programming guide, "Using TMA"; PTX ISA 9.7.13.5, fence.mbarrier_init)."""
    if barrier.visible_to_copies or not cta.machine.shadows.enabled:
        return
    barrier.visible_to_copies = True  # report once
    cluster, actor, epoch = barrier.made_by
    warp, fenced_in = fragment.warp, barrier.fenced_in
    knowledge = warp.clock.knowledge
    if fenced_in is not None and (warp.row == actor // 32 or knowledge.seen[actor] >= fenced_in):
        return
    if cluster == knowledge.cluster and knowledge.fenced[actor] < epoch:
        fragment.fault(
            "missing-proxy-fence",
            f"a copy signals {describe_barrier(cta, barrier)}, and no fence.mbarrier_init or "
            "fence.proxy.async makes the initialisation visible to the async proxy before",
            excuse="unfenced-init",
        )


def _report_overtaken(cta: Cta, barrier: MBarrier, line: int, row: int) -> None:
    """A phase ended, and nothing orders a wait for the phase before it before that."""
    if cta.machine.shadows.enabled:
        rank, warp = divmod(row, cta.warp_count)
        waiter = cta.cluster.ctas[rank].warps[warp]
        cta.report(
            "mbarrier",
            f"nothing orders this wait before the end of phase {barrier.phase - 1} of "
            f"{describe_barrier(cta, barrier)}: it succeeded because phase {barrier.phase - 2} "
            "was over, and would not have succeeded had it come later",
            line,
            sites=(waiter.site(line),),
        )


def _check_phase(
    fragment: Fragment, cta: Cta, barrier: MBarrier, known: bool, consequence: str
) -> None:
    """known: whether the warp knows that the phase before the one it means is over."""
    if not known and cta.machine.shadows.enabled:
        fragment.fault(
            "mbarrier",
            f"nothing tells the warp that the phase before is over: {consequence}; "
            f"{describe_barrier(cta, barrier)}",
            sites=(fragment.warp.site(fragment.line),),
        )


@ROWS.machine("mbarrier.init", "9.7.13.15.9", "mbarrier.init{.shared{::cta}}.b64 [addr], count")
def bind_init(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Makes an mbarrier object."""
    modifiers(instruction, "mbarrier.init", SPACES, ("b64",))
    address = context.address(instruction.operands[0])
    count_of = context.reader(instruction.operands[1], "u32")
    how = Access(line=instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        counts = count_of(fragment.warp)
        for cta, offset, group in _addressed(fragment, mask, address(fragment.warp)):
            old = cta.mbarriers.get(offset)
            if old is not None and old.waiters:
                fragment.fault("mbarrier", f"initialises {describe_barrier(cta, old)} in use")
            try:
                barrier = MBarrier(
                    offset,
                    int(counts[lowest(group)]),
                    instruction.line,
                    partial(_report_overtaken, cta),
                )
            except MBarrierFault as fault:
                raise fragment.fatal("mbarrier", str(fault)) from None
            warp = fragment.warp
            barrier.made_by = (
                warp.cta.cluster.number, warp.row * 32 + lowest(group), warp.clock.epoch
            )  # fmt: skip
            cta.mbarriers[offset] = barrier
            _write_object(fragment, cta, offset, group, how)

    return handler


@ROWS.machine("mbarrier.inval", "9.7.13.15.10", "mbarrier.inval{.shared{::cta}}.b64 [addr]")
def bind_inval(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Ends the life of an mbarrier object."""
    modifiers(instruction, "mbarrier.inval", SPACES, ("b64",))
    address = context.address(instruction.operands[0])
    how = Access(line=instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        for cta, offset, group in _addressed(fragment, mask, address(fragment.warp)):
            barrier = find_barrier(fragment, cta, offset, BarrierUse.INVALIDATE)
            if barrier.waiters:
                fragment.fault("mbarrier", f"invalidates {describe_barrier(cta, barrier)} in use")
            _write_object(fragment, cta, offset, group, how)
            del cta.mbarriers[offset]

    return handler


@ROWS.machine(
    "mbarrier.expect_tx", "9.7.13.15.11", "mbarrier.expect_tx{.relaxed.scope}{.space}.b64 [a], n"
)
@ROWS.machine(
    "mbarrier.complete_tx",
    "9.7.13.15.12",
    "mbarrier.complete_tx{.relaxed.scope}{.space}.b64 [a], n",
)
def bind_tx(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Changes the bytes that the current phase still waits for."""
    name = ".".join(instruction.parts[:2])
    modifiers(instruction, name, ("relaxed",), SCOPES, SPACES, ("b64",))
    address = context.address(instruction.operands[0])
    bytes_of = context.reader(instruction.operands[1], "u32")
    expecting = name.endswith("expect_tx")

    def handler(fragment: Fragment, mask: int) -> None:
        amounts = bytes_of(fragment.warp)
        for cta, offset, group in _addressed(fragment, mask, address(fragment.warp)):
            barrier = find_barrier(fragment, cta, offset, BarrierUse.COUNT_BYTES)
            _check_visible(fragment, group, cta, barrier)
            cta.machine.progress += 1
            count = barrier.expect if expecting else barrier.complete
            if not expecting:  # it may end a phase
                barrier.publish(fragment.warp.fences.arrive(group))
            with _FaultsOf(fragment, cta, barrier):
                for lane in lanes_of(group):
                    count(int(amounts[lane]))

    return handler


@ROWS.machine(
    "mbarrier.arrive",
    "9.7.13.15.13",
    "mbarrier.arrive{.expect_tx}{.noComplete}{.release,.relaxed}{.cta,.cluster}{.space}.b64 "
    "{state|_}, [a]{, count|bytes}",
)
@ROWS.machine(
    "mbarrier.arrive_drop",
    "9.7.13.15.14",
    "mbarrier.arrive_drop{.expect_tx}{.noComplete}{.release,.relaxed}{.cta,.cluster}{.space}.b64",
)
def bind_arrive(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Arrivals, one for each active lane; with .expect_tx also bytes to wait for."""
    name = ".".join(instruction.parts[:2])
    expect, _, semantics, _, _, _ = modifiers(
        instruction, name, ("expect_tx",), ("noComplete",), SEMANTICS, SCOPES, SPACES, ("b64",)
    )
    dropping = name.endswith("_drop")
    operands = instruction.operands
    has_state = not hasattr(operands[0], "base")
    state_to = context.writer(operands[0], "b64") if has_state else None
    rest = operands[1:] if has_state else operands
    address = context.address(rest[0])
    amount_of = context.reader(rest[1], "u32") if len(rest) > 1 else None
    if expect and amount_of is None:
        raise Unsupported("expect_tx without a byte count")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        amounts = amount_of(warp) if amount_of is not None else _ONCE
        states = np.zeros(32, np.uint64)
        for cta, offset, group in _addressed(fragment, mask, address(warp)):
            barrier = find_barrier(fragment, cta, offset, ARRIVE)
            _check_visible(fragment, group, cta, barrier)
            barrier.arrivers.add(warp.name)
            cta.machine.progress += 1
            known = barrier.order.arrives(warp.clock)
            _check_phase(fragment, cta, barrier, known, "the arrival may count for that one")
            if cta is not warp.cta:
                cta.remote_arrivals[warp.row] = RemoteArrival(
                    warp.name, fragment.line, warp.clock.epoch, warp.cta.cluster.barrier.phase
                )
            single = bool(expect) or amounts is _ONCE
            single = single or bool((amounts[lane_flags[group]] == 1).all())
            parts = _parts(group, barrier.pending if single else 32)
            if len(parts) > 1:
                _report_split(fragment, parts, cta, barrier)
            for part in parts:
                relaxed = semantics == "relaxed"
                message = warp.fences.arrive(part) if relaxed else warp.clock.release(part)
                if dropping:
                    # Before the arrival, which may begin the next phase.
                    barrier.drop(part.bit_count() if expect else _total(amounts, part))
                with _FaultsOf(fragment, cta, barrier):
                    state = _arrive(barrier, amounts, part, bool(expect), message)
                if state_to is not None:
                    states[lane_flags[part]] = state
        if state_to is not None:
            state_to(warp, states, mask)

    return handler


@ROWS.machine("mbarrier.pending_count", "9.7.13.15.17", "mbarrier.pending_count.b64 count, state")
def bind_pending(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The state operand holds no count here."""
    raise Unsupported("mbarrier.pending_count: the state operand is opaque here")


@ROWS.machine(
    "mbarrier.test_wait",
    "9.7.13.15.16",
    "mbarrier.test_wait{.parity}{.acquire,.relaxed}{.cta,.cluster}{.space}.b64 p, [a], state",
)
@ROWS.machine(
    "mbarrier.try_wait",
    "9.7.13.15.16",
    "mbarrier.try_wait{.parity}{.acquire,.relaxed}{.cta,.cluster}{.space}.b64 p, [a], "
    "state{, hint}",
)
def bind_wait(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """try_wait blocks until the phase is over; when nothing else can happen it gives up, as its
    time limit on hardware allows."""
    name = ".".join(instruction.parts[:2])
    by_parity, semantics, _, _, _ = modifiers(
        instruction, name, ("parity",), SEMANTICS, SCOPES, SPACES, ("b64",)
    )
    blocking = name.endswith("try_wait")
    write = context.writer(instruction.operands[0], "pred")
    address = context.address(instruction.operands[1])
    state_of = context.reader(instruction.operands[2], "b32" if by_parity else "b64")

    def passed(barrier: MBarrier, state: int) -> bool:
        return barrier.passed(state & 1) if by_parity else barrier.phase > state

    def handler(fragment: Fragment, mask: int) -> Blocked | Spin | None:
        warp = fragment.warp
        states = state_of(warp)
        results = np.zeros(32, bool)
        for cta, offset, group in _addressed(fragment, mask, address(warp)):
            barrier = find_barrier(fragment, cta, offset, WAIT)
            _check_visible(fragment, group, cta, barrier)
            state = int(states[lowest(group)])
            if passed(barrier, state):
                if cta.machine.events is not None:
                    cta.machine.events.barrier_used(fragment, cta, offset, WAIT)
                results |= lane_flags[group]
                if by_parity:
                    known = barrier.order.waited(warp.clock, fragment.line)
                    _check_phase(fragment, cta, barrier, known, "the wait may end too early")
                if barrier.last_message is not None and semantics == "relaxed":
                    warp.fences.wait(barrier.last_message)
                elif barrier.last_message is not None:
                    warp.clock.acquire(barrier.last_message)
            elif blocking and group == mask and not fragment.timed_out:
                _check_overrun(fragment, cta, barrier)
                if cta.machine.schedule.gives_up(fragment.line):
                    fragment.awaited = None
                    write(warp, results, mask)
                    return SPIN
                return Blocked(barrier, partial(_waiting, cta, barrier, state), times_out=True)
        fragment.awaited = None
        write(warp, results, mask)
        return None if blocking or results.any() else SPIN

    def _waiting(cta: Cta, barrier: MBarrier, state: int) -> str:
        which = f"parity {state & 1}" if by_parity else f"phase {state}"
        return f"{which} of {describe_barrier(cta, barrier)}"

    return handler


def _check_overrun(fragment: Fragment, cta: Cta, barrier: MBarrier) -> None:
    """A waiter that finds the barrier two phases on has missed the phase it waited for."""
    known = fragment.awaited
    if known is not None and known[0] is barrier and barrier.phase != known[1]:
        fragment.fault(
            "mbarrier",
            f"waits for phase {known[1]} of {describe_barrier(cta, barrier)}, which is already "
            "over and so is the next: a parity two phases away looks unfinished",
        )
    fragment.awaited = (barrier, barrier.phase)
