"""The event engine in plain Python: the readable definition that the compiled one is held to.

One instruction at a time, always of the role with the smallest (time, index) that can go on.
Arrival times are kept whole, without the compiled engine's window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fa4.sim.code import (
    ARRIVE,
    DEADLOCK,
    END,
    FINISHED,
    IF_FOLLOWED,
    LOOP,
    TILE_END,
    WAIT,
    EngineRun,
    EventCode,
    PipelineDeadlock,
    explain_deadlock,
    stretched,
)
from fa4.sim.passed_tiles import widened


@dataclass
class _Role:
    """Where one role stands."""

    index: int
    pc: int
    clock: float = 0.0
    tile: int = -1
    loops: list[int] = field(default_factory=list)
    last_done: dict[int, float] = field(default_factory=dict)
    finished: bool = False


class PlainMachine:
    """State of one run; `execute` drives it."""

    def __init__(self, code: EventCode, trips: np.ndarray) -> None:
        self.code, self.trips = code, widened(trips, code.trip_columns).tolist()
        self.roles = [_Role(r, int(code.entry[r, 0])) for r in range(len(code.role_names))]
        self.unit_free = [0.0] * len(code.unit_names)
        self.busy = [0.0] * len(code.unit_names)
        self.arrivals: list[list[float]] = [[] for _ in code.arriver_signal]
        self.phases = [0] * code.waiters
        self.stalled = np.zeros((len(self.roles), len(code.signal_names)))
        self.tile_ends = np.zeros(len(trips))
        self.log: list[tuple[float, ...]] = []

    @property
    def code(self) -> EventCode:
        """What is run."""
        return self._code

    @code.setter
    def code(self, code: EventCode) -> None:
        """Its arrays are read number by number, which lists are several times faster at."""
        self._code = code
        self.instructions: list[list[int]] = code.instructions.tolist()
        self.signal_free: list[int] = code.signal_free.tolist()
        self.signal_arrivers: list[list[int]] = code.signal_arrivers.tolist()
        self.signal_latency: list[float] = code.signal_latency.tolist()
        self.signal_wait_cost: list[float] = code.signal_wait_cost.tolist()
        self.arriver_signal: list[int] = code.arriver_signal.tolist()
        self.work_issue: list[float] = code.work_issue.tolist()
        self.work_latency: list[float] = code.work_latency.tolist()
        self.work_under: list[int] = code.work_under.tolist()
        columns = (code.work_units, code.work_occupancy, code.work_passes, code.work_stretch)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        # Per work: (unit, occupied cycles, does it pass the queue?, stretch) of each unit it uses.
        self.work_pieces: list[list[tuple[int, float, bool, float]]] = [
            [piece for piece in zip(*row, strict=True) if piece[0] >= 0] for row in rows
        ]

    def phase_time(self, signal: int, slot: int) -> float | None:
        """When the phase that waiter slot `slot` is at completes; None if it has not yet."""
        phase = self.phases[slot] - self.signal_free[signal]
        first, count = self.signal_arrivers[signal]
        if phase < 0:
            return 0.0
        moments = [self.arrivals[a] for a in range(first, first + count)]
        if any(len(times) <= phase for times in moments):
            return None
        return max((times[phase] for times in moments), default=0.0)

    def skip_control(self, role: _Role) -> None:
        """Follow loops and tile boundaries up to the next event or the end."""
        while not role.finished:
            op, a, b, c = self.instructions[role.pc]
            if op == LOOP:
                followed = role.tile + 1 < len(self.trips)
                count = int(followed) if a == IF_FOLLOWED else self.trips[role.tile][a] + b
                if count > 0:
                    role.loops.append(count)
                    role.pc += 1
                else:
                    role.pc = c + 1
            elif op == END:
                role.loops[-1] -= 1
                if role.loops[-1]:
                    role.pc = a + 1
                else:
                    role.loops.pop()
                    role.pc += 1
            elif op == TILE_END:
                if role.tile >= 0:
                    self.tile_ends[role.tile] = max(self.tile_ends[role.tile], role.clock)
                role.tile += 1
                role.finished = role.tile == len(self.trips)
                role.pc = int(self.code.entry[role.index, 1])
            else:
                return

    def blocked_on(self, role: _Role) -> int:
        """The signal that stops this role, -1 if none does."""
        op, signal, slot, _ = self.instructions[role.pc]
        return signal if op == WAIT and self.phase_time(signal, slot) is None else -1

    def released(self, role: _Role) -> float:
        """When a role and all that it has asked for is done."""
        return max(role.clock, *role.last_done.values(), 0.0)

    def step(self, role: _Role) -> None:
        """Execute one event of a role that can go on."""
        op, a, b, _ = self.instructions[role.pc]
        start, end = role.clock, role.clock
        if op == WAIT:
            ready = self.phase_time(a, b)
            assert ready is not None
            self.stalled[role.index, a] += max(0.0, ready - start)
            role.clock = end = max(start, ready) + self.signal_wait_cost[a]
            self.phases[b] += 1
        elif op == ARRIVE:
            moment = max(start, role.last_done.get(b, 0.0)) if b >= 0 else start
            latency = self.signal_latency[self.arriver_signal[a]]
            self.arrivals[a].append(moment + latency)
        else:
            end = self.work(role, a, bool(b))
        self.log.append((role.index, role.pc, role.tile, start, end))
        role.pc += 1

    def work(self, role: _Role, index: int, asynchronous: bool) -> float:
        """Occupy the units of one piece of work; returns when it is done."""
        start = role.clock
        end = start
        under = self.work_under[index]
        beside_until = self.unit_free[under] if under >= 0 else 0.0
        pieces = self.work_pieces[index]
        for unit, alone, passes, stretch in pieces:
            begin, occupancy = max(start, self.unit_free[unit]), alone
            if under >= 0:
                occupancy = stretched(alone, begin, beside_until, stretch)
            self.unit_free[unit] = begin + occupancy
            self.busy[unit] += occupancy
            shared = start + 2.0 * occupancy if passes else math.inf
            end = max(end, min(shared, self.unit_free[unit]))
        end += self.work_latency[index]
        if asynchronous:
            if pieces:
                unit = pieces[0][0]
                role.last_done[unit] = max(role.last_done.get(unit, 0.0), end)
            role.clock = start + self.work_issue[index]
        else:
            role.clock = end
        return end


def execute(code: EventCode, trips: np.ndarray) -> EngineRun:
    """Same result as `engine.execute(code, trips, log=True)`."""
    machine = PlainMachine(code, np.asarray(trips, np.int64))
    while True:
        for role in machine.roles:
            machine.skip_control(role)
        live = [role for role in machine.roles if not role.finished]
        ready = [role for role in live if machine.blocked_on(role) < 0]
        if not ready:
            break
        machine.step(min(ready, key=lambda role: (role.clock, role.index)))
    run = EngineRun(
        outcome=DEADLOCK if live else FINISHED,
        end=max((machine.released(role) for role in machine.roles if role.finished), default=0.0),
        events=len(machine.log),
        busy=np.array(machine.busy),
        stalled=machine.stalled,
        finish=np.array([role.clock if role.finished else 0.0 for role in machine.roles]),
        tile_ends=machine.tile_ends,
        blocked_on=np.array([-1 if r.finished else machine.blocked_on(r) for r in machine.roles]),
        phases=np.array(machine.phases),
        arrivals=np.array([len(times) for times in machine.arrivals]),
        log=np.array(machine.log).reshape(-1, 5),
    )
    if live:
        raise PipelineDeadlock(explain_deadlock(code, run))
    return run
