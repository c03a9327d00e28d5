"""The compiled engine: equal to its plain twin event for event, and right by independent checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.config import BackwardPipeline, ForwardPipeline, WarpgroupPipeline
from fa4.hardware import B200, H200
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.plan.schema import (
    Arrive,
    Loop,
    PipelinePlan,
    Program,
    Role,
    Signal,
    Sync,
    Wait,
    Work,
    unroll,
    walk,
)
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim import engine, engine_python
from fa4.sim.code import ARRIVE, END, HISTORY, LOOP, TILE_END, WAIT, WORK, EventCode
from fa4.sim.code import PipelineDeadlock as Deadlock
from fa4.sim.costs import MachineCosts
from fa4.sim.lower import SignalCost, WorkCost, lower
from fa4.sim.machine import Machine, find_machine
from tests.sim.strategies import (
    Drawn,
    backward_pipelines,
    drawn_plans,
    forward_pipelines,
    machines,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = settings(max_examples=100)
FEW = settings(max_examples=25)
SHARES = {"rescale_rate": 0.1}
TILES = np.array([[7, 2, 5], [1, 1, 0], [4, 0, 4]])

RUN_FIELDS = ("outcome", "end", "events", "busy", "stalled", "finish", "tile_ends", "blocked_on",
              "phases", "arrivals", "log")  # fmt: skip


def lowered(plan: PipelinePlan, machine: Machine) -> EventCode:
    """The event code of a kernel's plan on a machine."""
    costs = MachineCosts(machine.gpu, machine.costs)
    return lower(plan, costs.work, costs.signal, SHARES)


def outcome(run: Callable[[], engine.EngineRun]) -> dict[str, object] | str:
    """Everything that a run reports, or the message of its deadlock."""
    try:
        result = run()
    except Deadlock as error:
        return str(error)
    return {name: np.asarray(getattr(result, name)).tolist() for name in RUN_FIELDS}


def twins_agree(code: EventCode, trips: np.ndarray) -> bool:
    """Do both engines report the same, the log included?"""
    ours = outcome(lambda: engine.execute(code, trips, log=True))
    return ours == outcome(lambda: engine_python.execute(code, trips))


def finished(drawn: Drawn) -> tuple[EventCode, engine.EngineRun]:
    """The logged run of a drawn plan; plans that deadlock are not drawn."""
    code = drawn.code
    try:
        return code, engine.execute(code, drawn.trips, log=True)
    except Deadlock:
        assume(False)
        raise


@EXAMPLES
@given(drawn_plans())
def test_twins_agree_on_random_plans(drawn: Drawn) -> None:
    """Log, times, units, stalls, tile ends and deadlock messages are equal."""
    assert twins_agree(drawn.code, drawn.trips)


@FEW
@given(forward_pipelines(), machines())
def test_twins_agree_on_forward_kernels(pipeline: ForwardPipeline, machine: Machine) -> None:
    """The same on FlashAttention-4's forward plans."""
    assert twins_agree(lowered(forward_plan(pipeline, B200), machine), TILES)


@FEW
@given(backward_pipelines(), machines())
def test_twins_agree_on_backward_kernels(pipeline: BackwardPipeline, machine: Machine) -> None:
    """The same on FlashAttention-4's backward plans."""
    assert twins_agree(lowered(backward_plan(pipeline, B200), machine), TILES)


@FEW
@given(st.integers(1, 3), st.integers(2, 4), machines())
def test_twins_agree_on_work_tiles_that_begin_ahead(
    consumers: int, stages: int, machine: Machine
) -> None:
    """The last work tile begins no other: each warpgroup has as many S as KV tiles."""
    pipeline = WarpgroupPipeline(head_dim=64, consumers=consumers, kv_stages=stages, ahead=True)
    plan = warpgroup_plan(pipeline, H200)
    tiles = np.array([[7, 2, 5], [1, 1, 0], [4, 1, 3]])
    code = lowered(plan, machine)
    assert twins_agree(code, tiles)
    log = engine.execute(code, tiles, log=True).log
    names = [code.work_names[int(code.instructions[int(pc), 1])] for _, pc, *_ in log
             if code.instructions[int(pc), 0] == WORK and not follows(code, int(pc))]  # fmt: skip
    assert [names.count(f"QK{i}") for i in range(consumers)] == [tiles[:, 0].sum()] * consumers


