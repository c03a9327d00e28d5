"""Barriers of a CTA (bar, barrier), of a warp (bar.warp.sync) and of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.emulator.machine.barriers import Episode
from fa4.emulator.machine.state import Fragment
from fa4.emulator.machine.waits import Blocked, wait_for
from fa4.emulator.ptx.syntax import Operand, PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import lane_flags, lowest

ROWS = TableRows()

BARRIERS = 16
WARP_THREADS = 32


def arrive(fragment: Fragment, mask: int, number: int, count: int | None) -> tuple[Episode, bool]:
    """The warp arrives. Returns the episode, and whether this arrival completes it.

    Threads count in whole warps unless the warp is diverged.
    """
    warp, cta = fragment.warp, fragment.warp.cta
    if not 0 <= number < BARRIERS:
        raise fragment.fatal("barrier", f"barrier {number}: allowed are 0..15")
    if count is not None and (count % WARP_THREADS or count == 0):
        raise fragment.fatal(
            "barrier", f"barrier {number} for {count} threads: not a multiple of 32"
        )
    barrier = cta.barrier(number)
    if barrier.arrived and barrier.expected != (count or 0):
        fragment.fault(
            "barrier",
            f"barrier {number} is used for {count or 'all'} threads here and for "
            f"{barrier.expected or 'all'} by a warp that waits at it",
        )
    barrier.expected = count or 0
    barrier.arrived += WARP_THREADS if mask == warp.alive else mask.bit_count()
    episode = barrier.publish(warp.clock.release(mask))
    cta.machine.progress += 1
    expected = barrier.expected or cta.live_threads
    if barrier.arrived > expected:
        fragment.fault("barrier", f"{barrier.arrived} threads at barrier {number} for {expected}")
    return episode, barrier.arrived >= expected


def _require_whole_warp(fragment: Fragment, mask: int, what: str) -> None:
    warp = fragment.warp
    if mask != warp.alive:
        fragment.fault(
            "divergence",
            f"{what} by lanes {mask:#010x} alone, while {warp.alive & ~mask:#010x} of the warp "
            "are elsewhere: all lanes must execute it together",
        )


def _optional(context: KernelContext, operands: tuple[Operand, ...], index: int) -> Any:
    return context.scalar(operands[index], "u32") if len(operands) > index else None


def _bind_sync(instruction: PtxInstruction, context: KernelContext, aligned: bool) -> Handler:
    number_of = context.scalar(instruction.operands[0], "u32")
    count_of = _optional(context, instruction.operands, 1)

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp, lane = fragment.warp, lowest(mask)
        number = number_of(warp, lane)
        count = count_of(warp, lane) if count_of is not None else None
        if aligned:
            _require_whole_warp(fragment, mask, f"bar.sync {number}")
        episode, done = arrive(fragment, mask, number, count)
        if done:
            warp.cta.barrier(number).complete()
            warp.clock.acquire(episode.message)
            return None
        barrier = warp.cta.barrier(number)
        return Blocked(
            barrier,
            lambda: (
                f"barrier {number}, {barrier.arrived} of "
                f"{barrier.expected or warp.cta.live_threads} threads arrived"
            ),
            retry=False,
            wake=lambda woken: woken.warp.clock.acquire(episode.message),
        )

    return handler


def _bind_arrive(instruction: PtxInstruction, context: KernelContext, aligned: bool) -> Handler:
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
            warp.cta.barrier(number).complete()

    return handler


def _bind_red(
    instruction: PtxInstruction, context: KernelContext, aligned: bool, operation: str
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

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp, lane = fragment.warp, lowest(mask)
        number = number_of(warp, lane)
        if aligned:
            _require_whole_warp(fragment, mask, f"bar.red {number}")
        count = count_of(warp, lane) if count_of is not None else None
        episode, done = arrive(fragment, mask, number, count)
        episode.votes.append(predicate(warp)[lane_flags[mask]].copy())
        if done:
            warp.cta.barrier(number).complete()
            finish(fragment, mask, episode)
            return None
        return Blocked(
            warp.cta.barrier(number),
            lambda: f"barrier {number} (reduction)",
            retry=False,
            wake=lambda woken: finish(woken, mask, episode),
        )

    return handler


@ROWS.machine("bar", "9.7.13.1", "bar{.cta}.{sync,arrive} a{,b}; bar{.cta}.red.{popc,and,or}")
def bind_bar(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """All lanes of the warp take part (.aligned is implied)."""
    _, action, operation, _ = modifiers(
        instruction, "bar", ("cta",), ("sync", "arrive", "red"), ("popc", "and", "or"),
        ("pred", "u32"),
    )  # fmt: skip
    return _bind_any(instruction, context, action, operation, aligned=True)


@ROWS.machine(
    "barrier",
    "9.7.13.1",
    "barrier{.cta}.{sync,arrive}{.aligned} a{,b}; barrier{.cta}.red.{popc,and,or}{.aligned}",
    types=("sync", "arrive", "red"),
)
def bind_barrier(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Without .aligned, the lanes of a warp may arrive apart."""
    _, action, operation, aligned, _ = modifiers(
        instruction, "barrier", ("cta",), ("sync", "arrive", "red"), ("popc", "and", "or"),
        ("aligned",), ("pred", "u32"),
    )  # fmt: skip
    return _bind_any(instruction, context, action, operation, aligned=bool(aligned))


