"""The tensor pipe: how tcgen05.mma, cp and shift are issued, checked and executed in order.

A plan of `fa4.emulator.tcgen05` says what an instruction touches and executes it on arrays. Here
it becomes an operation of the pipe: what it touches is recorded when it is issued, its data moves
when it completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from fa4.emulator.checks.clocks import AsyncActor, Message
from fa4.emulator.checks.conflict import Access
from fa4.emulator.machine.checks import record_shared, record_tensor
from fa4.emulator.machine.machine_state import Stop
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, WRITE, Touch
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.machine.tensor import TensorGroup, granules_of
from fa4.emulator.machine.tensor_access import group_of, members_of, pipe_thread, tensor_memory
from fa4.emulator.tcgen05.sparse import MetadataError
from fa4.emulator.tcgen05.tmem import SmemRead, TmemRegion
from fa4.emulator.translate.layout import SHARED_BASE
from fa4.emulator.warp_lanes import Array, lowest


class PipePlan(Protocol):
    """What MmaPlan, CopyPlan and ShiftPlan have in common."""

    @property
    def smem_reads(self) -> tuple[SmemRead, ...]:
        """Shared memory that it reads."""

    @property
    def tmem_reads(self) -> tuple[TmemRegion, ...]:
        """Tensor memory that it reads."""

    @property
    def tmem_writes(self) -> tuple[TmemRegion, ...]:
        """Tensor memory that it writes."""

    def execute(self, smem: Sequence[Array], tmem: Sequence[Array]) -> None:
        """Does it, on the memories of the CTAs of the group."""


@dataclass(frozen=True, eq=False)
class Use:
    """Tensor memory that an operation touches in one CTA of the group.

    granules: of the checks. They lie in `columns` columns from first_column on.
    """

    rank: int
    granules: Array
    first_column: int
    columns: int
    kind: str


@dataclass(frozen=True, eq=False)
class SmemUse:
    """Shared memory that an operation reads in one CTA of the group: units of equal size.

    first, stop: the first byte of all, and the one behind the last.
    """

    rank: int
    addresses: Array
    unit_bytes: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class PipeJob:
    """A plan with what the checks want to know of it."""

    plan: PipePlan
    smem: tuple[SmemUse, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class PipeInstruction:
    """What all executions of an instruction share: its name, PTX line and kinds of access."""

    name: str
    line: int
    cta_group: int
    smem: Access
    tmem: Access

    @classmethod
    def at(cls, name: str, line: int, cta_group: int) -> PipeInstruction:
        """An instruction of this PTX line. Shared memory is read through the async proxy."""
        return cls(name, line, cta_group, Access(line, async_proxy=True), Access(line))


def job_of(plan: PipePlan) -> PipeJob:
    """Reads before writes; the same granules read and written count as both."""
    regions = [(region, READ) for region in plan.tmem_reads]
    regions += [(region, WRITE) for region in plan.tmem_writes]
    uses = tuple(
        Use(
            region.cta_rank,
            _granules(region.lanes.tobytes(), region.first_column, region.columns),
            region.first_column,
            region.columns,
            kind,
        )
        for region, kind in regions
        if len(region.lanes)
    )
    return PipeJob(plan, tuple(_smem_uses(plan.smem_reads)), uses)


def _smem_uses(reads: tuple[SmemRead, ...]) -> Iterator[SmemUse]:
    """One for each CTA and size of unit."""
    together: dict[tuple[int, int], list[Array]] = {}
    for read in reads:
        together.setdefault((read.cta_rank, read.unit_bytes), []).append(read.addresses)
    for (rank, unit_bytes), parts in together.items():
        addresses = np.concatenate(parts)
        stop = int(addresses.max()) + unit_bytes
        yield SmemUse(rank, addresses, unit_bytes, int(addresses.min()), stop)


@lru_cache(maxsize=256)
def _granules(lanes: bytes, first_column: int, columns: int) -> Array:
    granules = granules_of(
        np.frombuffer(lanes, np.int64), np.arange(first_column, first_column + columns)
    )
    granules.flags.writeable = False
    return granules


def issuing_lane(fragment: Fragment, mask: int, name: str) -> int:
    """The one lane that issues; a finding if there are more."""
    if mask & (mask - 1):
        fragment.fault(
            "divergence",
            f"{name} by {mask.bit_count()} threads of the warp: each would issue it; elect one",
        )
    return lowest(mask)


def issue(fragment: Fragment, lane: int, job: PipeJob, instruction: PipeInstruction) -> None:
    """Hands an operation to the tensor pipe of the CTA, or of its pair.

    Raises TmemError or MemoryFault if it touches what it may not.
    """
    warp, cta = fragment.warp, fragment.warp.cta
    group = group_of(cta, instruction.cta_group)
    members = members_of(cta, group)
    _check_bounds(members, job, instruction)
    actor = group.pipe.begin(warp.clock.snapshot(1 << lane))
    warp.pipe_latest[lane] = actor
    warp.uncommitted[lane] = instruction.name, instruction.line
    _record(members, job, actor, instruction, warp)
    for use in job.smem:
        num_bytes = len(use.addresses) * use.unit_bytes
        cta.note_moved(members[use.rank], instruction.line, num_bytes)
    _check_issuers(fragment, lane, group, job, actor.epoch)
    smem = [member.smem for member in members]
    tmem = [tensor_memory(member).data for member in members]

    def complete() -> None:
        for member in members:
            if member.done:
                _report_exit(cta, member, instruction)
        try:
            job.plan.execute(smem, tmem)
        except MetadataError as error:
            cta.report(error.kind, str(error), instruction.line, warp.index)
            raise Stop from None

    cta.submit(instruction.name, instruction.line, complete, group.queue)


def _check_issuers(
    fragment: Fragment, lane: int, group: TensorGroup, job: PipeJob, epoch: int
) -> None:
    """The order of what several threads issue is not the pipe's matter but theirs."""
    warp = fragment.warp
    if not warp.cta.machine.shadows.enabled:
        return
    thread = pipe_thread(warp, lane)
    for use in job.uses:
        other = group.issuers.unordered(thread, use.rank, use.granules, use.kind)
        if other:
            fragment.fault(
                "race",
                f"touches TMEM columns {use.first_column}..{use.first_column + use.columns - 1} "
                f"after an operation that {other}; the tensor pipe orders operations of one thread "
                "only. Wait for its tcgen05.commit, or put tcgen05.fence::before_thread_sync and "
                "::after_thread_sync around the synchronisation",
            )
    for use in job.uses:
        group.issuers.record(thread, fragment.line, epoch, use.rank, use.granules, use.kind)