def steps_by_instruction(plan: PipelinePlan, code: EventCode) -> dict[int, object]:
    """The plan's step that each instruction (loops apart) was made from; of a step that several
    were made from, that of the first."""
    steps = {}
    for role, (prologue, program) in zip(plan.roles, code.entry, strict=True):
        for start, part in ((prologue, role.prologue), (program, role.program)):
            at = int(start)
            for step in walk(part):
                while code.instructions[at, 0] in (LOOP, END):
                    at += 1
                steps[at] = step
                at += 1
                while code.instructions[at, 0] == WORK and follows(code, at):
                    at += 1
            while code.instructions[at, 0] in (LOOP, END):
                at += 1
            assert code.instructions[at, 0] == TILE_END
    return steps


def follows(code: EventCode, instruction: int) -> bool:
    """Is it a further one of the step before?"""
    op, work = code.instructions[instruction, :2]
    return bool(op == WORK and code.work_follows[work])


def expected_steps(plan: PipelinePlan, role: Role, trips: np.ndarray) -> list[object]:
    """What a role has to execute, from the plan alone."""
    steps: list[object] = list(role.prologue)
    for row in trips:
        steps += unroll(role.program, dict(zip(plan.trips, (int(x) for x in row), strict=True)))
    return steps


@EXAMPLES
@given(drawn_plans())
def test_every_operation_happens_exactly_once(drawn: Drawn) -> None:
    """Each role executes its unrolled program in order, nothing more."""
    code, run = finished(drawn)
    steps = steps_by_instruction(drawn.plan, code)
    for index, role in enumerate(drawn.plan.roles):
        log = [int(at) for role_index, at, *_ in run.log if role_index == index]
        done = [steps[at] for at in log if not follows(code, at)]
        wanted = expected_steps(drawn.plan, role, drawn.trips)
        assert len(done) == len(wanted)
        assert all(mine is other for mine, other in zip(done, wanted, strict=True))


@EXAMPLES
@given(drawn_plans())
def test_no_unit_does_more_than_it_can(drawn: Drawn) -> None:
    """Work between any two moments fits between them, on every unit; busy is its sum.

    A piece of work must lie between its request and its completion less latency. Jobs fit one
    after the other iff, for every moment, those requested from then on fit up to each deadline.
    Where work passes a unit's queue, or is stretched beside another unit, it does at least its own.
    """
    code, run = finished(drawn)
    for unit in range(len(code.unit_names)):
        jobs = []
        for _, at, _, start, end in run.log:
            op, work = code.instructions[int(at), :2]
            if op == WORK and unit in code.work_units[work]:
                column = int(np.flatnonzero(code.work_units[work] == unit)[0])
                deadline = end - code.work_latency[work]
                jobs.append((start, deadline, code.work_occupancy[work, column]))
        own = sum(occupancy for _, _, occupancy in jobs)
        shared = (code.work_units == unit) & (code.work_passes | (code.work_under >= 0)[:, None])
        if shared.any():
            assert run.busy[unit] >= own * (1 - 1e-12)
            continue
        assert run.busy[unit] == own
        for moment in {start for start, _, _ in jobs}:
            filled = 0.0
            for _, deadline, occupancy in sorted(
                (job for job in jobs if job[0] >= moment), key=lambda job: job[1]
            ):
                filled += occupancy
                assert moment + filled <= deadline