def _bind_any(
    instruction: PtxInstruction, context: KernelContext, action: str, operation: str, aligned: bool
) -> Handler:
    if action == "sync":
        return _bind_sync(instruction, context, aligned)
    if action == "arrive":
        return _bind_arrive(instruction, context, aligned)
    if action == "red" and operation:
        return _bind_red(instruction, context, aligned, operation)
    raise Unsupported(f"{instruction.opcode}: sync, arrive or red is needed")


@ROWS.machine("bar.warp.sync", "9.7.13.2", "bar.warp.sync membermask", converges=True)
def bind_warp_sync(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The lanes of the mask wait for each other and see each other's memory accesses."""

    def handler(fragment: Fragment, mask: int) -> None:
        fragment.warp.clock.sync_lanes(mask)

    return handler


@ROWS.machine(
    "barrier.cluster.arrive", "9.7.13.4", "barrier.cluster.arrive{.release,.relaxed}{.aligned}"
)
def bind_cluster_arrive(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Arrives once in each phase of the cluster's barrier."""
    semantics, _ = modifiers(
        instruction, "barrier.cluster.arrive", ("release", "relaxed"), ("aligned",)
    )

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        barrier = warp.cta.cluster.barrier
        if warp.cluster_visits.arrived_in == barrier.phase:
            raise fragment.fatal("barrier", "arrives at the cluster barrier twice in one phase")
        warp.cluster_visits.arrived_in = barrier.phase
        relaxed = semantics == "relaxed"
        barrier.publish(warp.fences.arrive(mask) if relaxed else warp.clock.release(mask))
        warp.cta.machine.progress += 1
        barrier.arrive(mask.bit_count())

    return handler


@ROWS.machine("barrier.cluster.wait", "9.7.13.4", "barrier.cluster.wait{.acquire}{.aligned}")
def bind_cluster_wait(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits until all threads of the cluster have arrived."""
    modifiers(instruction, "barrier.cluster.wait", ("acquire",), ("aligned",))

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp = fragment.warp
        barrier = warp.cta.cluster.barrier
        visits = warp.cluster_visits
        if visits.arrived_in is None:
            raise fragment.fatal("barrier", "waits at the cluster barrier without having arrived")
        done = visits.waited if visits.waited_in == visits.arrived_in else 0
        if done & mask:
            raise fragment.fatal("barrier", "waits at the cluster barrier twice after one arrival")
        if visits.arrived_in == barrier.phase:
            return wait_for(
                barrier, f"the cluster barrier, {barrier.arrived} of {barrier.threads} threads"
            )
        visits.waited_in, visits.waited = visits.arrived_in, done | mask
        if barrier.last_message is not None:
            warp.clock.acquire(barrier.last_message)
        return None

    return handler
