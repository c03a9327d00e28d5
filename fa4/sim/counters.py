"""What a timeline does not say by itself: units busy, tensor memory in use, bytes in flight.

Each is a step function of time for one CTA, from what its plan says that every piece of work moves,
reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from fa4.plan.places import MemoryRegion, Resolver
from fa4.plan.schema import Copy, PipelinePlan, Role, Step, Wait, Work, in_order, unroll
from fa4.sim.passed_tiles import full_program, own_trips
from fa4.sim.timeline import CtaTimeline, Event

Changes = list[tuple[float, int]]  # (cycles, by how much)
Steps = list[tuple[float, int]]  # (cycles, value from then on)
Use = tuple[Event, Work, list[MemoryRegion], list[MemoryRegion]]


def add_up(changes: Changes) -> Steps:
    """The value after each moment at which something changes."""
    sums: dict[float, int] = {}
    for moment, change in changes:
        sums[moment] = sums.get(moment, 0) + change
    value, steps = 0, []
    for moment in sorted(sums):
        value += sums[moment]
        steps.append((moment, value))
    return steps


def units_busy(cta: CtaTimeline) -> Steps:
    """How many units are occupied."""
    pieces = [piece for piece in cta.unit_slices if piece.end > piece.start]
    return add_up(list(chain.from_iterable(((x.start, 1), (x.end, -1)) for x in pieces)))


def bytes_in_flight(plan: PipelinePlan, cta: CtaTimeline) -> Steps:
    """Bytes of bulk copies that were issued and are not complete."""
    changes: Changes = []
    for event, work, _, _ in uses(plan, cta):
        if isinstance(work.amount, Copy):
            num_bytes = work.amount.num_bytes
            changes += [(event.start, num_bytes), (event.done, -num_bytes)]
    return add_up(changes)


def tensor_columns(plan: PipelinePlan, cta: CtaTimeline) -> Steps:
    """Columns of tensor memory that hold something: from a write until its last read is done.

    A write to a column that nobody has read since the last one adds to it (an accumulator); so does
    work that reads and writes it. The first write after a read begins anew.
    """
    width = max((b.stop for b in plan.buffers if b.space == "tmem"), default=0)
    begun, read = np.full(width, np.nan), np.full(width, np.nan)  # of what each column holds
    changes: Changes = []

    def finish(columns: np.ndarray, moment: float) -> None:
        held = columns & ~np.isnan(read)
        # The tensor core works in order: what overwrites may be issued before a read is done.
        ends = np.minimum(read[held], moment)
        for start, end in zip(begun[held].tolist(), ends.tolist(), strict=True):
            changes.extend(((start, 1), (end, -1)))

    every = sorted(uses(plan, cta), key=lambda use: (use[0].start, use[0].end))
    for event, _, reads, writes in every:
        reading, writing = _columns(reads, width), _columns(writes, width)
        fresh = writing & ~reading & (np.isnan(begun) | ~np.isnan(read))
        finish(fresh, event.start)
        begun[fresh], read[fresh] = event.start, np.nan
        only_read = reading & ~writing
        read[only_read] = np.fmax(read[only_read], event.done)
    finish(np.full(width, True), np.inf)
    return add_up(changes)


def _columns(regions: list[MemoryRegion], width: int) -> np.ndarray:
    """Which columns of tensor memory some regions have."""
    found = np.zeros(width, bool)
    for region in regions:
        if region.space == "tmem":
            for start, stop in region.spans:
                found[start:stop] = True
    return found


def uses(plan: PipelinePlan, cta: CtaTimeline) -> Iterator[Use]:
    """Each event that is work, with what it reads and writes; role by role.

    Raises RuntimeError where the timeline does not follow the plan's programs.
    """
    resolver = Resolver(plan)
    by_role: dict[str, list[Event]] = {role.name: [] for role in plan.roles}
    for event in cta.events:
        by_role[event.role].append(event)
    # A ring's tiles are numbered by who fills it: before those that read it.
    for role in sorted(plan.roles, key=lambda role: role.name != "load"):
        steps = list(_steps(plan, role, cta))
        if len(steps) != len(by_role[role.name]):
            raise RuntimeError(f"{role.name}: {len(by_role[role.name])} events, not {len(steps)}")
        for event, step in zip(by_role[role.name], steps, strict=True):
            if isinstance(step, Wait):
                resolver.wait(role.name, step.signal)
            if isinstance(step, Work):
                if event.what != step.what:
                    raise RuntimeError(f"{role.name}: {event.what} stands for {step.what}")
                yield (event, step, resolver.resolve(role.name, step, step.reads),
                       resolver.resolve(role.name, step, step.writes))  # fmt: skip


def _steps(plan: PipelinePlan, role: Role, cta: CtaTimeline) -> Iterator[Step]:
    """What a role does for all work tiles of a CTA, its prologue once."""
    yield from role.prologue
    for named in in_order(own_trips(plan, role, trips) for trips in cta.trips):
        yield from unroll(full_program(role), named)