@EXAMPLES
@given(drawn_plans())
def test_no_wait_passes_before_its_arrivals(drawn: Drawn) -> None:
    """A wait ends at the latest of itself and its arrivals, plus its cost: then, and only then."""
    code, run = finished(drawn)
    arrived: dict[int, list[float]] = {slot: [] for slot in range(len(code.arriver_signal))}
    waits: list[tuple[int, int, int, float, float]] = []
    seen: dict[tuple[int, int], int] = {}
    pending: dict[tuple[int, int], float] = {}  # (role, unit) -> end of asynchronous work on it
    for row in run.log:
        role, at, start, end = int(row[0]), int(row[1]), row[3], row[4]
        op, a, b, _ = (int(x) for x in code.instructions[at])
        if op == WORK and b and code.work_units[a, 0] >= 0:
            key = (role, int(code.work_units[a, 0]))
            pending[key] = max(pending.get(key, 0.0), end)
        elif op == ARRIVE:
            moment = max(start, pending.get((role, b), 0.0))
            arrived[a].append(moment + code.signal_latency[code.arriver_signal[a]])
        elif op == WAIT:
            number = seen.get((role, a), 0)
            seen[role, a] = number + 1
            waits.append((a, number, role, start, end))
    for signal, number, role, start, end in waits:
        phase = number - int(code.signal_free[signal])
        first, count = code.signal_arrivers[signal]
        moments = (
            [arrived[slot][phase] for slot in range(first, first + count)] if phase >= 0 else []
        )
        assert end == max([start, *moments]) + code.signal_wait_cost[signal], role


def critical_path(drawn: Drawn) -> float:
    """End of the run if every unit had unlimited capacity: the longest chain of dependencies."""
    roles = [
        (role.name, iter(expected_steps(drawn.plan, role, drawn.trips)))
        for role in drawn.plan.roles
    ]
    clock = {name: 0.0 for name, _ in roles}
    pending: dict[tuple[str, str | None], float] = {}
    arrived: dict[tuple[str, str], list[float]] = {}
    seen: dict[tuple[str, str], int] = {}
    blocked: dict[str, Wait] = {}
    progress = True
    while progress:
        progress = False
        for name, steps in roles:
            while True:
                step = blocked.pop(name, None) or next(steps, None)
                if step is None:
                    break
                if isinstance(step, Wait):
                    number = seen.get((name, step.signal), 0)
                    moment = phase_moment(drawn.plan.signal(step.signal), number, arrived)
                    if moment is None:
                        blocked[name] = step
                        break
                    seen[name, step.signal] = number + 1
                    cost = drawn.signals[step.signal].wait_cycles
                    clock[name] = max(clock[name], moment) + cost
                elif isinstance(step, Arrive):
                    done = pending.get((name, step.after), 0.0) if step.after else 0.0
                    latency = drawn.signals[step.signal].latency_cycles
                    moments = arrived.setdefault((step.signal, name), [])
                    moments.append(max(clock[name], done) + latency)
                else:
                    clock[name] = advance(drawn.works[step.what], step, name, clock, pending)
                progress = True
    return max(clock.values())


def phase_moment(
    signal: Signal, number: int, arrived: Mapping[tuple[str, str], list[float]]
) -> float | None:
    """When wait `number` on a signal may pass; None if an arrival is missing."""
    phase = number - signal.free
    if phase < 0:
        return 0.0
    moments = [arrived.get((signal.name, role), []) for role in signal.arrivals]
    return None if any(len(m) <= phase for m in moments) else max(m[phase] for m in moments)


def advance(
    cost: WorkCost,
    work: Work,
    role: str,
    clock: dict[str, float],
    pending: dict[tuple[str, str | None], float],
) -> float:
    """A role's clock after some work that never queues."""
    end = clock[role] + max(cost.occupancy_cycles.values(), default=0.0) + cost.latency_cycles
    if not work.asynchronous:
        return end
    unit = next(iter(cost.occupancy_cycles), None)
    pending[role, unit] = max(pending.get((role, unit), 0.0), end)
    return clock[role] + cost.issue_cycles


@EXAMPLES
@given(drawn_plans())
def test_no_run_beats_its_critical_path(drawn: Drawn) -> None:
    """Units that queue only ever delay; and work ends no earlier than its unit can."""
    _, run = finished(drawn)
    assert run.end >= critical_path(drawn)
    if any(cost.passes for cost in drawn.works.values()):
        return  # what passes a queue ends before what it has delayed
    steps = [step for role in drawn.plan.roles for step in walk((*role.prologue, *role.program))]
    if not any(isinstance(step, Work) and step.asynchronous for step in steps):
        assert run.end >= max(run.busy, default=0.0)
    assert max(run.log[:, 4], default=0.0) >= max(run.busy, default=0.0)


