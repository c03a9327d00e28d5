"""What limits a call: the critical chain of a step, elasticities, neighbouring kernels, HBM."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import BackwardPipeline, WarpgroupPipeline
from fa4.designs import plan_of
from fa4.sim import chain as chain_module
from fa4.sim import engine
from fa4.sim import why as why_module
from fa4.sim.chain import MOST_PERIOD, CriticalChain, critical_chain, steady_trips
from fa4.sim.code import EventCode
from fa4.sim.elasticity import UNIT_RATES, all_figures, figures_read, measure, scale_cost
from fa4.sim.machine import Machine, find_machine
from fa4.sim.neighbours import Neighbour, choices
from fa4.sim.options import build, read_choice
from fa4.sim.predict import Simulation, call_seconds, make_runner
from fa4.sim.timeline import record
from fa4.sim.why import Why, elasticities, explain_why, limited_by, say_limit, step_chain
from tests.sim.strategies import backward_pipelines, forward_pipelines, machines

B200, H200 = find_machine("b200"), find_machine("h200")
QUOTED = {"causal": "yes", "seqlen": "16k"}  # shared memory is busy most, and does not matter
HBM_BOUND = {"seqlen": "8k", "gpu.hbm_bytes_per_s": "5e10"}

warpgroups = st.builds(
    WarpgroupPipeline,
    head_dim=st.sampled_from((64, 128)),
    tile_n=st.sampled_from((64, 96, 128)),
    consumers=st.integers(2, 3),
    ping_pong=st.booleans(),
    overlap=st.booleans(),
)
any_pipeline = forward_pipelines() | backward_pipelines() | warpgroups
TRIPS = np.array([[9, 2, 7], [4, 1, 3]])


def code_of(pipeline: Any, machine: Machine) -> EventCode:
    """What the engine runs for a pipeline."""
    machine = H200 if isinstance(pipeline, WarpgroupPipeline) else machine
    return make_runner(plan_of(pipeline, machine.gpu), machine, Simulation()).code


def sums_up(found: CriticalChain) -> bool:
    """Are the rows' cycles the chain's?"""
    return math.isclose(sum(row.cycles for row in found.rows), found.cycles, rel_tol=1e-9)


def measured_step(code: EventCode, steps: int) -> float:
    """Cycles per step of the settled pipeline, from two runs without a log."""
    short = steady_trips(TRIPS)
    longer = short + np.array([[1, 0, 1]]) * steps
    return (engine.execute(code, longer).end - engine.execute(code, short).end) / steps


@settings(max_examples=60)
@given(any_pipeline, machines())
def test_the_chain_is_the_step(pipeline: Any, machine: Machine) -> None:
    """Its rows add up to its cycles, and these are those of the step that the engine takes."""
    code = code_of(pipeline, machine)
    found = critical_chain(code, TRIPS)
    assert found.rows and found.steps >= 1 and sums_up(found)
    assert all(row.cycles > 0 and row.reason in ("role", "unit", "signal") for row in found.rows)
    if found.settled:
        assert found.steps % found.period_steps == 0
        per_step = measured_step(code, found.period_steps * MOST_PERIOD)
        assert found.step_cycles == pytest.approx(per_step, rel=1e-6)


@settings(max_examples=30)
@given(any_pipeline)
def test_a_chain_without_its_waits_is_found(pipeline: Any) -> None:
    """Planted: a walk that is a cycle off wherever a signal was waited for does not add up."""
    code = code_of(pipeline, B200)
    right = critical_chain(code, TRIPS)
    whole = chain_module._Walk.link

    def blind(self: Any, node: Any) -> Any:
        link = whole(self, node)
        return link if link.reason != "signal" else link._replace(begin=link.begin + 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module._Walk, "link", blind)
        wrong = critical_chain(code, TRIPS)
    if any(row.reason == "signal" for row in right.rows):  # waits that take no time have no row
        assert not sums_up(wrong)


class Told(chain_module._Walk):
    """A walk whose nodes take the cycles that it is told, of which some are below 0."""

    def __init__(self, cycles: list[int]) -> None:
        self.cycles, self.role = cycles, [0] * len(cycles)
        self.code = SimpleNamespace(role_names=("mma",))  # type: ignore[assignment]

    def moment(self, node: Any) -> float:
        return float(self.cycles[node.row])

    def link(self, node: Any) -> Any:
        return chain_module._Link(None, "role", 0.0)

    def _what(self, node: Any) -> str:
        return f"work {node.row}"

    def _unit(self, node: Any) -> str:
        return ""


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=12))
def test_who_goes_on_early_takes_cycles_off_the_row_before(cycles: list[int]) -> None:
    """So that the rows add up to the chain, whatever their number."""
    cycles = [10, *cycles]
    path = [chain_module._Node("clock", row) for row in range(len(cycles))]
    rows = Told(cycles).describe([*path[::-1], path[0]])
    assert sum(row.cycles for row in rows) == sum(cycles)
    assert len(rows) == sum(taken > 0 for taken in cycles)
    for row in rows:  # what it took, less what followed without a row of its own
        first = int(row.what.removeprefix("work "))
        behind = next((n for n in range(first + 1, len(cycles)) if cycles[n] > 0), len(cycles))
        assert row.cycles == sum(cycles[first:behind])


def test_a_log_of_other_costs_is_refused() -> None:
    """Planted: the walk repeats the engine's times, so that an engine with other rules shows."""
    code = code_of(build({}).pipeline, B200)
    log = engine.execute(code, steady_trips(TRIPS), log=True).log
    with pytest.raises(RuntimeError, match="what it waited for gives"):
        chain_module._Walk(code.scaled(2.0), steady_trips(TRIPS), log)


