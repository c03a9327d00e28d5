"""The event engine: executes an `EventCode`, compiled with numba.

Semantics and vocabulary are in `code`; `engine_python` is the same machine in plain Python, which
the tests hold this one to, event for event.
"""

from __future__ import annotations

import numba
import numpy as np

from fa4.sim.code import (
    ARRIVE,
    DEADLOCK,
    END,
    EVENT_LIMIT,
    FINISHED,
    HISTORY,
    HISTORY_OVERFLOW,
    LOOP,
    MAX_LOOP_DEPTH,
    TILE_END,
    UNITS_PER_WORK,
    WAIT,
    EventCode,
    PipelineDeadlock,
    Run,
    explain_deadlock,
)

NO_LIMIT = 1 << 62


def execute(
    code: EventCode, trips: np.ndarray, *, log: bool = False, event_limit: int = NO_LIMIT
) -> Run:
    """Run the work tiles `trips` (T, number of trip names) one after the other on one machine.

    Raises PipelineDeadlock naming the roles, signals and phases; RuntimeError if a signal runs more
    than HISTORY phases ahead of its waiter or the event limit is reached.
    """
    trips = np.ascontiguousarray(trips, np.int64)
    roles, signals = len(code.role_names), len(code.signal_names)
    run = Run(
        outcome=FINISHED,
        end=0.0,
        events=0,
        busy=np.zeros(len(code.unit_names)),
        stalled=np.zeros((roles, signals)),
        finish=np.zeros(roles),
        tile_ends=np.zeros(len(trips)),
        blocked_on=np.full(roles, -1, np.int64),
        phases=np.zeros(max(1, code.waiters), np.int64),
        arrivals=np.zeros(max(1, len(code.arriver_signal)), np.int64),
    )
    capacity = 1 << 12 if log else 0
    while True:
        rows = np.zeros((capacity, 5))
        outcome, events, written = _run(
            code.instructions,
            code.entry,
            code.work_units,
            code.work_occupancy,
            code.work_latency,
            code.work_issue,
            code.signal_arrivers,
            code.signal_free,
            code.signal_latency,
            code.signal_wait_cost,
            code.arriver_signal,
            trips,
            event_limit,
            run.busy,
            run.stalled,
            run.finish,
            run.tile_ends,
            run.blocked_on,
            run.phases,
            run.arrivals,
            rows,
        )
        if written <= capacity:
            break
        capacity = written  # the log was too small: run again, the run is deterministic
        for array in (run.busy, run.stalled, run.finish, run.tile_ends, run.phases, run.arrivals):
            array[:] = 0
    run.outcome, run.events, run.end = outcome, events, float(run.finish.max(initial=0.0))
    run.log = rows[: min(written, capacity)]
    if outcome == DEADLOCK:
        raise PipelineDeadlock(explain_deadlock(code, run))
    if outcome == HISTORY_OVERFLOW:
        raise RuntimeError(f"a signal ran more than {HISTORY} phases ahead of its waiter")
    if outcome == EVENT_LIMIT:
        raise RuntimeError(f"stopped after {event_limit} events")
    return run


@numba.njit(cache=True, nogil=True)
def _phase_time(phase, signal, signal_arrivers, arrivals, times):  # type: ignore[no-untyped-def]
    """Effective time of a phase, -1 if some arriver has not arrived, -2 if history is lost."""
    latest = 0.0
    first = signal_arrivers[signal, 0]
    for slot in range(first, first + signal_arrivers[signal, 1]):
        if arrivals[slot] <= phase:
            return -1.0
        if arrivals[slot] - phase > HISTORY:
            return -2.0
        latest = max(latest, times[slot, phase % HISTORY])
    return latest