@EXAMPLES
@given(drawn_plans())
def test_without_units_a_run_is_its_critical_path(drawn: Drawn) -> None:
    """Where nothing can queue, the chain of dependencies is the time, to the bit."""
    works = {name: replace(cost, occupancy_cycles={}) for name, cost in drawn.works.items()}
    free = replace(drawn, works=works)
    _, run = finished(free)
    assert run.end == critical_path(free)


@EXAMPLES
@given(drawn_plans(), st.integers(-3, 5))
def test_time_scales_with_cost(drawn: Drawn, power: int) -> None:
    """All costs times 2^n: every time in the report times 2^n, bit for bit."""
    code, run = finished(drawn)
    scaled = engine.execute(code.scaled(2.0**power), drawn.trips, log=True)
    for name in ("end", "busy", "stalled", "finish", "tile_ends"):
        assert np.array_equal(getattr(scaled, name), np.asarray(getattr(run, name)) * 2.0**power)
    assert np.array_equal(scaled.log[:, :3], run.log[:, :3])
    assert np.array_equal(scaled.log[:, 3:], run.log[:, 3:] * 2.0**power)


@FEW
@given(drawn_plans())
def test_the_log_changes_nothing(drawn: Drawn) -> None:
    """A run without a log reports the same numbers."""
    code, run = finished(drawn)
    quiet = engine.execute(code, drawn.trips)
    assert quiet.end == run.end and quiet.events == run.events == len(run.log)
    assert np.array_equal(quiet.stalled, run.stalled) and not len(quiet.log)


def test_long_logs_are_complete() -> None:
    """More events than the log's first size: still all of them, still equal to the twin."""
    code = lowered(forward_plan(ForwardPipeline(), B200), find_machine("b200"))
    trips = np.array([[100, 2, 98]])
    assert len(engine.execute(code, trips, log=True).log) > 1 << 12
    assert twins_agree(code, trips)


def test_no_array_is_counted() -> None:
    """Counts of references take most of the time where LLVM leaves them in the loop."""
    code = lowered(forward_plan(ForwardPipeline(), B200), find_machine("b200"))
    engine.execute(code, np.array([[1, 0, 1]]))
    kept = list(Path(engine._run.stats.cache_path).glob("engine.*.nbc"))
    assert any("_run-" in path.name for path in kept)
    assert not [path.name for path in kept if b"NRT_incref" in path.read_bytes()]


@pytest.mark.parametrize(
    "plan",
    [
        forward_plan(ForwardPipeline(), B200),
        forward_plan(ForwardPipeline(cta_group=2, head_dim=64), B200),
        backward_plan(BackwardPipeline(), B200),
    ],
)
def test_simpy_agrees(plan: PipelinePlan) -> None:
    """A model in another framework, made without the lowering, takes as long."""
    pytest.importorskip("simpy")
    from lab.benchmarks.simpy_twin import Model

    machine = find_machine("b200")
    costs = MachineCosts(machine.gpu, machine.costs)
    tiles = [dict(zip(plan.trips, (int(x) for x in row), strict=True)) for row in TILES]
    theirs = Model(plan, costs.work, costs.signal, SHARES).run(tiles)
    assert engine.execute(lowered(plan, machine), TILES).end == pytest.approx(theirs, rel=1e-9)


SCRIPT = """
import dataclasses, json
from fa4.commands import plain
from fa4.config import Problem
from fa4.designs.backward import choose
from fa4.designs.forward import default_forward
from fa4.sim.machine import find_machine
from fa4.sim.predict import predict
machine = find_machine("b200")
problem = Problem(seqlen_q=2048, seqlen_k=2048, heads_q=4, heads_k=2, head_dim=128, causal=True)
for pipeline in (default_forward(problem, machine.gpu), choose(problem, machine.gpu)):
    print(json.dumps(plain(dataclasses.asdict(predict(problem, pipeline, machine)))))
"""


