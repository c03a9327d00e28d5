"""What the event engines run: programs, signals and costs as plain arrays.

An `EventCode` knows nothing of GPUs. Roles run instructions in order; work occupies units; arrivals
complete the phases of signals. Two engines execute it with the same semantics: `engine` (numba) and
`engine_python`, the readable definition of them:

- The role with the smallest (time, index) among those that can go on executes its next instruction.
- WAIT s: the role's k-th wait on s (k from 0) passes when every arriver of s has made arrival
  k - free[s], at the latest of these arrivals' effective times and then costs wait_cost[s].
- ARRIVE a: the next arrival of arriver slot a takes effect at now + latency[s], or, with a unit,
  at the end of this role's last asynchronous work on it + latency[s] if that is later.
- WORK w: on each of its units, work starts when the role is there and the unit has finished what
  was requested before; it occupies the unit for occupancy cycles. It is done when the last of its
  units is, plus its latency. Synchronous work blocks the role until then; asynchronous work only
  for its issue cycles.
- On a unit that it passes, work takes every other cycle as long as what was requested before lasts:
  it is done twice its occupancy after it asked, or in its turn if that is earlier.
- Work with a unit `under` takes longer on its units while that one is busy with what was requested
  before: 1 + stretch times, unit by unit.
- A role runs its prologue once and its program once per work tile. The run ends with the last role
  and the last asynchronous work: a CTA stays until copies have read its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WAIT, ARRIVE, WORK, LOOP, END, TILE_END = range(6)

UNITS_PER_WORK = 6
# Arrival times kept per arriver; a waiter may lag behind by this many phases (a ring of 32 stages
# is the largest in use).
HISTORY = 128
IF_FOLLOWED = -1  # trip of a LOOP: once, unless this is the last work tile
MAX_LOOP_DEPTH = 4

# Outcome of a run.
FINISHED, DEADLOCK, HISTORY_OVERFLOW, EVENT_LIMIT = range(4)


@dataclass(frozen=True, kw_only=True)
class EventCode:
    """Arrays of one plan on one machine; see the module's text for their meaning.

    instructions (I, 4) int32: WAIT signal waiter_slot; ARRIVE arriver_slot unit_or_-1; WORK index
    is_asynchronous; LOOP trip offset end; END start; TILE_END. entry (R, 2): first instruction of
    each role's prologue and program. trip_columns: of the trips that it is run with (`passing`).
    """

    role_names: tuple[str, ...]
    unit_names: tuple[str, ...]
    signal_names: tuple[str, ...]
    work_names: tuple[str, ...]
    instructions: np.ndarray
    entry: np.ndarray
    work_units: np.ndarray  # (W, UNITS_PER_WORK) int32, -1 for none
    work_occupancy: np.ndarray  # (W, UNITS_PER_WORK) float64 cycles
    work_latency: np.ndarray  # (W,) float64 cycles
    work_issue: np.ndarray  # (W,) float64 cycles
    work_passes: np.ndarray  # (W, UNITS_PER_WORK) bool
    work_under: np.ndarray  # (W,) int32 unit, -1 for none
    work_stretch: np.ndarray  # (W, UNITS_PER_WORK) float64 share
    work_follows: np.ndarray  # (W,) bool: a further instruction of the piece of work before
    signal_arrivers: np.ndarray  # (S, 2) int32: first arriver slot and number of them
    signal_free: np.ndarray  # (S,) int64
    signal_latency: np.ndarray  # (S,) float64
    signal_wait_cost: np.ndarray  # (S,) float64
    arriver_signal: np.ndarray  # (A,) int32
    arriver_role: np.ndarray  # (A,) int32
    waiters: int
    trip_columns: int

    def scaled(self, factor: float) -> EventCode:
        """The same code with every cost multiplied by `factor`."""
        from dataclasses import replace

        return replace(
            self,
            work_occupancy=self.work_occupancy * factor,
            work_latency=self.work_latency * factor,
            work_issue=self.work_issue * factor,
            signal_latency=self.signal_latency * factor,
            signal_wait_cost=self.signal_wait_cost * factor,
        )


def stretched(alone: float, begin: float, beside_until: float, stretch: float) -> float:
    """Cycles that work of `alone` cycles takes from `begin` on beside a unit busy until then."""
    beside = max(0.0, beside_until - begin)
    return alone + min(alone * stretch, beside * (stretch / (1.0 + stretch)))


@dataclass
class EngineRun:
    """What one execution did. Times are cycles from 0.

    busy (U,) occupied cycles per unit; stalled (R, S) cycles each role waited on each signal;
    finish (R,) end of each role; tile_ends (T,) when the last role finished each work tile.
    log (E, 5) rows (role, instruction, tile, start, end) if asked for.
    """

    outcome: int
    end: float
    events: int
    busy: np.ndarray
    stalled: np.ndarray
    finish: np.ndarray
    tile_ends: np.ndarray
    blocked_on: np.ndarray  # (R,) signal each role is blocked on, -1 for none
    phases: np.ndarray  # (waiter slots,) waits passed
    arrivals: np.ndarray  # (A,) arrivals made
    log: np.ndarray = field(default_factory=lambda: np.zeros((0, 5)))


class PipelineDeadlock(RuntimeError):
    """Roles wait for each other; the message names each role, signal and phase."""


def explain_deadlock(code: EventCode, run: EngineRun) -> str:
    """Who waits on which phase of what, who should arrive, and a wait-for cycle if there is one."""
    lines, waits_for = [], {}
    slots = _waiter_slots(code)
    for role, signal in enumerate(run.blocked_on):
        if signal < 0:
            continue
        phase = int(run.phases[slots[role, signal]]) - int(code.signal_free[signal])
        first, count = code.signal_arrivers[signal]
        missing = [
            int(code.arriver_role[slot])
            for slot in range(first, first + count)
            if run.arrivals[slot] <= phase
        ]
        waits_for[role] = (int(signal), missing)
        names = " and ".join(code.role_names[m] for m in missing)
        lines.append(
            f"{code.role_names[role]} waits on {code.signal_names[signal]} phase {phase} "
            f"for {names}"
        )
    cycle = _find_cycle({role: missing for role, (_, missing) in waits_for.items()})
    if cycle:
        hops = [f"{code.role_names[r]} -({code.signal_names[waits_for[r][0]]})->" for r in cycle]
        lines.append("cycle: " + " ".join(hops) + " " + code.role_names[cycle[0]])
    return "deadlock: " + "; ".join(lines)


def _waiter_slots(code: EventCode) -> dict[tuple[int, int], int]:
    """(role, signal) -> waiter slot, read off the instructions."""
    slots: dict[tuple[int, int], int] = {}
    starts = np.sort(code.entry[:, 0])
    for index, (op, signal, slot, _) in enumerate(code.instructions):
        if op == WAIT:
            owner = int(np.searchsorted(starts, index, side="right")) - 1
            role = int(np.flatnonzero(code.entry[:, 0] == starts[owner])[0])
            slots[role, int(signal)] = int(slot)
    return slots


def _find_cycle(edges: dict[int, list[int]]) -> list[int]:
    """Some cycle of the wait-for graph, as the roles along it; empty if there is none."""

    def search(path: list[int]) -> list[int]:
        for target in edges.get(path[-1], []):
            if target in path:
                return path[path.index(target) :]
            found = search([*path, target])
            if found:
                return found
        return []

    for start in edges:
        found = search([start])
        if found:
            return found
    return []
