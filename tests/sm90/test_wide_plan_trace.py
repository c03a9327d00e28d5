"""The compiled kernels of wide heads are their plans: steps as traced, counts and registers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.compiled.backward import compile_wide_backward
from fa4.inspect.codegen import read_kernels
from fa4.inspect.products import KernelProducts, read_products
from fa4.kit.units import MMA_DEPTH
from fa4.plan.schema import Arrive, PipelinePlan, Wait
from fa4.plan.warpgroup_wide import TILE_ROWS, WideBackwardPipeline
from fa4.plan.warpgroup_wide_queries import sums_first
from fa4.sm90.wide import products, queries_consumer
from fa4.sm90.wide.products import MOST_AHEAD
from fa4.sm90.wide.spec import WideBackwardSpec
from tests.sm90.test_plan_trace import init_counts, signalled
from tests.sm100.altered import Edit, put_in_place

SPECS: dict[str, dict[str, Any]] = {
    "widest": {"head_dim": 256, "head_dim_v": 256, "causal": True},
    "odd": {"head_dim": 216, "head_dim_v": 216},
    "uneven": {"head_dim": 192, "head_dim_v": 128, "key_parts": True, "query_parts": True},
    "packed": {"head_dim": 72, "head_dim_v": 136, "packed_q": True, "packed_k": True},
}
Steps = list[tuple[str, Wait | Arrive]]


@dataclass(frozen=True)
class TracedWide:
    """A compiled spec and the steps of both kernels, in the order of the code."""

    spec: WideBackwardSpec
    compiled: Any
    steps: Steps

    @property
    def plans(self) -> tuple[PipelinePlan, PipelinePlan]:
        """In the order of the launches."""
        return self.spec.keys_plan, self.spec.queries_plan


@pytest.fixture(scope="module", params=SPECS)
def traced(request: pytest.FixtureRequest) -> TracedWide:
    spec = WideBackwardSpec(**SPECS[request.param])
    steps: Steps = []
    return TracedWide(spec, compile_wide_backward(spec, trace=steps), steps)


def check_steps(plans: tuple[PipelinePlan, ...], steps: Steps) -> None:
    """Each role's, in the order of its program.

    A load warp's loop has the first fills in it, which the plan names apart.
    """
    roles = [role for plan in plans for role in plan.roles]
    for role in roles:
        wanted = signalled(role.steps)
        if role.name.startswith("load"):
            wanted = wanted[: len(wanted) // 2]
        assert [step for name, step in steps if name == role.name] == wanted, role.name
    assert {name for name, _ in steps} == {role.name for role in roles}


def test_steps_are_the_plans(traced: TracedWide) -> None:
    check_steps(traced.plans, traced.steps)


@pytest.mark.parametrize("number", [0, 9, 30, -1])
def test_a_step_that_is_missing_is_seen(traced: TracedWide, number: int) -> None:
    del (shorter := list(traced.steps))[number]
    with pytest.raises(AssertionError):
        check_steps(traced.plans, shorter)


def test_counts_registers_and_products_are_the_plans(traced: TracedWide) -> None:
    """Arrive counts, register budgets, threads and shapes of wgmma; nothing is spilled."""
    pipeline, ptx = traced.spec.pipeline, traced.compiled.artifacts.PTX
    signals = [signal for plan in traced.plans for signal in plan.signals]
    counts = [s.arrive_count for s in signals for _ in range(s.stages) if s.kind == "mbarrier"]
    made = [count for kernel in ptx.split(".entry") for count in init_counts(kernel)]
    assert sorted(made) == sorted(counts)
    budgets = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    for plan in traced.plans:
        assert {r.registers for r in plan.roles} | set(plan.idle_warps.values()) == budgets
        assert f".reqntid {plan.warps * 32}" in ptx
    shapes = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx))
    columns = (TILE_ROWS, pipeline.tile_n, *pipeline.sum_dims)
    assert shapes == set(map(str, columns))
    artifacts = traced.compiled.artifacts
    for code in read_kernels(artifacts.CUBIN):
        assert code.resources.stack_bytes == code.resources.frame_bytes == 0
    found = read_products(artifacts.CUBIN, artifacts.PTX).values()
    assert sum(x.instructions > 0 for x in found) == 2
    assert not any(x.wait for x in found)
    assert sum(x.by_threads for x in found) <= computed_by_threads(pipeline)
    assert sum(x.late for x in found) <= most_late(pipeline)
    if sums_first(pipeline):
        assert sum(x.exponentials for x in found) == pipeline.tile_n  # of dQ's steps


def most_late(pipeline: WideBackwardPipeline) -> int:
    """Exponentials behind the wait for dP: half of dQ's where nothing holds them before it."""
    return 0 if sums_first(pipeline) else pipeline.tile_n // 2


def computed_by_threads(pipeline: WideBackwardPipeline) -> int:
    """Kernels whose descriptors threads may compute: dQ's, of 11 or 12 steps (see MOST_AHEAD)."""
    return int(10 * MMA_DEPTH < max(pipeline.depths) <= MOST_AHEAD * MMA_DEPTH)


def altered(*edits: Edit, head_dim: int, folder: Path) -> list[KernelProducts]:
    """Of the kernels with these edits."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(edits, folder, patch)
        compiled = compile_wide_backward(WideBackwardSpec(head_dim=head_dim, head_dim_v=head_dim))
    found = read_products(compiled.artifacts.CUBIN, compiled.artifacts.PTX)
    return [one for one in found.values() if one.instructions]


@pytest.mark.parametrize("head_dim", [208, 256])
def test_exponentials_behind_a_wait_are_seen(head_dim: int, tmp_path: Path) -> None:
    """Planted: nothing holds those of dQ's kernel before the wait for dP."""
    edit = Edit(queries_consumer, "hold_before(p)", "pass")
    assert max(one.late for one in altered(edit, head_dim=head_dim, folder=tmp_path)) > 24


def test_descriptors_of_threads_are_seen(tmp_path: Path) -> None:
    """Planted: those of all steps are computed before the first product."""
    edit = Edit(products, "MOST_AHEAD = 12", "MOST_AHEAD = 99")
    assert all(one.by_threads for one in altered(edit, head_dim=256, folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_products_of_all_head_dims_run_beside_one_another(causal: bool) -> None:
    """And exponentials beside them, or half of them; threads compute descriptors of 12 steps."""
    for head_dim in range(136, 257, 8):
        spec = WideBackwardSpec(head_dim=head_dim, head_dim_v=head_dim, causal=causal)
        artifacts = compile_wide_backward(spec).artifacts
        found = read_products(artifacts.CUBIN, artifacts.PTX).values()
        assert not any(one.wait for one in found), head_dim
        moved = sum(one.by_threads for one in found)
        assert moved <= computed_by_threads(spec.pipeline), head_dim
        assert sum(one.late for one in found) <= most_late(spec.pipeline), head_dim


def test_both_kernels_may_run_at_once(traced: TracedWide) -> None:
    """The second is launched early, and does not end before the first: launches behind it are
    ordinary ones, which wait for it alone."""
    keys, queries = traced.compiled.artifacts.PTX.split(".entry")[2:4]
    early, end = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    assert early in keys and end not in keys
    assert early not in queries  # behind the kernel of the row statistics
    assert queries.index(end) > queries.rindex("cp.async.bulk.tensor.4d.shared")
