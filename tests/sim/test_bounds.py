"""Rooflines: the paper's numbers, no run below them, and ideal pipelines exactly on them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4 import cli
from fa4.commands import roofline as command
from fa4.commands.predict import describe
from fa4.config import (
    BackwardConfig,
    BackwardPipeline,
    Exp2Split,
    ForwardConfig,
    ForwardPipeline,
    Problem,
    WarpgroupPipeline,
)
from fa4.designs import plan_of
from fa4.hardware import B200, H200, Gpu
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.plan.schema import PipelinePlan, Work
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim import engine
from fa4.sim.code import EventCode
from fa4.sim.cost_table import CostTable
from fa4.sim.costs import MachineCosts
from fa4.sim.elasticity import UNIT_RATES
from fa4.sim.lower import lower
from fa4.sim.machine import Machine, find_machine
from fa4.sim.options import build
from fa4.sim.predict import Simulation, predict
from fa4.sim.roofline import RooflineTerms, problem_roofline, roofline_terms
from tests.plan.plans import edit_role
from tests.sim.strategies import backward_pipelines, forward_pipelines, machines

EXAMPLES = settings(max_examples=60)
SHARES = {"rescale_rate": 0.25}
PAIR = BackwardPipeline(numerics=BackwardConfig(cta_group=2))
PUBLISHED = replace(PAIR, published=True)


def forward(q_tiles: int = 2, frequency: int = 0, **options: object) -> ForwardPipeline:
    """A forward pipeline on 128-row Q tiles with some exponentials emulated."""
    numerics = ForwardConfig(q_tiles=q_tiles, exp2=Exp2Split(frequency=frequency))
    return ForwardPipeline(numerics=numerics, **options)  # type: ignore[arg-type]


def make_plan(pipeline: ForwardPipeline | BackwardPipeline, gpu: Gpu = B200) -> PipelinePlan:
    """The plan of either kind of pipeline."""
    if isinstance(pipeline, ForwardPipeline):
        return forward_plan(pipeline, gpu)
    return backward_plan(pipeline, gpu)


def terms_of(pipeline: ForwardPipeline | BackwardPipeline) -> RooflineTerms:
    """The paper's units of a pipeline on B200."""
    return roofline_terms(make_plan(pipeline), find_machine("b200"), paper=True)


def test_the_papers_forward_tables() -> None:
    """128 x 128 x 128: 1024, 768 and 1024 cycles; with two Q tiles twice that."""
    one, two = terms_of(forward(1)), terms_of(forward(2))
    assert one.terms["tensor"] == {"PV": 512, "QK": 512}
    assert one.terms["smem"] == {"QK A": 256, "QK B": 256, "PV B": 256}
    assert one.totals == {"tensor": 1024, "smem": 768, "mufu": 1024}
    assert two.totals == {"tensor": 2048, "smem": 1536, "mufu": 2048}
    assert (two.bound, two.bound_by, two.tensor_share) == (2048, "tensor", 1.0)


def test_the_papers_backward_tables() -> None:
    """2560, 3328 and 1024 cycles in one CTA; 2688 of shared memory in a pair; term by term."""
    one, pair = terms_of(BackwardPipeline(published=True)), terms_of(PUBLISHED)
    operands = ("S A", "S B", "dP A", "dP B", "dV B", "dK B", "dQ A", "dQ B")
    assert one.terms["smem"] == dict.fromkeys(operands, 256) | {
        "write dS": 256, "write dQ": 512, "add dQ": 512,
    }  # fmt: skip
    assert one.totals == {"tensor": 2560, "smem": 3328, "mufu": 1024}
    assert one.bound_by == "smem" and one.bound / 2560 == 1.3
    assert pair.terms["smem"] == {
        "S A": 256, "S B": 128, "dP A": 256, "dP B": 128, "dV B": 128, "dK B": 128,
        "dQ A": 256, "dQ B": 256, "write dS": 256, "push dS": 384, "write dQ": 256, "add dQ": 256,
    }  # fmt: skip
    assert pair.totals == {"tensor": 2560, "smem": 2688, "mufu": 1024}


def test_our_backward_tables() -> None:
    """The same of shared memory in one CTA; 128 less in a pair, whose dS goes straight over."""
    one, pair = terms_of(BackwardPipeline()), terms_of(PAIR)
    assert one.totals == {"tensor": 2560, "smem": 3328, "mufu": 1024}
    assert pair.totals == {"tensor": 2560, "smem": 2560, "mufu": 1024}
    assert pair.terms["smem"]["write dS"] == 128


