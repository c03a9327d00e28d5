"""The event engine: executes an `EventCode`, compiled with numba.

Semantics and vocabulary are in `code`; `engine_python` is the same machine in plain Python, which
the tests hold this one to, event for event.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

from fa4.base.compiled_code import prepare
from fa4.sim.code import (
    ARRIVE,
    DEADLOCK,
    END,
    EVENT_LIMIT,
    FINISHED,
    HISTORY,
    HISTORY_OVERFLOW,
    IF_FOLLOWED,
    LOOP,
    MAX_LOOP_DEPTH,
    TILE_END,
    UNITS_PER_WORK,
    WAIT,
    EngineRun,
    EventCode,
    PipelineDeadlock,
    explain_deadlock,
)
from fa4.sim.passed_tiles import widened

NO_LIMIT = 1 << 62
NOT_YET, LOST = -1.0, -2.0  # answers of _phase_time beside a moment
PASSED, BLOCKED = 0, 1

prepare([Path(__file__), Path(__file__).with_name("code.py")])

# Nothing is allocated here and the caller holds every array, so none is counted: LLVM leaves some
# counts in the loop, which take a CPU up to six times as long as the events. (Not among its types.)
compiled: Any = partial(numba.njit, cache=True, nogil=True, _nrt=False)


class _Code(NamedTuple):
    """The arrays of an EventCode, for compiled functions."""

    instructions: np.ndarray
    entry: np.ndarray
    work_units: np.ndarray
    work_occupancy: np.ndarray
    work_latency: np.ndarray
    work_issue: np.ndarray
    work_passes: np.ndarray
    work_under: np.ndarray
    work_stretch: np.ndarray
    work_lost: np.ndarray  # share of the time beside the other unit; a division here costs speed
    signal_arrivers: np.ndarray
    signal_free: np.ndarray
    signal_latency: np.ndarray
    signal_wait_cost: np.ndarray
    arriver_signal: np.ndarray
    trips: np.ndarray


class _State(NamedTuple):
    """Everything that changes during a run."""

    clock: np.ndarray  # (R,)
    pc: np.ndarray  # (R,)
    tile: np.ndarray  # (R,) -1 in the prologue
    live: np.ndarray  # (R,) bool
    counters: np.ndarray  # (R, MAX_LOOP_DEPTH) rounds left
    depth: np.ndarray  # (R,) loops entered
    unit_free: np.ndarray  # (U,)
    last_done: np.ndarray  # (R, U) end of asynchronous work
    times: np.ndarray  # (A, HISTORY) effective times of arrivals
    arrivals: np.ndarray  # (A,)
    phases: np.ndarray  # (waiter slots,)
    blocked_on: np.ndarray  # (R,) signal or -1
    busy: np.ndarray  # (U,)
    stalled: np.ndarray  # (R, S)
    finish: np.ndarray  # (R,)
    tile_ends: np.ndarray  # (T,)


def execute(
    code: EventCode, trips: np.ndarray, *, log: bool = False, event_limit: int = NO_LIMIT
) -> EngineRun:
    """Run the work tiles `trips` (T, columns of `passing`) one after the other on one machine.

    Raises PipelineDeadlock naming the roles, signals and phases; RuntimeError if a signal runs more
    than HISTORY phases ahead of its waiter or the event limit is reached.
    """
    arrays = _arrays(code, trips)
    capacity = 1 << 12 if log else 0
    while True:
        state, rows = _fresh_state(code, len(arrays.trips)), np.zeros((capacity, 5))
        outcome, events, written = _run(arrays, state, event_limit, rows)
        if written <= capacity:
            break
        capacity = written  # the log was too small: run again, the run is deterministic
    run = EngineRun(
        outcome=outcome,
        end=float(max(state.finish.max(initial=0.0), state.last_done.max(initial=0.0))),
        events=events,
        busy=state.busy,
        stalled=state.stalled,
        finish=state.finish,
        tile_ends=state.tile_ends,
        blocked_on=state.blocked_on,
        phases=state.phases,
        arrivals=state.arrivals,
        log=rows[:written],
    )
    if outcome == DEADLOCK:
        raise PipelineDeadlock(explain_deadlock(code, run))
    if outcome == HISTORY_OVERFLOW:
        raise RuntimeError(f"a signal ran more than {HISTORY} phases ahead of its waiter")
    if outcome == EVENT_LIMIT:
        raise RuntimeError(f"stopped after {event_limit} events")
    return run


def _arrays(code: EventCode, trips: np.ndarray) -> _Code:
    made = {
        "trips": np.ascontiguousarray(widened(trips, code.trip_columns), np.int64),
        "work_lost": code.work_stretch / (1.0 + code.work_stretch),
    }
    return _Code(
        **{name: getattr(code, name) for name in _Code._fields if name not in made}, **made
    )


def _fresh_state(code: EventCode, tiles: int) -> _State:
    roles, units, signals = len(code.role_names), len(code.unit_names), len(code.signal_names)
    arrivers = len(code.arriver_signal)
    return _State(
        clock=np.zeros(roles),
        pc=code.entry[:, 0].copy(),
        tile=np.full(roles, -1, np.int64),
        live=np.ones(roles, np.bool_),
        counters=np.zeros((roles, MAX_LOOP_DEPTH), np.int64),
        depth=np.zeros(roles, np.int64),
        unit_free=np.zeros(units),
        last_done=np.zeros((roles, units)),
        times=np.zeros((arrivers, HISTORY)),
        arrivals=np.zeros(arrivers, np.int64),
        phases=np.zeros(code.waiters, np.int64),
        blocked_on=np.full(roles, -1, np.int64),
        busy=np.zeros(units),
        stalled=np.zeros((roles, signals)),
        finish=np.zeros(roles),
        tile_ends=np.zeros(tiles),
    )


@compiled()
def _run(code, state, event_limit, log):  # type: ignore[no-untyped-def]
    """Returns (outcome, events, log rows that were or would have been written)."""
    clock, events, written = state.clock, 0, 0
    while True:
        role, other = _next_roles(state)
        if role < 0:
            return (DEADLOCK if state.live.any() else FINISHED), events, written
        # Go on with this role until another one is due.
        while True:
            if not _skip_control(code, state, role):
                break
            if events >= event_limit:
                return EVENT_LIMIT, events, written
            at, start = state.pc[role], clock[role]
            op = code.instructions[at, 0]
            end = start
            if op == WAIT:
                outcome = _wait(code, state, role)
                if outcome == HISTORY_OVERFLOW:
                    return HISTORY_OVERFLOW, events, written
                if outcome == BLOCKED:
                    break
                end = clock[role]
            elif op == ARRIVE:
                other = _arrive(code, state, role, other)
            else:
                end = _work(code, state, role)
            events += 1
            if log.shape[0] > 0:
                if written < log.shape[0]:
                    log[written, 0] = role
                    log[written, 1] = at
                    log[written, 2] = state.tile[role]
                    log[written, 3] = start
                    log[written, 4] = end
                written += 1
            state.pc[role] = at + 1
            if other >= 0 and (
                clock[other] < clock[role] or (clock[other] == clock[role] and other < role)
            ):
                break


@compiled()
def _next_roles(state):  # type: ignore[no-untyped-def]
    """The two roles with the smallest (time, index) that can go on; -1 for none."""
    role, other = -1, -1
    for r in range(state.clock.shape[0]):
        if state.live[r] and state.blocked_on[r] < 0:
            if role < 0 or state.clock[r] < state.clock[role]:
                other = role
                role = r
            elif other < 0 or state.clock[r] < state.clock[other]:
                other = r
    return role, other


@compiled()
def _skip_control(code, state, role):  # type: ignore[no-untyped-def]
    """Follow loops and tile boundaries up to the next event; False if the role is done."""
    while True:
        at = state.pc[role]
        op, a = code.instructions[at, 0], code.instructions[at, 1]
        if op == LOOP:
            if a == IF_FOLLOWED:
                count = np.int64(state.tile[role] + 1 < code.trips.shape[0])
            else:
                count = code.trips[state.tile[role], a] + code.instructions[at, 2]
            if count > 0:
                state.counters[role, state.depth[role]] = count
                state.depth[role] += 1
                state.pc[role] = at + 1
            else:
                state.pc[role] = code.instructions[at, 3] + 1
        elif op == END:
            level = state.depth[role] - 1
            state.counters[role, level] -= 1
            if state.counters[role, level] > 0:
                state.pc[role] = a + 1
            else:
                state.depth[role] = level
                state.pc[role] = at + 1
        elif op == TILE_END:
            tile = state.tile[role]
            if tile >= 0:
                state.tile_ends[tile] = max(state.tile_ends[tile], state.clock[role])
            state.tile[role] = tile + 1
            if tile + 1 == code.trips.shape[0]:
                state.finish[role] = state.clock[role]
                state.live[role] = False
                return False
            state.pc[role] = code.entry[role, 1]
        else:
            return True


@compiled()
def _phase_time(code, state, signal, phase):  # type: ignore[no-untyped-def]
    """When a phase takes effect; NOT_YET if some arriver is missing, LOST if it is forgotten."""
    if phase < 0:
        return 0.0
    latest = 0.0
    first = code.signal_arrivers[signal, 0]
    for slot in range(first, first + code.signal_arrivers[signal, 1]):
        if state.arrivals[slot] <= phase:
            return NOT_YET
        if state.arrivals[slot] - phase > HISTORY:
            return LOST
        latest = max(latest, state.times[slot, phase % HISTORY])
    return latest


@compiled()
def _wait(code, state, role):  # type: ignore[no-untyped-def]
    """Pass a signal, or note that the role is blocked on it."""
    at = state.pc[role]
    signal, slot = code.instructions[at, 1], code.instructions[at, 2]
    ready = _phase_time(code, state, signal, state.phases[slot] - code.signal_free[signal])
    if ready == LOST:
        return HISTORY_OVERFLOW
    if ready == NOT_YET:
        state.blocked_on[role] = signal
        return BLOCKED
    start = state.clock[role]
    state.stalled[role, signal] += max(0.0, ready - start)
    state.clock[role] = max(start, ready) + code.signal_wait_cost[signal]
    state.phases[slot] += 1
    return PASSED


@compiled()
def _arrive(code, state, role, other):  # type: ignore[no-untyped-def]
    """Arrive on a signal and wake who can go on; returns who is due after `role` now."""
    at = state.pc[role]
    slot, unit = code.instructions[at, 1], code.instructions[at, 2]
    signal = code.arriver_signal[slot]
    moment = state.clock[role]
    if unit >= 0:
        moment = max(moment, state.last_done[role, unit])
    state.times[slot, state.arrivals[slot] % HISTORY] = moment + code.signal_latency[signal]
    state.arrivals[slot] += 1
    for r in range(state.clock.shape[0]):
        if state.blocked_on[r] == signal:
            phase = state.phases[code.instructions[state.pc[r], 2]] - code.signal_free[signal]
            if _phase_time(code, state, signal, phase) != NOT_YET:
                state.blocked_on[r] = -1
                if other < 0 or (state.clock[r], r) < (state.clock[other], other):
                    other = r
    return other


@compiled(inline="always")
def _work(code, state, role):  # type: ignore[no-untyped-def]
    """Occupy the units of a piece of work; returns when it is done."""
    at = state.pc[role]
    work, asynchronous = code.instructions[at, 1], code.instructions[at, 2]
    under = code.work_under[work]
    beside_until = state.unit_free[under] if under >= 0 else 0.0
    start = state.clock[role]
    end = start
    for j in range(UNITS_PER_WORK):
        unit = code.work_units[work, j]
        if unit < 0:
            break
        occupancy = code.work_occupancy[work, j]
        begin = max(start, state.unit_free[unit])
        stretch, lost = code.work_stretch[work, j], code.work_lost[work, j]
        occupancy += min(occupancy * stretch, max(0.0, beside_until - begin) * lost)
        state.unit_free[unit] = begin + occupancy
        state.busy[unit] += occupancy
        done = state.unit_free[unit]
        if code.work_passes[work, j]:
            done = min(done, start + 2.0 * occupancy)
        end = max(end, done)
    end += code.work_latency[work]
    if asynchronous:
        unit = code.work_units[work, 0]
        if unit >= 0:
            state.last_done[role, unit] = max(state.last_done[role, unit], end)
        state.clock[role] = start + code.work_issue[work]
    else:
        state.clock[role] = end
    return end
