"""Timelines: what every role and unit of a CTA does when.

`record` simulates the first work tiles of a call with a log and rebuilds from it when each unit was
occupied: units serve requests in the order in which the log has them. `trace` and `figure` show it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fa4.config import Problem, require_int
from fa4.designs import design_of, plan_of
from fa4.designs.tiles import WorkTiles, clusters
from fa4.plan.schema import PipelinePlan
from fa4.sim import engine
from fa4.sim.code import ARRIVE, WAIT, EngineRun, EventCode, stretched
from fa4.sim.limits import check_work, modelled
from fa4.sim.machine import Machine
from fa4.sim.predict import (
    AnyPipeline,
    Simulation,
    make_runner,
    steps_rescaled,
    with_rescale_rate,
)

MOST_TILES, MOST_KV_TILES = 1000, 100_000


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a role did from `start` to `end` (cycles): kind "wait", "work", "issue" or "arrive".

    An "issue" starts asynchronous work, which is complete at `done`; an arrival takes effect at
    `done`. stalled: cycles of a wait before its phase was complete. unit: the first one used.
    """

    role: str
    kind: str
    what: str
    unit: str | None
    tile: int
    start: float
    end: float
    done: float
    stalled: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnitSlice:
    """`unit` was occupied from `start` to `end` (cycles) by a piece of a role's work."""

    unit: str
    role: str
    what: str
    tile: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """A wait (index into events) and the event or unit slice after which its last arrival came."""

    source: Event | UnitSlice
    target: Event


@dataclass(frozen=True, kw_only=True)
class CtaTimeline:
    """One CTA from its launch at `launch` cycles on; times below are from its first instruction."""

    name: str
    launch: float
    start_cycles: float
    events: tuple[Event, ...]
    unit_slices: tuple[UnitSlice, ...]
    arrows: tuple[Arrow, ...]
    tile_ends: tuple[float, ...]
    trips: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """CTAs of a call with the plan and machine they ran on. `shortened`: fewer steps than real."""

    problem: Problem
    plan: PipelinePlan
    machine: Machine
    units: tuple[str, ...]
    ctas: tuple[CtaTimeline, ...]
    shortened: bool
    rescale_rate: float

    @property
    def cycles(self) -> float:
        """When the last CTA is done."""
        return max(cta.launch + cta.start_cycles + cta.tile_ends[-1] for cta in self.ctas)


def record(
    problem: Problem,
    pipeline: AnyPipeline,
    machine: Machine,
    simulation: Simulation | None = None,
    *,
    tiles: int = 1,
    kv_tiles: int | None = None,
) -> Timeline:
    """Timeline of the first `tiles` work tiles, each cut to `kv_tiles` steps.

    A persistent CTA works on them one after the other; otherwise each has its own CTA, which starts
    when an SM is free. Raises ValueError if the pipeline does not fit or nothing is to be done.
    """
    require_int("tiles", tiles, 1, MOST_TILES)
    if kv_tiles is not None:
        require_int("kv_tiles", kv_tiles, 1, MOST_KV_TILES)
    simulation = simulation or Simulation()
    check_work(problem, pipeline, simulation.lengths)
    plan = plan_of(pipeline, machine.gpu)
    simulation = with_rescale_rate(simulation, problem, pipeline)
    rate = simulation.rescale_rate or 0.0
    work = launch_order(problem, pipeline, simulation)
    if not len(work.trips):
        raise ValueError("the problem has no work tiles: a length or the batch is 0")
    share = steps_rescaled(plan, simulation)
    resident = plan.cta_group * len(work.trips)
    code = make_runner(plan, machine, simulation, rescaling=share, ctas=resident).code
    slots = clusters(machine.gpu, plan.cta_group)
    persistent = pipeline.scheduler == "static"
    chosen = np.arange(len(work.trips))[:: slots if persistent else 1][:tiles]
    trips = shorten(work.trips[chosen], kv_tiles)
    groups = [np.arange(len(chosen))] if persistent else list(np.arange(len(chosen))[:, None])
    start_cycles, free, ctas = machine.costs.cta_start_cycles, [0.0] * slots, []
    for number, group in enumerate(groups):
        name = f"CTA {number}: {_describe(work, chosen[group])}"
        cta = replace(_read_log(code, trips[group], name), start_cycles=start_cycles)
        cta = replace(cta, launch=free[0])
        heapq.heapreplace(free, free[0] + start_cycles + cta.tile_ends[-1])
        ctas.append(cta)
    return Timeline(
        problem=problem, plan=plan, machine=machine, units=code.unit_names, ctas=tuple(ctas),
        shortened=bool((trips[:, 0] < work.trips[chosen][:, 0]).any()),
        rescale_rate=rate,
    )  # fmt: skip


