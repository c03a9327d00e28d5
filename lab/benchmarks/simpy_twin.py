"""The simulator's machine once more, as a SimPy model: a third opinion, and a yardstick for speed.

Written from the plan and the cost functions, without the lowering: roles are processes, units are
resources of capacity 1, a phase of a signal is an event. Where several roles ask for a unit at the
same moment, SimPy may serve them in another order than the engines do.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from fa4.plan.schema import Arrive, PipelinePlan, Role, Wait, Work, unroll
from fa4.sim.lower import SignalCosts, WorkCosts

Process = Generator[Any, Any, None]


@dataclass
class Model:
    """One CTA: `run` simulates its work tiles."""

    plan: PipelinePlan
    work_costs: WorkCosts
    signal_costs: SignalCosts
    shares: Mapping[str, float]
    env: simpy.Environment = field(default_factory=simpy.Environment)
    units: dict[str, simpy.Resource] = field(default_factory=dict)
    phases: dict[tuple[str, int], simpy.Event] = field(default_factory=dict)
    missing: dict[tuple[str, int], int] = field(default_factory=dict)
    asked: list[simpy.Event] = field(default_factory=list)  # asynchronous work

    def run(self, tiles: Sequence[Mapping[str, int]]) -> float:
        """Cycles until every role is done, and what they have asked for."""
        roles = [self.env.process(self.role(role, tiles)) for role in self.plan.roles]
        self.env.run(self.env.all_of(roles))
        self.env.run(self.env.all_of(self.asked))
        return float(self.env.now)

    def role(self, role: Role, tiles: Sequence[Mapping[str, int]]) -> Process:
        """The role's steps, one after the other."""
        steps = [*role.prologue, *(s for trips in tiles for s in unroll(role.program, trips))]
        waits: dict[str, int] = {}
        arrivals: dict[str, int] = {}
        pending: dict[str, list[simpy.Event]] = {}
        for step in steps:
            if isinstance(step, Wait):
                number = waits[step.signal] = waits.get(step.signal, -1) + 1
                yield from self.wait(step.signal, number)
            elif isinstance(step, Arrive):
                number = arrivals[step.signal] = arrivals.get(step.signal, -1) + 1
                before = pending.get(step.after, []) if step.after else []
                before[:] = [event for event in before if not event.processed]
                self.env.process(self.arrive(step.signal, number, list(before)))
            else:
                yield from self.work(role, step, pending)

    def phase(self, signal: str, number: int) -> simpy.Event:
        """The event of a phase, and how many arrivals it still needs."""
        key = (signal, number)
        if key not in self.phases:
            self.phases[key] = self.env.event()
            self.missing[key] = len(self.plan.signal(signal).arrivals)
        return self.phases[key]

    def wait(self, signal: str, number: int) -> Process:
        """Pass when the phase is complete."""
        declared = self.plan.signal(signal)
        if number >= declared.free:
            yield self.phase(signal, number - declared.free)
        yield self.env.timeout(self.signal_costs(declared).wait_cycles)

    def arrive(self, signal: str, number: int, before: list[simpy.Event]) -> Process:
        """Complete this role's part of a phase when its earlier work is done."""
        event = self.phase(signal, number)
        yield self.env.all_of(before)
        yield self.env.timeout(self.signal_costs(self.plan.signal(signal)).latency_cycles)
        self.missing[signal, number] -= 1
        if not self.missing[signal, number]:
            event.succeed()

    def work(self, role: Role, step: Work, pending: dict[str, list[simpy.Event]]) -> Process:
        """Ask for every unit at once; asynchronous work goes on by itself."""
        cost = self.work_costs(role, step)
        share = 1.0 if step.share is None else self.shares[step.share]
        occupied: list[simpy.Event] = []
        for unit, alone in cost.occupancy_cycles.items():
            cycles = alone * share
            served: simpy.Event = self.env.process(self.occupy(unit, cycles))
            if unit in cost.passes:  # every other cycle is its own while others use the unit
                served = self.env.any_of([served, self.env.timeout(2.0 * cycles)])
            occupied.append(served)
        done = self.env.process(self.finish(occupied, cost.latency_cycles * share))
        if not step.asynchronous:
            yield done
            return
        own = next(iter(cost.occupancy_cycles), "")
        pending.setdefault(own, []).append(done)
        self.asked.append(done)
        yield self.env.timeout(cost.issue_cycles)

    def occupy(self, unit: str, cycles: float) -> Process:
        """A unit, in the order of requests."""
        resource = self.units.setdefault(unit, simpy.Resource(self.env))
        with resource.request() as request:
            yield request
            yield self.env.timeout(cycles)

    def finish(self, occupied: list[simpy.Event], latency: float) -> Process:
        """All units, then the latency."""
        yield self.env.all_of(occupied)
        yield self.env.timeout(latency)
