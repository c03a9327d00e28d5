"""Barriers of a CTA (bar, barrier), of a warp (bar.warp.sync) and of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa4.emulator.checks.clocks import Message
from fa4.emulator.machine.grid import EXIT_HOOKS
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.machine.waits import Wait, wait_for
from fa4.emulator.masks import Array, lane_flags, lowest
from fa4.emulator.ptx.syntax import Instruction, Operand
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import Unsupported, machine, modifiers

BARRIERS = 16
WARP_THREADS = 32


@dataclass(eq=False)
class Episode:
    """One use of a named barrier, from the first arrival to the last."""

    message: Any = None
    votes: list[Array] = field(default_factory=list)


def arrive(fragment: Fragment, mask: int, number: int, count: int | None) -> tuple[Episode, bool]:
    """The warp arrives. Returns the episode, and whether this arrival completes it.

    Threads count in whole warps unless the warp is diverged.
    """
    warp, cta = fragment.warp, fragment.warp.cta
    if not 0 <= number < BARRIERS:
        raise cta.machine.fatal(fragment, "barrier", f"barrier {number}: allowed are 0..15")
    if count is not None and (count % WARP_THREADS or count == 0):
        raise cta.machine.fatal(
            fragment, "barrier", f"barrier {number} for {count} threads: not a multiple of 32"
        )
    barrier = cta.barrier(number)
    episode = cta.unit.setdefault(("episode", number), Episode())
    if barrier.arrived and barrier.expected != (count or 0):
        cta.machine.fault(
            fragment,
            "barrier",
            f"barrier {number} is used for {count or 'all'} threads here and for "
            f"{barrier.expected or 'all'} by a warp that waits at it",
        )
    barrier.expected = count or 0
    barrier.arrived += WARP_THREADS if mask == warp.alive else mask.bit_count()
    message = warp.clock.release(mask)
    if episode.message is None:
        episode.message = message
    else:
        episode.message.join(message)
    cta.machine.progress += 1
    expected = barrier.expected or _live_threads(cta)
    if barrier.arrived > expected:
        cta.machine.fault(
            fragment, "barrier", f"{barrier.arrived} threads at barrier {number} for {expected}"
        )
    return episode, barrier.arrived >= expected


def _live_threads(cta: Cta) -> int:
    return sum(WARP_THREADS for warp in cta.warps if warp.alive)


def complete(cta: Cta, number: int) -> None:
    """Ends an episode: all who wait go on, the barrier can be used again."""
    barrier = cta.barrier(number)
    cta.unit.pop(("episode", number), None)
    barrier.arrived = 0
    barrier.wake()


def complete_after_exit(cta: Cta) -> None:
    """Barriers for all threads no longer wait for warps that have exited."""
    for number, barrier in cta.barriers.items():
        if barrier.arrived and not barrier.expected and barrier.arrived >= _live_threads(cta):
            complete(cta, number)


def _require_whole_warp(fragment: Fragment, mask: int, what: str) -> None:
    warp = fragment.warp
    if mask != warp.alive:
        warp.cta.machine.fault(
            fragment,
            "divergence",
            f"{what} by lanes {mask:#010x} alone, while {warp.alive & ~mask:#010x} of the warp "
            "are elsewhere: all lanes must execute it together",
        )


def _optional(context: KernelContext, operands: tuple[Operand, ...], index: int) -> Any:
    return context.scalar(operands[index], "u32") if len(operands) > index else None


def _bind_sync(instruction: Instruction, context: KernelContext, aligned: bool) -> Handler:
    number_of = context.scalar(instruction.operands[0], "u32")
    count_of = _optional(context, instruction.operands, 1)

    def handler(fragment: Fragment, mask: int) -> Wait | None:
        warp, lane = fragment.warp, lowest(mask)
        number = number_of(warp, lane)
        count = count_of(warp, lane) if count_of is not None else None
        if aligned:
            _require_whole_warp(fragment, mask, f"bar.sync {number}")
        episode, done = arrive(fragment, mask, number, count)
        if done:
            complete(warp.cta, number)
            warp.clock.acquire(episode.message)
            return None
        barrier = warp.cta.barrier(number)
        return Wait(
            barrier,
            lambda: (
                f"barrier {number}, {barrier.arrived} of "
                f"{barrier.expected or _live_threads(warp.cta)} threads arrived"
            ),
            retry=False,
            wake=lambda woken: woken.warp.clock.acquire(episode.message),
        )

    return handler


def _bind_arrive(instruction: Instruction, context: KernelContext, aligned: bool) -> Handler:
    if len(instruction.operands) < 2:
        raise Unsupported("arrive without a thread count")
    number_of = context.scalar(instruction.operands[0], "u32")
    count_of = context.scalar(instruction.operands[1], "u32")

    def handler(fragment: Fragment, mask: int) -> None:
        warp, lane = fragment.warp, lowest(mask)
        number = number_of(warp, lane)
        if aligned:
            _require_whole_warp(fragment, mask, f"bar.arrive {number}")
        _, done = arrive(fragment, mask, number, count_of(warp, lane))
        if done:
            complete(warp.cta, number)

    return handler


def _bind_red(
    instruction: Instruction, context: KernelContext, aligned: bool, operation: str
) -> Handler:
    target, number_operand, *rest = instruction.operands
    predicate = context.reader(rest[-1], "pred")
    number_of = context.scalar(number_operand, "u32")
    count_of = context.scalar(rest[0], "u32") if len(rest) > 1 else None
    write = context.writer(target, "u32" if operation == "popc" else "pred")

    def finish(woken: Fragment, mask: int, episode: Episode) -> None:
        woken.warp.clock.acquire(episode.message)
        votes = np.concatenate(episode.votes)
        if operation == "popc":
            write(woken.warp, np.full(32, votes.sum(), np.uint32), mask)
        else:
            write(woken.warp, np.full(32, votes.all() if operation == "and" else votes.any()), mask)

    def handler(fragment: Fragment, mask: int) -> Wait | None:
        warp, lane = fragment.warp, lowest(mask)
        number = number_of(warp, lane)
        if aligned:
            _require_whole_warp(fragment, mask, f"bar.red {number}")
        count = count_of(warp, lane) if count_of is not None else None
        episode, done = arrive(fragment, mask, number, count)
        episode.votes.append(predicate(warp)[lane_flags[mask]].copy())
        if done:
            complete(warp.cta, number)
            finish(fragment, mask, episode)
            return None
        return Wait(
            warp.cta.barrier(number),
            lambda: f"barrier {number} (reduction)",
            retry=False,
            wake=lambda woken: finish(woken, mask, episode),
        )

    return handler


@machine("bar", "9.7.13.1", "bar{.cta}.{sync,arrive} a{,b}; bar{.cta}.red.{popc,and,or}")
def bind_bar(instruction: Instruction, context: KernelContext) -> Handler:
    """All lanes of the warp take part (.aligned is implied)."""
    _, action, operation, _ = modifiers(
        instruction, "bar", ("cta",), ("sync", "arrive", "red"), ("popc", "and", "or"),
        ("pred", "u32"),
    )  # fmt: skip
    return _bind_any(instruction, context, action, operation, aligned=True)


@machine(
    "barrier",
    "9.7.13.1",
    "barrier{.cta}.{sync,arrive}{.aligned} a{,b}; barrier{.cta}.red.{popc,and,or}{.aligned}",
    types=("sync", "arrive", "red"),
)
def bind_barrier(instruction: Instruction, context: KernelContext) -> Handler:
    """Without .aligned, the lanes of a warp may arrive apart."""
    _, action, operation, aligned, _ = modifiers(
        instruction, "barrier", ("cta",), ("sync", "arrive", "red"), ("popc", "and", "or"),
        ("aligned",), ("pred", "u32"),
    )  # fmt: skip
    return _bind_any(instruction, context, action, operation, aligned=bool(aligned))


def _bind_any(
    instruction: Instruction, context: KernelContext, action: str, operation: str, aligned: bool
) -> Handler:
    if action == "sync":
        return _bind_sync(instruction, context, aligned)
    if action == "arrive":
        return _bind_arrive(instruction, context, aligned)
    if action == "red" and operation:
        return _bind_red(instruction, context, aligned, operation)
    raise Unsupported(f"{instruction.opcode}: sync, arrive or red is needed")


@machine("bar.warp.sync", "9.7.13.2", "bar.warp.sync membermask", converges=True)
def bind_warp_sync(instruction: Instruction, context: KernelContext) -> Handler:
    """The lanes of the mask wait for each other and see each other's memory accesses."""

    def handler(fragment: Fragment, mask: int) -> None:
        fragment.warp.clock.sync_lanes(mask)

    return handler