def launch_order(problem: Problem, pipeline: AnyPipeline, simulation: Simulation) -> WorkTiles:
    """Work tiles in the order in which the scheduler starts them; backward ones by their keys."""
    work = modelled(pipeline)
    tiles: WorkTiles = work.tiles(problem, pipeline, simulation.lengths)
    return tiles if design_of(pipeline).backward else work.order(tiles, problem, pipeline)


def shorten(trips: np.ndarray, kv_tiles: int | None) -> np.ndarray:
    """(T, columns) total, masked and plain steps, cut to `kv_tiles`; masked steps come first.

    A role that passes over tiles first does so of what is left, but for the last one.
    """
    if kv_tiles is None:
        return trips
    total = np.minimum(trips[:, 0], kv_tiles)
    masked = np.minimum(trips[:, 1], total)
    columns = [total, masked, total - masked]
    for first in range(3, trips.shape[1], 3):
        passed = np.minimum(trips[:, first], total - 1)
        masked = np.minimum(trips[:, first + 1], total - passed)
        columns += [passed, masked, total - passed - masked]
    return np.stack(columns, axis=1)


def _describe(work: WorkTiles, chosen: np.ndarray) -> str:
    first = int(chosen[0])
    where = f"batch {work.batch[first]} head {work.head[first]} block {work.block[first]}"
    return where if len(chosen) == 1 else f"{len(chosen)} work tiles from {where}"


def _read_log(code: EventCode, trips: np.ndarray, name: str) -> CtaTimeline:
    """Run a CTA with a log and turn its rows into events, unit slices and arrows."""
    run = engine.execute(code, trips, log=True)
    reader = _LogReader(code)
    for role, instruction, tile, start, end in run.log:
        reader.read(int(role), int(instruction), int(tile), float(start), float(end))
    return CtaTimeline(
        name=name, launch=0.0, start_cycles=0.0, events=tuple(reader.events),
        unit_slices=tuple(reader.slices), arrows=tuple(reader.arrows()),
        tile_ends=_tile_ends(run), trips=tuple(tuple(int(x) for x in row) for row in trips),
    )  # fmt: skip


def _tile_ends(run: EngineRun) -> tuple[float, ...]:
    return tuple(float(x) for x in run.tile_ends)