@given(
    st.sampled_from((64, 96, 128)),
    st.sampled_from((64, 96, 128)),
    st.integers(1, 2),
    st.just(0) | st.integers(4, 32),
)
def test_the_papers_formulas(dim: int, tile_n: int, q_tiles: int, frequency: int) -> None:
    """4 M N d / 8192, (1 - emulated) M N / 16, and the operands' bytes / 128 for any tile."""
    split = Exp2Split(frequency=frequency)
    numerics = ForwardConfig(q_tiles=q_tiles, tile_n=tile_n, exp2=split)
    totals = terms_of(ForwardPipeline(head_dim=dim, numerics=numerics)).totals
    rows = 128 * q_tiles
    assert totals["tensor"] == pytest.approx(4 * rows * tile_n * dim / 8192)
    assert totals["mufu"] == pytest.approx((1 - split.share(tile_n)) * rows * tile_n / 16)
    operands = 128 * dim + 2 * tile_n * dim  # Q, K and V of one Q tile
    assert totals["smem"] == pytest.approx(q_tiles * operands * 2 / 128)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_a_step_of_warpgroups_has_two_products_each(consumers: int, ahead: bool) -> None:
    """4 x rows x keys x head dim operations, whether or not the next work tile begins ahead."""
    pipeline = WarpgroupPipeline(consumers=consumers, tile_n=80, ping_pong=False, ahead=ahead)
    plan, machine = warpgroup_plan(pipeline, H200), find_machine("h200")
    assert "following" in str(plan.roles[0].program) or not ahead
    totals = roofline_terms(plan, machine, paper=True).totals
    assert totals["tensor"] == 4 * 64 * consumers * 80 * 128 / H200.mma_flops_per_clk
    assert totals["mufu"] == 64 * consumers * 80 / H200.exp_per_clk


def test_problem_roofline() -> None:
    """All steps at the step's bound, spread over the chip; never slower than the simulation."""
    machine = find_machine("b200")
    problem = Problem(batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_k=16, head_dim=128)
    backwards = (BackwardPipeline(), PAIR, PUBLISHED)
    for pipeline in (forward(), forward(frequency=10, cta_group=2), *backwards):
        bound = problem_roofline(problem, pipeline, machine)
        predicted = predict(problem, pipeline, machine, Simulation(rescale_rate=0.0))
        assert 0.55 * predicted.seconds < bound.seconds < predicted.seconds
        assert bound.tflops > predicted.tflops
    bound = problem_roofline(problem, forward(), machine)
    assert bound.steps == 16 * 32 * 64
    assert bound.step.bound >= 2048
    cycles = bound.steps * bound.step.bound / 148
    assert bound.seconds == pytest.approx(cycles / 1.85e9, rel=1e-12)
    assert bound.seconds == max(bound.unit_seconds.values())  # no pass before or after it
    tiny = replace(problem, seqlen_k=1)
    assert problem_roofline(tiny, forward(), machine).bound_by in ("tensor", "hbm")


def lowered(plan: PipelinePlan, machine: Machine) -> EventCode:
    """Event code at a fixed rate of rescaling."""
    costs = MachineCosts(machine.gpu, machine.costs, plan=plan)
    return lower(plan, costs.work, costs.signal, SHARES)