@numba.njit(cache=True, nogil=True)
def _run(  # type: ignore[no-untyped-def]
    instructions,
    entry,
    work_units,
    work_occupancy,
    work_latency,
    work_issue,
    signal_arrivers,
    signal_free,
    signal_latency,
    signal_wait_cost,
    arriver_signal,
    trips,
    event_limit,
    busy,
    stalled,
    finish,
    tile_ends,
    blocked_on,
    phases,
    arrivals,
    log,
):
    """Returns (outcome, events, log rows that were or would have been written)."""
    roles, units, tiles = entry.shape[0], busy.shape[0], trips.shape[0]
    clock = np.zeros(roles)
    pc = entry[:, 0].copy()
    tile = np.full(roles, -1, np.int64)  # -1: in the prologue
    live = np.ones(roles, np.bool_)
    counters = np.zeros((roles, MAX_LOOP_DEPTH), np.int64)
    depth = np.zeros(roles, np.int64)
    unit_free = np.zeros(units)
    last_done = np.zeros((roles, units))
    times = np.zeros((arrivals.shape[0], HISTORY))
    blocked_on[:] = -1
    events, written = 0, 0
    while True:
        role, other = -1, -1
        for r in range(roles):
            if live[r] and blocked_on[r] < 0:
                if role < 0 or clock[r] < clock[role]:
                    other = role
                    role = r
                elif other < 0 or clock[r] < clock[other]:
                    other = r
        if role < 0:
            return (DEADLOCK if live.any() else FINISHED), events, written
        # Go on with this role until another one is due.
        while True:
            if events >= event_limit:
                return EVENT_LIMIT, events, written
            op = instructions[pc[role], 0]
            a, b = instructions[pc[role], 1], instructions[pc[role], 2]
            start = clock[role]
            end = start
            if op == LOOP:
                count = trips[tile[role], a] + b
                if count > 0:
                    counters[role, depth[role]] = count
                    depth[role] += 1
                    pc[role] += 1
                else:
                    pc[role] = instructions[pc[role], 3] + 1
                continue
            if op == END:
                counters[role, depth[role] - 1] -= 1
                if counters[role, depth[role] - 1] > 0:
                    pc[role] = a + 1
                else:
                    depth[role] -= 1
                    pc[role] += 1
                continue
            if op == TILE_END:
                if tile[role] >= 0:
                    tile_ends[tile[role]] = max(tile_ends[tile[role]], start)
                tile[role] += 1
                if tile[role] == tiles:
                    finish[role] = start
                    live[role] = False
                    break
                pc[role] = entry[role, 1]
                continue
            events += 1
            if op == WAIT:
                phase = phases[b] - signal_free[a]
                ready = (
                    0.0 if phase < 0 else _phase_time(phase, a, signal_arrivers, arrivals, times)
                )
                if ready == -2.0:
                    return HISTORY_OVERFLOW, events, written
                if ready == -1.0:
                    blocked_on[role] = a
                    events -= 1  # counted when it passes
                    break
                stalled[role, a] += max(0.0, ready - start)
                clock[role] = max(start, ready) + signal_wait_cost[a]
                phases[b] += 1
                end = clock[role]
            elif op == ARRIVE:
                signal = arriver_signal[a]
                moment = start
                if b >= 0:
                    moment = max(moment, last_done[role, b])
                times[a, arrivals[a] % HISTORY] = moment + signal_latency[signal]
                arrivals[a] += 1
                for r in range(roles):
                    if blocked_on[r] == signal:
                        slot = instructions[pc[r], 2]
                        ready = _phase_time(
                            phases[slot] - signal_free[signal],
                            signal,
                            signal_arrivers,
                            arrivals,
                            times,
                        )
                        if ready >= 0.0:
                            blocked_on[r] = -1
                            if other < 0 or clock[r] < clock[other]:
                                other = r
            else:
                for j in range(UNITS_PER_WORK):
                    unit = work_units[a, j]
                    if unit < 0:
                        break
                    begun = max(start, unit_free[unit])
                    unit_free[unit] = begun + work_occupancy[a, j]
                    busy[unit] += work_occupancy[a, j]
                    end = max(end, unit_free[unit])
                end += work_latency[a]
                if b:
                    unit = work_units[a, 0]
                    last_done[role, unit] = max(last_done[role, unit], end)
                    clock[role] = start + work_issue[a]
                else:
                    clock[role] = end
            if log.shape[0] > 0:
                if written < log.shape[0]:
                    log[written, 0] = role
                    log[written, 1] = pc[role]
                    log[written, 2] = tile[role]
                    log[written, 3] = start
                    log[written, 4] = end
                written += 1
            pc[role] += 1
            if other >= 0 and (
                clock[other] < clock[role] or (clock[other] == clock[role] and other < role)
            ):
                break
