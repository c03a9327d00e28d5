"""The critical chain of a step: what the simulated pipeline waited for, piece by piece.

`critical_chain` simulates one work tile with many equal steps and a log, starts at an event late in
it and goes back through what each piece of work waited for: its own role, a unit that was busy with
earlier work, or the last arrival of a signal. In a steady state the way back meets the same event
an earlier step; the pieces between the two follow each other without a gap, so that their cycles
are the cycles of the step. A cycle less in any of them is, for a small change, a cycle less of it,
or a part of one where what follows then has more of a product beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa4.sim import engine
from fa4.sim.code import ARRIVE, WAIT, WORK, EventCode
from fa4.sim.engine_python import PlainMachine

STEADY_STEPS = 96  # simulated; a settled pipeline repeats itself after a few of them
LAST_STEP = STEADY_STEPS - 8  # where the walk starts: before the end can be felt
MOST_PERIOD = 24  # steps after which a pipeline repeats itself at the latest, as `chip` has it
SETTLED = 1e-6  # relative difference of the periods of a settled pipeline: rounding


@dataclass(frozen=True, kw_only=True)
class ChainRow:
    """`cycles` of the chain, in which `role` did `what` on `unit` (None: no unit, or a barrier).

    reason says why it started when the row before it ended: "role" (next in its program), "unit"
    (the unit was busy with the row before), "signal" (it waited for it). after: that row in words.
    """

    role: str
    what: str
    unit: str | None
    cycles: float
    reason: str
    after: str


@dataclass(frozen=True, kw_only=True)
class CriticalChain:
    """Rows in the order of time, from an event to the same event `steps` later, `cycles` in all.

    settled: the pipeline repeated itself exactly; otherwise `cycles` are those of these steps.
    period_steps: steps after which it did.
    """

    rows: tuple[ChainRow, ...]
    cycles: float
    steps: int
    period_steps: int
    settled: bool

    @property
    def step_cycles(self) -> float:
        """Cycles of one step."""
        return self.cycles / self.steps


class _Node(NamedTuple):
    """Something that was complete at a moment: a role at the end of a log row ("clock"), a unit
    with its part of a row's work ("unit"), a row's work with its latency ("done")."""

    kind: str
    row: int
    unit: int = -1


class _Link(NamedTuple):
    """How a node came about: from `before` (None: the launch), `cycles` earlier."""

    before: _Node | None
    reason: str
    begin: float


class _Piece(NamedTuple):
    """A row's work on a unit, and the row whose work was there before (-1 for none).

    done: when the row has what it asked for, before `end` if it passes the queue.
    """

    begin: float
    end: float
    before: int
    queued: bool
    done: float


def steady_trips(trips: np.ndarray) -> np.ndarray:
    """(1, 3) trips of the longest work tile of `trips` (T, 3), its plain steps made many."""
    masked = int(trips[int(np.argmax(trips[:, 0])), 1])
    return np.array([[masked + STEADY_STEPS, masked, STEADY_STEPS]], np.int64)


def critical_chain(code: EventCode, trips: np.ndarray) -> CriticalChain:
    """The chain of one step, for work tiles like the longest of `trips` (T, 3).

    Raises RuntimeError if there is none: no event repeats, as in a plan without loops.
    """
    steady = steady_trips(trips)
    walk = _Walk(code, steady, engine.execute(code, steady, log=True).log)
    period, step_cycles = walk.period()
    for settled, steps, pace in ((True, period, step_cycles), (False, 1, None)):
        if steps:
            path = walk.circuit(steps, pace)
            if path is not None:
                first, last = path[-1], path[0]
                return CriticalChain(
                    rows=_from_a_signal(walk.describe(path)),
                    cycles=walk.moment(last) - walk.moment(first),
                    steps=walk.step[last.row] - walk.step[first.row],
                    period_steps=steps,
                    settled=settled,
                )
    raise RuntimeError("no event of the pipeline repeats itself: it has no steady step")


class _Walk:
    """A log with, for each row, what it waited for.

    The readable engine repeats the rows in their order, so that its rules are not said twice.
    """

    def __init__(self, code: EventCode, trips: np.ndarray, log: np.ndarray) -> None:
        self.code, self.machine = code, PlainMachine(code, trips)
        self.role = log[:, 0].astype(int).tolist()
        self.instruction = log[:, 1].astype(int).tolist()
        self.start, self.done = log[:, 3].tolist(), log[:, 4].tolist()
        count = len(log)
        self.end = [0.0] * count  # when its role goes on
        self.step = [0] * count  # how often its role had come to this instruction
        self.previous = [-1] * count  # the role's row before, arrivals apart
        self.pieces: list[dict[int, _Piece]] = [{}] * count  # by unit; of work, one of its own
        # Of a wait: when its last arrival took effect, when that was made, and what it followed.
        self.cause: list[tuple[float, float, _Node | None] | None] = [None] * count
        self._arrivals: list[list[tuple[float, float, _Node | None]]] = [
            [] for _ in code.arriver_signal
        ]
        self._unit_row: dict[int, int] = {}
        self._done_row: dict[tuple[int, int], int] = {}
        self._read()

    def _read(self) -> None:
        """Repeat the rows; RuntimeError where the engine disagrees with the log."""
        seen: dict[tuple[int, int], int] = {}
        last_row: dict[int, int] = {}
        for row, (number, at) in enumerate(zip(self.role, self.instruction, strict=True)):
            role = self.machine.roles[number]
            self.machine.skip_control(role)
            self.step[row] = seen[number, at] = seen.get((number, at), -1) + 1
            self.previous[row] = last_row.get(number, -1)
            op, a, b, _ = self.machine.instructions[at]
            if op == WAIT:
                self.cause[row] = self._last_arrival(a, b)
                self.machine.step(role)
            elif op == ARRIVE:
                self._arrive(row, a, b)
            else:
                self._work(row, a, bool(b))
            if self.machine.log[-1] != (number, at, role.tile, self.start[row], self.done[row]):
                raise RuntimeError(
                    f"the log has {self._name(row)} from {self.start[row]:g} to "
                    f"{self.done[row]:g}; what it waited for gives {self.machine.log[-1][3:]}"
                )
            self.end[row] = role.clock
            if op != ARRIVE:
                last_row[number] = row

    def _last_arrival(self, signal: int, slot: int) -> tuple[float, float, _Node | None] | None:
        """The last arrival of the phase that a wait is at; None for a phase that was free."""
        phase = self.machine.phases[slot] - self.machine.signal_free[signal]
        first, count = self.machine.signal_arrivers[signal]
        moments = [self._arrivals[x][phase] for x in range(first, first + count) if phase >= 0]
        return max(moments, key=lambda arrival: arrival[0], default=None)

    def _arrive(self, row: int, slot: int, unit: int) -> None:
        number = self.role[row]
        moment, follows = self.start[row], _clock(self.previous[row])
        done = self._done_row.get((number, unit), -1)
        if done >= 0 and self.done[done] > moment:
            moment, follows = self.done[done], _Node("done", done)
        self.machine.step(self.machine.roles[number])
        self._arrivals[slot].append((self.machine.arrivals[slot][-1], moment, follows))

    def _work(self, row: int, work: int, asynchronous: bool) -> None:
        number, start = self.role[row], self.start[row]
        uses = self.machine.work_pieces[work]
        free = [self.machine.unit_free[unit] for unit, *_ in uses]
        self.machine.step(self.machine.roles[number])
        pieces = self.pieces[row] = {}
        for (unit, _, passes, _), before in zip(uses, free, strict=True):
            begin, end = max(start, before), self.machine.unit_free[unit]
            done = min(end, start + 2.0 * (end - begin)) if passes else end
            last = self._unit_row.get(unit, -1)
            pieces[unit] = _Piece(begin, end, last, before > start, done)
            self._unit_row[unit] = row
        if asynchronous and uses:
            key = number, uses[0][0]
            if key not in self._done_row or self.done[row] >= self.done[self._done_row[key]]:
                self._done_row[key] = row

    def period(self) -> tuple[int, float]:
        """Steps after which every event of the settled pipeline comes again, 0 if none does, and
        the cycles of one."""
        ends: dict[tuple[int, int], list[float]] = {}
        for role, at, end in zip(self.role, self.instruction, self.end, strict=True):
            ends.setdefault((role, at), []).append(end)
        series = [np.array(times) for times in ends.values() if len(times) >= STEADY_STEPS - 1]
        for steps in range(1, MOST_PERIOD + 1) if series else ():
            spans = np.stack([
                x[LAST_STEP - 2 * MOST_PERIOD : LAST_STEP]
                - x[LAST_STEP - 2 * MOST_PERIOD - steps : LAST_STEP - steps]
                for x in series
            ])  # fmt: skip
            if np.ptp(spans) <= SETTLED * spans.mean():
                return steps, float(spans.mean()) / steps
        return 0, 0.0

    def circuit(self, period: int, step_cycles: float | None) -> list[_Node] | None:
        """Nodes backwards in time from one to the same one a multiple of `period` steps earlier.

        step_cycles: of the settled pipeline. The two are then that many cycles apart: a unit's
        queue may take more steps to come again than what the roles do.
        """
        late = [row for row, step in enumerate(self.step) if step == LAST_STEP]
        node: _Node | None = (
            _Node("clock", max(late, key=lambda row: self.end[row])) if late else None
        )
        path: list[_Node] = []
        met: dict[tuple[object, ...], int] = {}
        while node is not None:
            step = self.step[node.row]
            key = (node.kind, node.unit, self.role[node.row], self.instruction[node.row],
                   step % period)  # fmt: skip
            path.append(node)
            if key in met and step < self.step[path[met[key]].row]:
                first = path[met[key]]
                apart = self.moment(first) - self.moment(node)
                expected = (
                    apart if step_cycles is None else (step_cycles * (self.step[first.row] - step))
                )
                if abs(apart - expected) <= SETTLED * expected:
                    return path[met[key] :]
            met.setdefault(key, len(path) - 1)
            node = self.link(node).before
        return None

    def moment(self, node: _Node) -> float:
        """When the node was complete."""
        if node.kind == "unit":
            return self.pieces[node.row][node.unit].end
        return self.done[node.row] if node.kind == "done" else self.end[node.row]

    def link(self, node: _Node) -> _Link:
        """What the node waited for."""
        row = node.row
        op = self.machine.instructions[self.instruction[row]][0]
        own = _Link(_clock(self.previous[row]), "role", self.start[row])
        if op == WAIT:
            cause = self.cause[row]
            if cause is None or cause[0] <= self.start[row]:
                return own
            return _Link(cause[2], "signal", cause[1])
        if node.kind == "clock" and self._only_issued(row):
            return own
        pieces = self.pieces[row]
        unit = node.unit
        if node.kind != "unit":
            unit = max(pieces, key=lambda unit: pieces[unit].done, default=-1)
        if unit < 0 or not pieces[unit].queued:
            return own
        if node.kind != "unit" and pieces[unit].done < pieces[unit].end:  # it passed the queue
            return own
        return _Link(_Node("unit", pieces[unit].before, unit), "unit", pieces[unit].begin)

    def _only_issued(self, row: int) -> bool:
        """Did the role go on as soon as the row's work was under way?"""
        op, work, asynchronous, _ = self.machine.instructions[self.instruction[row]]
        issued = self.start[row] + self.machine.work_issue[work] if op == WORK else 0.0
        return bool(asynchronous) and self.end[row] <= issued

    def describe(self, path: Sequence[_Node]) -> tuple[ChainRow, ...]:
        """Rows of a path, in the order of time, without those that take no time.

        A role that goes on before its work has begun on a unit takes cycles off the row before.
        """
        rows: list[ChainRow] = []
        for node in reversed(path[:-1]):
            link = self.link(node)
            cycles = self.moment(node) - link.begin
            if cycles < 0 and rows:
                rows[-1] = replace(rows[-1], cycles=rows[-1].cycles + cycles)
            elif cycles:
                rows.append(ChainRow(
                    role=self.code.role_names[self.role[node.row]], what=self._what(node),
                    unit=self._unit(node), cycles=cycles, reason=link.reason,
                    after=self._name(link.before.row) if link.before else "the launch",
                ))  # fmt: skip
        return tuple(rows)

    def _what(self, node: _Node) -> str:
        op, a, *_ = self.machine.instructions[self.instruction[node.row]]
        if op == WAIT:
            return f"wait {self.code.signal_names[a]}"
        issued = node.kind == "clock" and self._only_issued(node.row)
        return f"issue {self.code.work_names[a]}" if issued else self.code.work_names[a]

    def _unit(self, node: _Node) -> str | None:
        """The unit that the node's time went to."""
        pieces = self.pieces[node.row]
        if not pieces or (node.kind == "clock" and self._only_issued(node.row)):
            return None
        unit = node.unit if node.kind == "unit" else max(pieces, key=lambda u: pieces[u].done)
        return self.code.unit_names[unit]

    def _name(self, row: int) -> str:
        return f"{self.code.role_names[self.role[row]]}: {self._what(_Node('done', row))}"


def _from_a_signal(rows: tuple[ChainRow, ...]) -> tuple[ChainRow, ...]:
    """A circuit has no first row: begin where something was waited for, if anything was."""
    kinds = [row.reason for row in rows]
    first = next((kinds.index(kind) for kind in ("signal", "role") if kind in kinds), 0)
    return rows[first:] + rows[:first]


def _clock(row: int) -> _Node | None:
    return _Node("clock", row) if row >= 0 else None