@pytest.mark.parametrize(
    "asked",
    [{}, QUOTED, {"pass": "bwd", "cta_group": "1"},
     {"machine": "h200"}, {"machine": "h200", "tile_m": "128", "tile_n": "128"},
     {"machine": "h200", "kernel": "published"}],
    ids=str,
)  # fmt: skip
def test_a_cycle_more_in_the_chain_is_a_cycle_more_of_the_step(asked: dict[str, str]) -> None:
    """All works of a unit a little longer: the step grows by as often as the chain has it.

    Hopper's vector instructions take longer beside products: what begins later has less of them
    beside it, and passes on a part of the delay.
    """
    request = build(asked)
    code = code_of(request.pipeline, request.machine)
    found = critical_chain(code, TRIPS)
    assert found.settled
    steps, little = found.period_steps * MOST_PERIOD, 1e-3
    before = measured_step(code, steps)
    passed_on = 1.0 / (1.0 + request.machine.costs.register_contention)
    for unit, name in enumerate(code.unit_names):
        more = code.work_occupancy + little * (code.work_units == unit)
        grown = measured_step(replace(code, work_occupancy=more), steps) - before
        count = sum(row.unit == name for row in found.rows)
        assert grown >= (passed_on * count / found.steps - 1e-3) * little, name


@pytest.mark.parametrize("rate", ["0", "1"])
def test_the_chain_of_a_call_rescales_as_the_call_does(rate: str) -> None:
    """It is a step of the recorded timeline, in which O is rescaled always or never."""
    request = build({"seqlen": "32k", "rescale_rate": rate})
    chain = step_chain(request)
    timeline = record(request.problem, request.pipeline, request.machine, request.simulation,
                      kv_tiles=60)  # fmt: skip
    starts = [x.start for x in timeline.ctas[0].events if x.what == "QK0" and x.kind == "issue"]
    assert chain is not None and chain.settled
    assert chain.step_cycles == pytest.approx((starts[50] - starts[26]) / 24, rel=1e-6)


def test_no_work_has_no_chain() -> None:
    """A call without sequences takes a launch."""
    assert step_chain(build({"batch": "0"})) is None


MATTER_LESS = ("launch_ns", "smem_latency_cycles", "mma_issue_cycles")


