"""From a plan and a cost table to the arrays that the engines execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fa4.plan.schema import (
    FOLLOWING,
    Arrive,
    Loop,
    PipelinePlan,
    Program,
    Role,
    Signal,
    Wait,
    Work,
)
from fa4.sim.code import (
    ARRIVE,
    END,
    IF_FOLLOWED,
    LOOP,
    MAX_LOOP_DEPTH,
    TILE_END,
    UNITS_PER_WORK,
    WAIT,
    WORK,
    EventCode,
)
from fa4.sim.passed_tiles import column_names, full_program, own_columns


@dataclass(frozen=True, kw_only=True)
class WorkCost:
    """Cycles of one piece of work: occupancy per unit (its own unit first), latency, issue.

    passes: units that it shares cycle by cycle with what was requested before.
    under: a unit beside which it takes 1 + stretch times as long, unit by unit of its own.
    instructions: asynchronous work in so many parts, between which a unit serves other roles.
    queued: how many of them a role issues while they wait; it waits to issue the others.
    """

    occupancy_cycles: Mapping[str, float]
    latency_cycles: float = 0.0
    issue_cycles: float = 0.0
    passes: frozenset[str] = frozenset()
    under: str | None = None
    stretch: Mapping[str, float] = field(default_factory=dict)
    instructions: int = 1
    queued: float = 0.0

    def parts(self) -> Iterator[WorkCost]:
        """The cost of each instruction, whose issue takes as long as one runs while a queue is
        full."""
        count = self.instructions
        occupancy = {name: x / count for name, x in self.occupancy_cycles.items()}
        own, issue = next(iter(occupancy.values()), 0.0), self.issue_cycles / count
        for behind in reversed(range(count)):
            waited = own if behind and behind >= self.queued else 0.0
            yield replace(
                self, occupancy_cycles=occupancy, issue_cycles=max(issue, waited), instructions=1
            )


@dataclass(frozen=True, kw_only=True)
class SignalCost:
    """Cycles from an arrival to its visibility, and of a wait that passes."""

    latency_cycles: float = 0.0
    wait_cycles: float = 0.0


WorkCosts = Callable[[Role, Work], WorkCost]
SignalCosts = Callable[[Signal], SignalCost]


@dataclass
class _Lowering:
    """Arrays under construction."""

    plan: PipelinePlan
    work_costs: WorkCosts
    shares: Mapping[str, float]
    units: dict[str, int] = field(default_factory=dict)
    code: list[tuple[int, int, int, int]] = field(default_factory=list)
    works: list[tuple[str, WorkCost, float]] = field(default_factory=list)
    follows: list[bool] = field(default_factory=list)
    waiters: dict[tuple[str, str], int] = field(default_factory=dict)
    arrivers: dict[tuple[str, str], int] = field(default_factory=dict)

    def emit_program(self, role: Role, program: Program, depth: int = 0) -> None:
        """Append the instructions of a program."""
        for step in program:
            if isinstance(step, Wait):
                slot = self.waiters.setdefault((step.signal, role.name), len(self.waiters))
                self.code.append((WAIT, self.signal_index(step.signal), slot, 0))
            elif isinstance(step, Arrive):
                slot = self.arrivers[step.signal, role.name]
                unit = -1 if step.after is None else self.unit_index(step.after)
                self.code.append((ARRIVE, slot, unit, 0))
            elif isinstance(step, Loop):
                self.emit_loop(role, step, depth)
            else:
                self.emit_work(role, step)

    def emit_loop(self, role: Role, step: Loop, depth: int) -> None:
        """LOOP, body, END, each knowing where the other is."""
        if depth >= MAX_LOOP_DEPTH:
            raise ValueError(f"loops of {role.name} nest deeper than {MAX_LOOP_DEPTH}")
        start = len(self.code)
        column = IF_FOLLOWED
        if step.trip != FOLLOWING:
            column = own_columns(self.plan, role)[step.trip]
        self.code.append((LOOP, column, step.offset, 0))
        self.emit_program(role, step.body, depth + 1)
        self.code[start] = (*self.code[start][:3], len(self.code))
        self.code.append((END, start, 0, 0))

    def emit_work(self, role: Role, step: Work) -> None:
        """A WORK instruction for each of the work's, with its own row of costs."""
        share = 1.0 if step.share is None else self.shares[step.share]
        cost = self.work_costs(role, step)
        if len(cost.occupancy_cycles) > UNITS_PER_WORK:
            raise ValueError(f"{step.what} uses more than {UNITS_PER_WORK} units")
        for unit in (*cost.occupancy_cycles, *([cost.under] if cost.under else [])):
            self.unit_index(unit)
        for number, part in enumerate(cost.parts() if step.asynchronous else (cost,)):
            self.code.append((WORK, len(self.works), int(step.asynchronous), 0))
            self.works.append((step.what, part, share))
            self.follows.append(number > 0)

    def unit_index(self, name: str) -> int:
        """Index of a unit, added on first use."""
        return self.units.setdefault(name, len(self.units))

    def signal_index(self, name: str) -> int:
        """Index of a signal in the plan."""
        return next(i for i, signal in enumerate(self.plan.signals) if signal.name == name)