class _LogReader:
    """Repeats the engine's bookkeeping of units and signals over the rows of its log."""

    def __init__(self, code: EventCode) -> None:
        self.code = code
        self.events: list[Event] = []
        self.slices: list[UnitSlice] = []
        self.unit_free = [0.0] * len(code.unit_names)
        self.last_event: dict[int, Event] = {}
        self.last_place: dict[int, int] = {}
        self.last_on_unit: dict[tuple[int, int], tuple[float, UnitSlice]] = {}
        # Per arriver slot: (effective time, what came before the arrival).
        self.arrivals: list[list[tuple[float, Event | UnitSlice | None]]] = [
            [] for _ in code.arriver_signal
        ]
        self.waits: list[tuple[int, int, Event]] = []  # signal, phase, the wait
        self.phases = [0] * max(1, code.waiters)

    def read(self, role: int, instruction: int, tile: int, start: float, end: float) -> None:
        """Take one row of the log."""
        code = self.code
        op, a, b, _ = (int(x) for x in code.instructions[instruction])
        name = code.role_names[role]
        if op == WAIT:
            stalled = max(0.0, end - start - float(code.signal_wait_cost[a]))
            event = Event(role=name, kind="wait", what=f"wait {code.signal_names[a]}", unit=None,
                          tile=tile, start=start, end=end, done=end, stalled=stalled)  # fmt: skip
            self.waits.append((a, self.phases[b] - int(code.signal_free[a]), event))
            self.phases[b] += 1
        elif op == ARRIVE:
            event = self._arrive(role, a, b, tile, start)
        else:
            event = self._work(role, a, bool(b), tile, start)
            if code.work_follows[a]:  # one event for all instructions of a piece of work
                event = replace(event, start=self.last_event[role].start)
                self.events[self.last_place[role]] = self.last_event[role] = event
                return
        self.last_place[role] = len(self.events)
        self.events.append(event)
        if op != ARRIVE:
            self.last_event[role] = event

    def _arrive(self, role: int, slot: int, unit: int, tile: int, start: float) -> Event:
        signal = int(self.code.arriver_signal[slot])
        cause: Event | UnitSlice | None = self.last_event.get(role)
        moment = start
        if unit >= 0 and (role, unit) in self.last_on_unit:
            done, piece = self.last_on_unit[role, unit]
            moment, cause = max(start, done), piece
        effective = moment + float(self.code.signal_latency[signal])
        self.arrivals[slot].append((effective, cause))
        return Event(
            role=self.code.role_names[role], kind="arrive",
            what=f"arrive {self.code.signal_names[signal]}",
            unit=self.code.unit_names[unit] if unit >= 0 else None,
            tile=tile, start=start, end=start, done=effective,
        )  # fmt: skip

    def _work(self, role: int, work: int, asynchronous: bool, tile: int, start: float) -> Event:
        code, done = self.code, start
        name, what = code.role_names[role], code.work_names[work]
        pieces: list[tuple[int, UnitSlice]] = []
        under = int(code.work_under[work])
        beside_until = self.unit_free[under] if under >= 0 else 0.0
        parts = (code.work_units, code.work_occupancy, code.work_passes, code.work_stretch)
        for unit, alone, passes, stretch in zip(*(part[work] for part in parts), strict=True):
            if unit < 0:
                break
            begun, cycles = max(start, self.unit_free[unit]), float(alone)
            if under >= 0:
                cycles = stretched(cycles, begun, beside_until, float(stretch))
            self.unit_free[unit] = begun + cycles
            shared = start + 2.0 * cycles if passes else math.inf
            done = max(done, min(shared, self.unit_free[unit]))
            pieces.append((int(unit), UnitSlice(
                unit=code.unit_names[unit], role=name, what=what, tile=tile, start=begun,
                end=self.unit_free[unit],
            )))  # fmt: skip
        self.slices += [piece for _, piece in pieces]
        done += float(code.work_latency[work])
        first = pieces[0] if pieces else None
        if asynchronous and first is not None:
            before = self.last_on_unit.get((role, first[0]))
            if before is None or done >= before[0]:
                self.last_on_unit[role, first[0]] = (done, first[1])
        end = start + float(code.work_issue[work]) if asynchronous else done
        return Event(role=name, kind="issue" if asynchronous else "work", what=what,
                     unit=first[1].unit if first else None, tile=tile, start=start, end=end,
                     done=done)  # fmt: skip

    def arrows(self) -> Iterator[Arrow]:
        """For each wait that stalled, an arrow from the cause of the arrival that ended it."""
        for signal, phase, event in self.waits:
            if phase < 0 or event.stalled <= 0:
                continue
            first, count = (int(x) for x in self.code.signal_arrivers[signal])
            moments = [self.arrivals[slot][phase] for slot in range(first, first + count)]
            _, cause = max(moments, key=lambda moment: moment[0])
            if cause is not None:
                yield Arrow(source=cause, target=event)