@machine(
    "barrier.cluster.arrive", "9.7.13.4", "barrier.cluster.arrive{.release,.relaxed}{.aligned}"
)
def bind_cluster_arrive(instruction: Instruction, context: KernelContext) -> Handler:
    """Arrives once in each phase of the cluster's barrier."""
    semantics, _ = modifiers(
        instruction, "barrier.cluster.arrive", ("release", "relaxed"), ("aligned",)
    )

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        barrier = warp.cta.cluster.barrier
        if warp.unit.get("cluster_phase") == barrier.phase:
            raise warp.cta.machine.fatal(
                fragment, "barrier", "arrives at the cluster barrier twice in one phase"
            )
        warp.unit["cluster_phase"] = barrier.phase
        message: Message | None = (
            warp.unit.get("fence_release") if semantics == "relaxed" else warp.clock.release(mask)
        )
        if message is not None:
            if barrier.message is None:
                barrier.message = message.copy()
            else:
                barrier.message.join(message)
        cluster_arrive(warp, mask.bit_count())

    return handler


def cluster_arrive(warp: Warp, threads: int) -> None:
    """Threads arrive at the cluster barrier, by the instruction or by exiting."""
    barrier = warp.cta.cluster.barrier
    warp.cta.machine.progress += 1
    barrier.arrived += threads
    if barrier.arrived >= barrier.threads:
        barrier.arrived = 0
        barrier.phase += 1
        barrier.last_message, barrier.message = barrier.message, None
        barrier.wake()