@EXAMPLES
@given(
    st.one_of(forward_pipelines(), backward_pipelines()),
    machines(),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_no_run_beats_its_bound(
    pipeline: ForwardPipeline | BackwardPipeline, machine: Machine, plain: int, masked: int
) -> None:
    """n steps take at least n times the busiest unit's cycles, whatever the machine.

    That holds for the paper's units, and one step less for all others: the first rescale and the
    first loads are outside the loops.
    """
    plan, steps = make_plan(pipeline), plain + masked
    code = lowered(plan, machine)
    end = engine.execute(code, np.array([[steps, masked, plain]])).end
    rounding = 1 - 1e-9
    assert end >= steps * roofline_terms(plan, machine).bound * rounding
    every = roofline_terms(plan, machine, units=code.unit_names, shares=SHARES)
    assert end >= (steps - 1) * every.bound * rounding


FAST = 2**60


def ideal_machine(mma: int, exp: int, smem: int) -> Machine:
    """Three units that take time, and nothing else.

    - every latency, issue, wait, arrival and barrier costs nothing: what remains is occupancy;
    - the rates of all other units (vector pipes, issue slots, tensor-memory ports, TMA, reduction)
      are 2^60: with the fitted vector_efficiency of 0.6, FMA and issue slots would share the bound;
    - shared memory has room for any number of stages, so that loads are never late.
    """
    gpu = replace(
        B200,
        mma_flops_per_clk=mma,
        exp_per_clk=exp,
        smem_bytes_per_clk=smem,
        fma_lanes_per_clk=FAST,
        l2_bytes_per_s=FAST * 1e12,
        hbm_bytes_per_s=FAST * 1e12,
        smem_bytes_per_cta=2**24,
        smem_bytes_per_sm=2**24,
    )
    figures = {item.name: 0.0 for item in fields(CostTable) if item.name.endswith("_cycles")}
    figures |= {item.name: FAST for item in fields(CostTable) if item.name.endswith("_per_clk")}
    free = dict.fromkeys(("launch_ns", "fill_port_share", "exp_issue_slots"), 0.0)
    return Machine(gpu=gpu, costs=CostTable(vector_efficiency=1.0, **free, **figures))


def without_statistics(plan: PipelinePlan) -> PipelinePlan:
    """The plan without the few bytes of alpha, which the paper's budgets leave out."""
    for i in (0, 1):
        name = f"softmax{i}"
        if any(role.name == name for role in plan.roles):
            plan = edit_role(plan, name, lambda step, i=i: (
                () if isinstance(step, Work) and step.what == f"write alpha {i}" else (step,)
            ))  # fmt: skip
    return plan


def period(plan: PipelinePlan, machine: Machine) -> float:
    """Cycles of a step once the pipeline has settled."""
    code = lowered(plan, machine)
    first, last = (engine.execute(code, np.array([[n, 0, n]])).end for n in (64, 184))
    return (last - first) / 120


@pytest.mark.parametrize("mma", [4096, 8192, 16384])
@pytest.mark.parametrize("exp", [8, 16, 32])
@pytest.mark.parametrize("smem", [64, 128, 256])
def test_ideal_forward_runs_at_its_roofline(mma: int, exp: int, smem: int) -> None:
    """Ping-pong hides everything but the busiest unit, be it MMA, shared memory or exponentials.

    No head start of P is needed (split_p 1 does as well), nor emulation: where MMA and exponentials
    tie at 2048 cycles, the softmax of one Q tile takes exactly as long as the products of the
    other. The few bytes of alpha, beside the operands, would add as many cycles to the softmax.
    """
    machine = ideal_machine(mma, exp, smem)
    for frequency in (0, 10):
        for split_p in (0.75, 1.0):
            pipeline = forward(frequency=frequency, kv_stages=16, split_p=split_p)
            plan = without_statistics(forward_plan(pipeline, machine.gpu))
            assert period(plan, machine) == roofline_terms(plan, machine).bound


@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_ideal_backward_runs_at_its_roofline(cta_group: int, dim: int) -> None:
    """Shared memory binds the backward pass, at the paper's 3328 and 2688 cycles to the cycle."""
    machine = ideal_machine(8192, 16, 128)
    numerics = BackwardConfig(cta_group=cta_group)
    pipeline = BackwardPipeline(head_dim=dim, numerics=numerics, published=True)
    plan = backward_plan(pipeline, machine.gpu)
    bound = roofline_terms(plan, machine)
    assert bound.bound_by == "smem"
    assert period(plan, machine) == bound.bound


def test_ideal_pipelines_without_overlap_add_up() -> None:
    """Without a second Q tile, products and softmax alternate; a split P overlaps its last quarter.

    One tile: 1024 of products + 1024 of exponentials; P's head start saves a quarter of the
    exponentials. Two tiles without ping-pong: both products wait for both softmaxes, of which the
    second overlaps the first PV only.
    """
    machine = ideal_machine(8192, 16, 128)

    def cycles(**options: object) -> float:
        plan = forward_plan(forward(kv_stages=16, **options), machine.gpu)  # type: ignore[arg-type]
        return period(without_statistics(plan), machine)

    assert cycles(q_tiles=1, split_p=1.0) == 1024 + 1024
    assert cycles(q_tiles=1, split_p=0.75) == 1024 + 1024 - 256
    assert cycles(q_tiles=2, split_p=1.0, ping_pong=False) > 2048
    assert cycles(q_tiles=2, split_p=1.0, ping_pong=True) == 2048


def test_each_idealisation_is_needed() -> None:
    """Taking back any one of them makes the ideal forward pipeline slower than its roofline.

    With split_p 1: P's head start would absorb a delay of up to 256 cycles.
    """
    ideal = ideal_machine(8192, 16, 128)
    plan = forward_plan(forward(kv_stages=16, split_p=1.0), ideal.gpu)
    for figure, value in (
        ("mma_latency_cycles", 136.0),
        ("tmem_load_latency_cycles", 115.0),
        ("mbarrier_wait_cycles", 30.0),
        ("mbarrier_arrive_cycles", 20.0),
        ("issue_per_clk", 4.0),
        ("alu_lanes_per_clk", 64.0),
        ("tmem_load_bytes_per_clk", 512.0),
    ):
        real = replace(ideal, costs=replace(ideal.costs, **{figure: value}))
        assert period(plan, real) > 2048, figure


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 roofline <arguments>`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["roofline", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", ("doctor", "roofline"))


def test_command_prints_the_four_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Totals and what bounds each kernel."""
    code, out, _ = run(capsys)
    assert code == 0
    assert out.count("tensor core") >= 4
    assert "bound by shared memory, 30% over the products" in out
    assert "CTA pair, kernel published: bound by shared memory, 5% over the products" in out


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers for machines; options choose one kernel."""
    code, out, _ = run(capsys, "--json", "--head-dim", "64", "--emulated-frequency", "16")
    report = json.loads(out)
    assert code == 0 and report["schema_version"] == 1 and report["machine"] == "B200"
    (kernel,) = report["kernels"]
    assert kernel["tile"] == [256, 128, 64] and kernel["emulated_share"] == 0.125
    loads = 256 * CostTable().fill_port_share
    assert kernel["totals"].pop("tensor") > 1024  # products wait for operands beside loads
    assert kernel["totals"] == pytest.approx({"smem": 776 + loads, "mufu": 1792})
    assert kernel["bound_by"] == "mufu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pass", "sideways"), "pass must be forward or backward; got 'sideways'"),
        (("--pass", "backward", "--q-tiles", "2"), "q_tiles is for the forward pass; got 2"),
        (("--kernel", "published"), "kernel is for the backward pass; got 'published'"),
        (
            ("--pass", "backward", "--kernel", "x"),
            "kernel must be one of blackwell, published; got",
        ),
        (("--figure", "x.pdf"), "figure must end in .png or .svg; got 'x.pdf'"),
        (("--machine", "abacus"), "machine must be a .toml file or one of"),
        (("--tile-n", "256"), "TMEM plan needs 768 columns"),
    ],
)
def test_command_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """One line, exit code 2."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_command_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    """A picture of the kind that the name says, twice the same; every term is in it."""
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        assert run(capsys, "--figure", str(path))[0] == 0
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_every_term_has_a_colour() -> None:
    """Also those of settings that the tables do not show."""
    report = command.build_report([{"pass": "forward", "cta_group": 2}], "b200")
    for unit, terms in report["kernels"][0]["terms"].items():
        assert all(command.kind_of(unit, name) in command.KINDS for name in terms)


@settings(max_examples=25)
@given(
    head_dim=st.sampled_from([64, 96, 128]),
    cta_group=st.sampled_from([1, 2]),
    frequency=st.sampled_from([0, 16, 10, 8]),
    backward=st.booleans(),
    kernel=st.sampled_from(["blackwell", "published"]),
)
def test_roofline_and_prediction_name_the_same_unit(
    head_dim: int, cta_group: int, frequency: int, backward: bool, kernel: str
) -> None:
    """Of a long call, with loads counted alike; not where two units are level."""
    asked: dict[str, object] = {"head_dim": head_dim, "cta_group": cta_group}
    if backward:
        assume(head_dim != 96 and (cta_group == 1 or head_dim == 128))
        asked |= {"pass": "bwd", "kernel": kernel}
    else:
        asked |= {"exp2_frequency": frequency}
    request = build(asked)
    plan = plan_of(request.pipeline, request.machine.gpu)
    terms = roofline_terms(plan, request.machine, units=tuple(UNIT_RATES))
    first, second = sorted(terms.totals.values())[:-3:-1]
    assume(first > 1.02 * second)
    assert terms.totals[terms.bound_by] == first
    assert request.predict().bound_by == terms.bound_by


def test_roofline_and_prediction_say_what_they_count(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's tables by its rules; asked for anything, what a prediction charges."""
    _, out, _ = run(capsys)
    figures = ("768", "1536", "3328", "2688")
    assert [figure for figure in figures if f" {figure} " in out] == list(figures)
    assert "the paper's rules: nothing for loads" in out
    _, out, _ = run(capsys, "--pass", "forward")
    assert " 1536 " not in out and "load" in out and "the paper's rules" not in out
    assert describe({"cta_group": "1"})["bound"]["by"] == "tensor"