def test_results_do_not_depend_on_hash_order() -> None:
    """Two processes with different hash seeds print the same predictions."""
    outputs = []
    for seed in ("1", "4321"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                              check=True, cwd=ROOT, env=environment)  # fmt: skip
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0].splitlines()[0])["cycles"] > 0


def small_code(roles: dict[str, Program], signals: tuple[Signal, ...]) -> EventCode:
    """A plan of a few steps; work w10 takes 10 cycles of unit "u" and 1 to issue."""
    plan = PipelinePlan(
        name="small",
        roles=tuple(Role(name=name, warps=(0,), registers=32, program=program)
                    for name, program in roles.items()),
        signals=signals,
        buffers=(),
        trips=("n",),
    )  # fmt: skip

    def cost(_: Role, work: Work) -> WorkCost:
        cycles = float(work.what[1:])
        return WorkCost(occupancy_cycles={"u": cycles} if cycles else {}, issue_cycles=1.0)

    return lower(plan, cost, lambda _: SignalCost(latency_cycles=2.0, wait_cycles=3.0))


def runaway(phases: int) -> EventCode:
    """A producer that is done long before its consumer starts."""
    signals = (Signal(name="s", arrivals={"fast": 1}, waiters=("slow",)),)
    roles = {
        "fast": (Loop("n", (Arrive("s"),)),),
        "slow": (Work(f"w{10 * phases}", Sync()), Loop("n", (Wait("s"),))),
    }
    return small_code(roles, signals)


def test_history_overflow_raises() -> None:
    """A waiter may lag by HISTORY phases, not by more; the twin has no such limit."""
    code = runaway(HISTORY + 1)
    assert engine.execute(code, np.array([[HISTORY]])).outcome == 0
    with pytest.raises(RuntimeError, match=f"more than {HISTORY} phases ahead"):
        engine.execute(code, np.array([[HISTORY + 1]]))
    assert engine_python.execute(code, np.array([[HISTORY + 1]])).outcome == 0


def test_history_overflow_of_one_of_two_arrivers_is_not_a_deadlock() -> None:
    """The slow arriver completes a phase that the fast one's history has lost."""
    signals = (Signal(name="s", arrivals={"fast": 1, "slow": 1}, waiters=("late",)),)
    roles = {
        "fast": (Loop("n", (Arrive("s"),)),),
        "slow": (Work("w100", Sync()), Loop("n", (Arrive("s"),))),
        "late": (Loop("n", (Wait("s"),)),),
    }
    code = small_code(roles, signals)
    with pytest.raises(RuntimeError, match="phases ahead"):
        engine.execute(code, np.array([[HISTORY + 1]]))


def test_event_limit_raises() -> None:
    """A run of exactly the limit is fine, one event more is not."""
    code, trips = runaway(4), np.array([[4]])
    events = engine.execute(code, trips).events
    assert events == 9
    assert engine.execute(code, trips, event_limit=events).events == events
    with pytest.raises(RuntimeError, match="stopped after 8 events"):
        engine.execute(code, trips, event_limit=events - 1)


def test_asynchronous_work_without_a_unit_leaves_units_alone() -> None:
    """An arrival after a unit does not wait for work that never used it."""
    signals = (Signal(name="s", arrivals={"a": 1}, waiters=("b",)),)
    work = Work("w0", Sync(), asynchronous=True)
    roles = {"a": (work, Arrive("s", after="u")), "b": (Wait("s"), Work("w10", Sync()))}
    code = small_code(roles, signals)
    code = replace(code, work_latency=np.array([500.0, 0.0]))
    run = engine.execute(code, np.array([[1]]), log=True)
    assert run.end == 1.0 + 2.0 + 3.0 + 10.0
    assert twins_agree(code, np.array([[1]]))