def leave_cluster_barrier(warp: Warp) -> None:
    """A warp that exits is no longer waited for (PTX ISA: exited threads count as arrived)."""
    barrier = warp.cta.cluster.barrier
    threads = warp.threads.bit_count()
    barrier.threads -= threads
    if warp.unit.get("cluster_phase") == barrier.phase:
        barrier.arrived -= threads
    if barrier.threads and barrier.arrived >= barrier.threads:
        cluster_arrive(warp, 0)


@machine("barrier.cluster.wait", "9.7.13.4", "barrier.cluster.wait{.acquire}{.aligned}")
def bind_cluster_wait(instruction: Instruction, context: KernelContext) -> Handler:
    """Waits until all threads of the cluster have arrived."""
    modifiers(instruction, "barrier.cluster.wait", ("acquire",), ("aligned",))

    def handler(fragment: Fragment, mask: int) -> Wait | None:
        warp = fragment.warp
        barrier = warp.cta.cluster.barrier
        if "cluster_phase" not in warp.unit:
            raise warp.cta.machine.fatal(
                fragment, "barrier", "waits at the cluster barrier without having arrived"
            )
        arrived_in, waited = warp.unit["cluster_phase"], warp.unit.get("cluster_waited", (-1, 0))
        done = waited[1] if waited[0] == arrived_in else 0
        if done & mask:
            raise warp.cta.machine.fatal(
                fragment, "barrier", "waits at the cluster barrier twice after one arrival"
            )
        if arrived_in == barrier.phase:
            return wait_for(
                barrier, f"the cluster barrier, {barrier.arrived} of {barrier.threads} threads"
            )
        warp.unit["cluster_waited"] = (arrived_in, done | mask)
        if barrier.last_message is not None:
            warp.clock.acquire(barrier.last_message)
        return None

    return handler


EXIT_HOOKS.append(lambda warp: complete_after_exit(warp.cta))
EXIT_HOOKS.append(leave_cluster_barrier)