def committed_by(fragment: Fragment, lane: int, group: TensorGroup) -> Message:
    """What a tcgen05.commit of a thread publishes when it completes.

    The accesses of the operations that the thread has issued, and all that it knew when it issued
    the last; of what it did and learned since then, that it was executed.
    """
    warp = fragment.warp
    actor = warp.pipe_latest.get(lane)
    warp.uncommitted.pop(lane, None)
    if actor is None:
        return warp.clock.release_order(1 << lane, None)
    group.pipe.committed = max(group.pipe.committed, actor.epoch)
    return warp.clock.release_order(1 << lane, actor.completion())


def _check_bounds(members: Sequence[Cta], job: PipeJob, instruction: PipeInstruction) -> None:
    for use in job.uses:
        tensor = tensor_memory(members[use.rank], instruction.cta_group)
        tensor.require(use.first_column, use.columns)
    for read in job.smem:
        member = members[read.rank]
        if read.first < SHARED_BASE or read.stop > member.shared_end:
            raise MemoryFault(
                "out-of-bounds",
                f"{instruction.name} reads shared bytes {read.first:#x}..{read.stop - 1:#x} of "
                f"CTA {member.index}: its shared memory is "
                f"{SHARED_BASE:#x}..{member.shared_end - 1:#x}",
            )
        if member.done:
            raise MemoryFault(
                "exit", f"{instruction.name} uses CTA {member.index}, which has exited"
            )


def _record(
    members: Sequence[Cta],
    job: PipeJob,
    actor: AsyncActor,
    instruction: PipeInstruction,
    warp: Warp,
) -> None:
    if not members[0].machine.shadows.enabled:
        return
    touch = Touch(actor, instruction.smem, READ, actor.lane)
    for read in job.smem:
        record_shared(members[read.rank], read.addresses, read.unit_bytes, touch)
    for use in job.uses:
        touch = Touch(actor, instruction.tmem, use.kind, actor.lane)
        record_tensor(members[use.rank], use.granules, touch, warp)


def _report_exit(cta: Cta, member: Cta, instruction: PipeInstruction) -> None:
    cta.report(
        "exit",
        f"CTA {member.index} exits while {instruction.name} of its pair still uses its memory",
        instruction.line,
    )