def test_deadlocks_are_explained() -> None:
    """Roles, signals, phases and the cycle."""
    signals = (
        Signal(name="full", arrivals={"producer": 1}, waiters=("consumer",)),
        Signal(name="empty", arrivals={"consumer": 1}, waiters=("producer",), free=1),
    )
    roles = {
        "producer": (Loop("n", (Wait("empty"), Wait("empty"), Arrive("full"))),),
        "consumer": (Loop("n", (Wait("full"), Arrive("empty"))),),
    }
    with pytest.raises(Deadlock) as caught:
        engine.execute(small_code(roles, signals), np.array([[2]]))
    message = str(caught.value)
    assert "producer waits on empty phase 0 for consumer" in message
    assert "consumer waits on full phase 0 for producer" in message
    assert "cycle: producer -(empty)-> consumer -(full)-> producer" in message


def test_prologues_have_no_loops() -> None:
    """There is no work tile whose trips they could count."""
    role = Role(name="r", warps=(0,), registers=32, program=(), prologue=(Loop("n", ()),))
    plan = PipelinePlan(name="p", roles=(role,), signals=(), buffers=(), trips=("n",))
    with pytest.raises(ValueError, match="prologue of r has a loop"):
        lower(plan, lambda *_: WorkCost(occupancy_cycles={}), lambda _: SignalCost())


# Faults planted in the twin's copy of the semantics. Each must make it differ from the compiled
# engine on the plans of FAULT_CASES: a comparison that no fault upsets compares nothing.


def _free_waits(machine: engine_python.PlainMachine) -> None:
    machine.code = replace(machine.code, signal_wait_cost=machine.code.signal_wait_cost * 0)


def _no_arrival_latency(machine: engine_python.PlainMachine) -> None:
    machine.code = replace(machine.code, signal_latency=machine.code.signal_latency * 0)


def _no_free_slots(machine: engine_python.PlainMachine) -> None:
    machine.code = replace(machine.code, signal_free=machine.code.signal_free * 0)


def _free_issue(machine: engine_python.PlainMachine) -> None:
    machine.code = replace(machine.code, work_issue=machine.code.work_issue * 0)


def _blocking_work(machine: engine_python.PlainMachine) -> None:
    original = machine.work
    machine.work = lambda role, index, _: original(role, index, False)


def _commits_at_once(machine: engine_python.PlainMachine) -> None:
    instructions = machine.code.instructions.copy()
    instructions[instructions[:, 0] == ARRIVE, 2] = -1
    machine.code = replace(machine.code, instructions=instructions)


def _unlimited_units(machine: engine_python.PlainMachine) -> None:
    original = machine.work

    def work(role: engine_python._Role, index: int, asynchronous: bool) -> float:
        machine.unit_free = [0.0] * len(machine.unit_free)
        return original(role, index, asynchronous)

    machine.work = work


def _last_arriver_is_enough(machine: engine_python.PlainMachine) -> None:
    arrivers = machine.code.signal_arrivers.copy()
    arrivers[:, 0] += arrivers[:, 1] - 1
    arrivers[:, 1] = 1
    machine.code = replace(machine.code, signal_arrivers=arrivers)


def _loops_ignore_offsets(machine: engine_python.PlainMachine) -> None:
    instructions = machine.code.instructions.copy()
    instructions[instructions[:, 0] == LOOP, 2] = 0
    machine.code = replace(machine.code, instructions=instructions)


def _last_role_first(machine: engine_python.PlainMachine) -> None:
    for role in machine.roles:
        role.clock += 1e-9 * (len(machine.roles) - role.index)


FAULTS = [_free_waits, _no_arrival_latency, _no_free_slots, _free_issue, _blocking_work,
          _commits_at_once, _unlimited_units, _last_arriver_is_enough, _loops_ignore_offsets,
          _last_role_first]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: Callable[[engine_python.PlainMachine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of the twins fails if one of them has other semantics."""
    code = lowered(forward_plan(ForwardPipeline(), B200), find_machine("b200"))
    assert twins_agree(code, TILES)
    original = engine_python.PlainMachine.__init__

    def faulty(machine: engine_python.PlainMachine, code: EventCode, trips: np.ndarray) -> None:
        original(machine, code, trips)
        fault(machine)

    monkeypatch.setattr(engine_python.PlainMachine, "__init__", faulty)
    assert not twins_agree(code, TILES)