def test_elasticities_of_a_known_time() -> None:
    """A time that is a sum has its parts as elasticities; what is not read has none."""

    def seconds(machine: Machine) -> float:
        products = 3.0 * B200.gpu.mma_flops_per_clk / machine.gpu.mma_flops_per_clk
        return products + machine.costs.launch_ns / B200.costs.launch_ns

    found = measure(seconds, B200)
    values = {row.name: row.value for row in found.rows}
    assert values["tensor"] == pytest.approx(0.75, abs=2e-3)
    assert values["launch_ns"] == pytest.approx(0.25, abs=2e-3)
    assert {row.name for row in found.rows if row.used} == {"tensor", "launch_ns"}
    assert set(values) == set(all_figures())
    assert figures_read(seconds, B200) == {"gpu.mma_flops_per_clk", "costs.launch_ns"}


@pytest.mark.parametrize(("name", "way"), [("vector_efficiency", 0.9), ("sync_cycles", 1.1)])
def test_the_limit_in_words_names_the_way_that_is_slower(name: str, way: float) -> None:
    """Less of a share that is better when larger, more of a latency: the call takes longer."""

    def seconds(machine: Machine) -> float:
        of = {x: getattr(machine.costs, x) / getattr(B200.costs, x) for x in (name, *MATTER_LESS)}
        slower = of[name] if way > 1 else 1.0 / of[name]
        return slower + 0.001 * sum(of[x] for x in MATTER_LESS)

    said = say_limit(measure(seconds, B200))
    assert said.startswith(f"{name}: 10% {'less' if way < 1 else 'more'} of it makes the call 10.0")
    costs = replace(B200.costs, **{name: way * getattr(B200.costs, name)})
    assert seconds(replace(B200, costs=costs)) > seconds(B200)


def test_noise_hides_what_it_could_feign() -> None:
    """A unit whose speed makes a call slower: nothing smaller than that is called a limit."""

    def seconds(machine: Machine) -> float:
        faster = machine.gpu.mma_flops_per_clk > B200.gpu.mma_flops_per_clk
        return 1.0 + 0.1 * faster + 0.1 * machine.costs.launch_ns / B200.costs.launch_ns

    found = measure(seconds, B200)
    assert found.noise > 0.3 and not found.felt
    assert limited_by(found) == "" and "noise" in say_limit(found)


@given(st.sampled_from(sorted(UNIT_RATES)), st.sampled_from((0.87, 0.9, 1.1, 1.13)))
def test_scaled_costs(unit: str, factor: float) -> None:
    """A rate falls as its cost rises; whole numbers move by at least one, and say how far."""
    for figure in UNIT_RATES[unit]:
        changed, reached = scale_cost(B200, figure, factor)
        table, name = figure.split(".")
        old, new = (getattr(getattr(m, table), name) for m in (B200, changed))
        assert new != old and (reached > 1) == (factor > 1)
        assert reached == pytest.approx(old / new)
        assert type(new) is type(old)


def test_nothing_times_a_factor_is_nothing() -> None:
    """A constant of 0 stays, and so does its factor."""
    free = replace(B200, costs=replace(B200.costs, launch_ns=0.0))
    assert scale_cost(free, "costs.launch_ns", 1.1) == (free, 1.0)


@pytest.mark.parametrize("asked", [{}, QUOTED, {"pass": "bwd"}, {"machine": "h200"}], ids=str)
def test_elasticities_add_up(asked: dict[str, str]) -> None:
    """Nearly all of the time is accounted for, once; factors of other costs come on top."""
    found = elasticities(build({"seqlen": "8k", **asked}))
    factors = ("register_contention", "vector_efficiency", "throttle_slope")
    on_top = sum(row.value for row in found.rows if row.name in factors)
    assert found.total - on_top == pytest.approx(1.0, abs=0.25)
    assert found.noise < 0.1 and found.rows[0].value > 0.2


def test_the_busiest_unit_need_not_matter() -> None:
    """Products wait for operands more than for the tensor core: twice its rate gains less."""
    request = build(QUOTED)
    found, prediction = elasticities(request), request.predict()
    values = {row.name: row.value for row in found.rows}
    assert prediction.bound_by == "tensor" and limited_by(found) == "smem"
    assert values["smem"] > values["mufu"] > 1.1 * values["alu"] > 0
    gains = {
        unit: prediction.seconds / build({**QUOTED, figure: rate}).predict().seconds - 1
        for unit, figure, rate in (
            ("alu", "costs.alu_lanes_per_clk", 96), ("mufu", "gpu.exp_per_clk", 24)
        )
    }  # fmt: skip
    assert gains["alu"] < gains["mufu"] < 0.1