def _unit_rows(state: _Lowering) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(W, UNITS_PER_WORK) units of each piece of work: index, cycles, does it pass, stretch."""
    units = np.full((len(state.works), UNITS_PER_WORK), -1, np.int32)
    occupancy = np.zeros((len(state.works), UNITS_PER_WORK))
    passes = np.zeros((len(state.works), UNITS_PER_WORK), np.bool_)
    stretch = np.zeros((len(state.works), UNITS_PER_WORK))
    for row, (_, cost, share) in enumerate(state.works):
        for column, (unit, cycles) in enumerate(cost.occupancy_cycles.items()):
            units[row, column] = state.units[unit]
            occupancy[row, column] = cycles * share
            passes[row, column] = unit in cost.passes
            stretch[row, column] = cost.stretch.get(unit, 0.0)
    return units, occupancy, passes, stretch


def lower(
    plan: PipelinePlan,
    work_costs: WorkCosts,
    signal_costs: SignalCosts,
    shares: Mapping[str, float] | None = None,
) -> EventCode:
    """The event code of a plan. `shares` gives the run-time fractions that the plan names."""
    state = _Lowering(plan, work_costs, shares or {})
    ranges = []
    for signal in plan.signals:
        ranges.append((len(state.arrivers), len(signal.arrivals)))
        for role_name in signal.arrivals:
            state.arrivers[signal.name, role_name] = len(state.arrivers)
    entry = []
    for role in plan.roles:
        if any(isinstance(step, Loop) for step in role.prologue):
            raise ValueError(f"the prologue of {role.name} has a loop, but no work tile to count")
        prologue = len(state.code)
        state.emit_program(role, role.prologue)
        state.code.append((TILE_END, 0, 0, 0))
        entry.append((prologue, len(state.code)))
        state.emit_program(role, full_program(role))
        state.code.append((TILE_END, 0, 0, 0))
    units, occupancy, passes, stretch = _unit_rows(state)
    roles = [role.name for role in plan.roles]
    names = [signal.name for signal in plan.signals]
    costs = [signal_costs(signal) for signal in plan.signals]
    return EventCode(
        role_names=tuple(roles),
        unit_names=tuple(state.units),
        signal_names=tuple(names),
        work_names=tuple(what for what, _, _ in state.works),
        instructions=np.array(state.code, np.int32),
        entry=np.array(entry, np.int64),
        work_units=units,
        work_occupancy=occupancy,
        work_latency=np.array([cost.latency_cycles * share for _, cost, share in state.works]),
        work_issue=np.array([cost.issue_cycles for _, cost, _ in state.works]),
        work_passes=passes,
        work_under=np.array(
            [-1 if cost.under is None else state.units[cost.under] for _, cost, _ in state.works],
            np.int32,
        ),
        work_stretch=stretch,
        work_follows=np.array(state.follows, np.bool_),
        signal_arrivers=np.array(ranges, np.int32).reshape(-1, 2),
        signal_free=np.array([signal.free for signal in plan.signals], np.int64),
        signal_latency=np.array([cost.latency_cycles for cost in costs]),
        signal_wait_cost=np.array([cost.wait_cycles for cost in costs]),
        arriver_signal=np.array([names.index(s) for s, _ in state.arrivers], np.int32),
        arriver_role=np.array([roles.index(r) for _, r in state.arrivers], np.int32),
        waiters=len(state.waiters),
        trip_columns=len(column_names(plan)),
    )
