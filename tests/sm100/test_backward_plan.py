"""The compiled backward kernel is its plan: steps as traced, counts in the PTX, events of a run."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass")

from fa4.inspect.codegen import launch_smem_bytes
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Program, Role, Wait, Work, walk
from fa4.sm100.backward.spec import BackwardSpec
from fa4.testing import Case
from tests.sm100.backward_kernel import BackwardKernel, build
from tests.sm100.backward_tiles import meetings
from tests.sm100.forward_kernel import make_inputs
from tests.sm100.test_backward_tiles import Sequence
from tests.sm100.test_emulated_order import UsedSignals, expected
from tests.sm100.test_pair import init_counts

SPECS: dict[str, dict[str, Any]] = {
    "d128": {"head_dim": 128, "head_dim_v": 128, "window_left": True},
    "d64, causal, fixed order": {
        "head_dim": 64, "head_dim_v": 64, "causal": True, "deterministic": True, "used_k": True,
    },
    "pair": {"head_dim": 128, "head_dim_v": 128, "cta_group": 2, "causal": True},
    "wide pair": {"head_dim": 192, "head_dim_v": 128, "cta_group": 2, "deterministic": True},
}  # fmt: skip
ROWS, KEYS, GROUP = 300, 400, 2


class Traced(NamedTuple):
    """A compiled kernel and the steps that were traced, (role, Wait or Arrive)."""

    run: BackwardKernel
    trace: list[tuple[str, Wait | Arrive]]

    @property
    def plan(self) -> PipelinePlan:
        return self.run.spec.plan

    @property
    def ptx(self) -> str:
        return str(self.run.compiled.artifacts.PTX)


@pytest.fixture(
    scope="module",
    params=[pytest.param("d128", marks=pytest.mark.slow), "d64, causal, fixed order"],
)
def traced(request: pytest.FixtureRequest) -> Traced:
    return with_trace(request.param)


def signalled(program: Program) -> list[Wait | Arrive]:
    """The waits and arrivals of a program, loop bodies once."""
    return [step for step in walk(program) if not isinstance(step, Work)]


def with_trace(name: str) -> Traced:
    trace: list[tuple[str, Wait | Arrive]] = []
    return Traced(build(BackwardSpec(**SPECS[name]), trace), trace)


def as_written(role: Role, spec: BackwardSpec) -> list[Wait | Arrive]:
    """A role's steps as its source has them.

    The load warp's first query tile is one turn of its loop, which the plan has apart as K and V
    come with it; what is loaded only once stands before. The compute warps have the masked loop
    once more where a window ends.
    """
    steps = signalled(role.steps)
    loops = [step for step in role.program if isinstance(step, Loop)]
    if role.name == "load":
        (loop,) = loops
        body = signalled(loop.body)
        first = signalled(role.program)[: -len(body)]
        once = [step for step in first if step not in body]
        assert [step for step in first if step in body] == body
        return [*once, *body, *signalled(role.closing)]
    if role.name == "compute" and spec.hides_last_rows:
        masked, plain = (signalled(loop.body) for loop in loops)
        assert masked == plain
        return [*masked, *steps]
    return steps


def test_steps_are_the_plans(traced: Traced) -> None:
    for role in traced.plan.roles:
        found = [step for name, step in traced.trace if name == role.name]
        assert found == as_written(role, traced.run.spec), role.name
    assert {name for name, _ in traced.trace} == {role.name for role in traced.plan.roles}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pair", "wide pair"])
def test_steps_and_counts_of_a_pair(name: str) -> None:
    traced = with_trace(name)
    test_steps_are_the_plans(traced)
    test_counts_are_the_plans(traced)


@pytest.mark.parametrize("number", [0, 7, -1])
def test_a_step_that_is_missing_is_seen(traced: Traced, number: int) -> None:
    shorter = [step for i, step in enumerate(traced.trace) if i != number % len(traced.trace)]
    with pytest.raises(AssertionError):
        test_steps_are_the_plans(traced._replace(trace=shorter))


def test_counts_are_the_plans(traced: Traced) -> None:
    """Arrive counts, register budgets, tensor memory, shared memory and bytes of the copies."""
    plan, ptx = traced.plan, traced.ptx
    counts = [s.arrive_count for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    assert sorted(init_counts(ptx)) == sorted(counts)
    budgets = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    wanted = [role.registers for role in plan.roles] + list(plan.idle_warps.values())
    assert sorted(budgets) == sorted(wanted)
    assert f".reqntid {plan.warps * 32}" in ptx
    moved = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    (columns,) = re.findall(
        rf"tcgen05\.alloc\.cta_group::{plan.cta_group}\.sync\S+\s+\[.*\], (\S+);", ptx
    )
    assert plan.bytes_used("tmem") <= int(moved.get(columns, columns)) == 512
    (smem,) = launch_smem_bytes(str(traced.run.compiled.ir_module)).values()
    assert smem == plan.bytes_used("smem")


def test_bytes_are_the_plans(traced: Traced) -> None:
    """What each copy's barrier is told to expect: the tiles of the plan's signals."""
    plan, ptx = traced.plan, traced.ptx
    moved = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    said = re.findall(r"mbarrier\.\S*expect_tx\S*\s+(?:%rd\d+, )?\[.*\], (\S+);", ptx)
    wanted = [n for s in plan.signals for n in (s.tx_bytes, s.first_tx_bytes) if n]
    assert sorted(int(moved.get(amount, amount)) for amount in said) == sorted(wanted)


def test_every_warp_follows_its_program(traced: Traced) -> None:
    """CTAs of every number of query tiles, none included, each of their roles."""
    run, spec = traced.run, traced.run.spec
    case = Case(
        layout="packed", lengths=((ROWS, KEYS),), group=GROUP, head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v, dtype=spec.dtype, causal=spec.causal,
        window_size=(30, None) if spec.window_left else (None, None),
    )  # fmt: skip
    recorder = UsedSignals(traced.plan)
    run(make_inputs(spec, case), events=recorder, schedule="random", resident_clusters=4)
    some, every = meetings(spec, Sequence(ROWS, KEYS, 30, 0))
    blocks = -(-KEYS // 128)
    checked, trips_met = 0, set()
    for cta in range(blocks):
        block = blocks - 1 - cta if spec.deterministic and spec.hides_first_rows else cta
        tiles, whole = (int(x[:, block].sum()) * GROUP for x in (some, every))
        trips = {"q_tiles": tiles, "masked_tiles": tiles - whole, "plain_tiles": whole}
        trips_met.add(tiles)
        for role in traced.plan.roles:
            want = list(expected(traced.plan, role, [trips])) if tiles else []
            for warp in role.warps:
                assert recorder.events[cta, warp] == want, (role.name, cta)
                checked += len(want)
    assert checked > 1000 and len(trips_met) > 1