def test_the_best_single_change() -> None:
    """Every neighbour is a call of its own; those that do not fit say why."""
    request = build({})
    why = explain_why(request)
    assert (
        why.best is not None and why.best.change == "correction=inline" and why.interval is not None
    )
    assert why.error is not None and 0 < why.gain <= why.error
    for found in why.neighbours:
        if found.seconds is None:
            assert found.refused and found.speedup is None
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                build({found.setting: found.value}).predict()
        else:
            again = build({found.setting: found.value}).predict().seconds
            assert found.seconds == again and found.refused == ""
    assert why.refused and "tile_n=160" in {found.change for found in why.refused}


@pytest.mark.parametrize("asked", [{}, {"pass": "bwd"}, {"machine": "h200"}], ids=str)
def test_neighbours_differ_in_one_choice(asked: dict[str, str]) -> None:
    """None is the call itself, none changes what is computed, none comes twice."""
    request = build(asked)
    found = list(choices(request))
    assert found and len(set(found)) == len(found)
    assert not {"tau", "exp2_degree", "deterministic", "design"} & {name for name, _ in found}
    for name, value in found:
        try:
            changed = build({**asked, name: value}).pipeline
        except (ValueError, TypeError):
            continue
        assert changed != request.pipeline
        assert read_choice(changed, name)[1] != read_choice(request.pipeline, name)[1]
        assert isinstance(changed, BackwardPipeline) == ("pass" in asked)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_hbm_bound_calls_wait_for_their_loads(direction: str) -> None:
    """HBM is busy and limits; the tensor core's role waits for tiles that loads fill."""
    request = build({**HBM_BOUND, "pass": direction})
    prediction = request.predict()
    assert prediction.hbm_busy > 0.99 and prediction.bound_by == "hbm"
    assert max(prediction.unit_busy.values()) < 0.2
    waits = prediction.role_stalls["mma"]
    loads = sum(share for name, share in waits.items() if name[:2] in ("kv", "q_", "q0", "do"))
    assert loads > 0.8
    found = elasticities(request)
    assert limited_by(found) == "hbm"
    assert found.rows[0].value == pytest.approx(1.0, abs=0.01)


def test_time_alone_is_the_predictions() -> None:
    """Where waits are of no interest."""
    for asked in ({}, {"pass": "bwd"}, HBM_BOUND):
        r = build(asked)
        assert call_seconds(r.problem, r.pipeline, r.machine, r.simulation) == r.predict().seconds


def test_progress_reaches_its_end() -> None:
    """It is told before how many simulations there will be."""
    seen: list[tuple[int, int]] = []
    found = measure(lambda m: m.costs.launch_ns + 1.0, B200, lambda *x: seen.append(x))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (found.simulations, found.simulations)
    assert SimpleNamespace(total={total for _, total in seen}).total == {found.simulations}


@pytest.mark.parametrize("speedup", [None, 0.5, 1.0, 1.0005])
def test_neighbours_that_gain_nothing_are_not_best(speedup: float | None) -> None:
    """Nor those that differ by less than is called equal."""
    other = Neighbour(setting="tile_n", value="96", seconds=1.0, speedup=speedup)
    found = Why(elasticities=None, chain=None, neighbours=(other,), error=None)  # type: ignore[arg-type]
    assert found.best is None and found.gain == 0.0
    better = replace(found, neighbours=(replace(other, speedup=1.25), other))
    assert better.best == better.neighbours[0] and better.gain == 0.25


def test_the_error_of_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half too much over half too little is three times the truth; unmeasured, it is unknown."""
    for accuracy, error in (({"worst": 0.5, "ratio": 2.0}, 2.0), ({}, None)):
        monkeypatch.setattr(why_module, "known_accuracy", lambda request, known=accuracy: known)
        assert why_module.ratio_error(build({})) == error
