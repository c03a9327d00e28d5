"""The compiled Hopper backward kernel is its plan: steps as traced, counts and registers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.compiled.backward import compile_warpgroup_backward
from fa4.inspect.codegen import read_kernels
from fa4.inspect.products import KernelProducts, count_beside, read_products
from fa4.kit.units import MMA_DEPTH
from fa4.plan.schema import Arrive, Loop, Wait
from fa4.plan.warpgroup_backward import dq_columns
from fa4.sm90.backward import consumer
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from tests.sm90.test_plan_trace import init_counts, signalled
from tests.sm100.altered import Edit, put_in_place

SPECS: dict[str, dict[str, Any]] = {
    "wide": {"head_dim": 128, "head_dim_v": 128, "causal": True, "deterministic": True},
    "plain": {"head_dim": 104, "head_dim_v": 128, "deterministic": True},
    "narrow": {"head_dim": 64, "head_dim_v": 64},
    "capped": {"head_dim": 128, "head_dim_v": 128, "causal": True, "softcap": True},
    "parts": {"head_dim": 72, "head_dim_v": 128, "causal": True, "key_parts": True},
    "packed": {"head_dim": 48, "head_dim_v": 120, "packed_q": True, "packed_k": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "parts": {"key_parts": True},
    "in order": {"deterministic": True},
    "packed": {"packed_q": True, "packed_k": True, "causal": True},
    "window": {"window_left": True, "window_right": True},
}  # fmt: skip
# Each product is in the code twice: in the loop, and before it or behind it. S is in both.
LOOPS, OF_SCORES = 2, 3


@dataclass(frozen=True)
class TracedGradients:
    """A compiled spec and its steps, (role, Wait or Arrive), in the order of the code."""

    spec: WarpgroupBackwardSpec
    compiled: Any
    steps: list[tuple[str, Wait | Arrive]]


@pytest.fixture(scope="module", params=SPECS)
def traced(request: pytest.FixtureRequest) -> TracedGradients:
    spec = WarpgroupBackwardSpec(**SPECS[request.param])
    steps: list[tuple[str, Wait | Arrive]] = []
    return TracedGradients(spec, compile_warpgroup_backward(spec, trace=steps), steps)


def check_steps(spec: WarpgroupBackwardSpec, steps: list[tuple[str, Wait | Arrive]]) -> None:
    """Each role's, in the order of its program.

    The load warp's loop has the first Q and dO in it, which the plan names apart: so the next work
    tile's Q is at its start.
    """
    for role in spec.plan.roles:
        found = [step for name, step in steps if name == role.name]
        program = (*role.prologue, *role.program)
        wanted = signalled(program)
        if role.name == "load":
            once = signalled([step for step in program if not isinstance(step, Loop)])
            queries = [step for step in once if step.signal in ("q_empty", "q_full")]
            wanted = once[: -len(queries) // 2]
        assert found == wanted, role.name
    assert {name for name, _ in steps} == {role.name for role in spec.plan.roles}


def test_steps_are_the_plans(traced: TracedGradients) -> None:
    check_steps(traced.spec, traced.steps)


@pytest.mark.parametrize("number", [0, 9, -1])
def test_a_step_that_is_missing_is_seen(traced: TracedGradients, number: int) -> None:
    del (shorter := list(traced.steps))[number]
    with pytest.raises(AssertionError):
        check_steps(traced.spec, shorter)


def test_counts_registers_and_products_are_the_plans(traced: TracedGradients) -> None:
    """Arrive counts, register budgets, threads and shapes of wgmma; nothing is spilled."""
    plan, pipeline = traced.spec.plan, traced.spec.pipeline
    ptx = traced.compiled.artifacts.PTX
    counts = [s.arrive_count for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    assert sorted(init_counts(ptx)) == sorted(counts)
    budgets = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    assert set(budgets) == {role.registers for role in plan.roles} | set(plan.idle_warps.values())
    assert f".reqntid {plan.warps * 32}" in ptx
    shapes = Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx))
    m, (d, dv) = pipeline.tile_m, pipeline.product_dims
    products = ((m, dv), (d, m), (dv, m), (dq_columns(pipeline), pipeline.tile_n))
    wanted = Counter({str(m): OF_SCORES * (d // MMA_DEPTH)})
    for columns, depth in products:
        wanted[str(columns)] += LOOPS * (depth // MMA_DEPTH)
    assert shapes == wanted
    cubin = traced.compiled.artifacts.CUBIN
    for code in read_kernels(cubin):
        assert code.resources.stack_bytes == code.resources.frame_bytes == 0
    for products in read_products(cubin, ptx).values():
        assert products.instructions == products.ptx_instructions
        assert products.groups == products.ptx_groups and not products.wait
        assert products.late <= products.ptx_exponentials / 2  # none but of the first step
        assert not products.by_threads


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_of_all_head_dims_run_beside_one_another(variant: str) -> None:
    """None of them ptxas computes one after the other (its message C7518)."""
    found = set()
    for head_dim in range(8, 129, 8):
        spec = WarpgroupBackwardSpec(head_dim=head_dim, head_dim_v=head_dim, **VARIANTS[variant])
        artifacts = compile_warpgroup_backward(spec).artifacts
        if any(one.wait for one in read_products(artifacts.CUBIN, artifacts.PTX).values()):
            found.add(head_dim)
    assert not found


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        read_products(b"", "")


def test_kernels_without_machine_code_do_not_wait() -> None:
    assert not KernelProducts(0, 0, 64, 10).wait and KernelProducts(64, 64, 64, 10).wait
    assert not KernelProducts(64, 10, 64, 10).wait and not KernelProducts(5, 5, 5, 5).wait
    assert KernelProducts(0, 0, 64, 10, 0, 32).late == 0
    assert KernelProducts(64, 10, 64, 10, 2, 32).late == 30


@given(st.lists(st.sampled_from(("product", "wait", "exponential"))))
def test_an_exponential_beside_a_product_is_one_of_a_wait_behind(steps: list[str]) -> None:
    """Moved behind that wait it counts no longer; waits that follow one another are like one."""
    names = {step[0]: step for step in steps} | {"p": "product"}
    text, found = "".join(step[0] for step in steps), count_beside(steps)
    assert found == sum(len(one) - 1 for one in re.findall("e+w", text))
    assert count_beside([x for step in steps for x in [step] * (1 + (step == "wait"))]) == found
    assert count_beside(names[x] for x in re.sub("(e+)w", r"w\1p", text)) == 0


def test_too_many_products_under_way_are_seen(tmp_path: Path) -> None:
    """Planted: dP starts before dQ is done, for which a thread has not the registers."""
    start = """    signals.wait("do_full", ring)
    if first:
        signals.wait("v#_full", once)
    dp = products.upstream(ring.slot)
    signals.arrive("dp#_done", after="tensor")
"""
    edits = [
        Edit(consumer, start, ""),
        Edit(consumer, '    signals.wait("s#_done")\n', start + '    signals.wait("s#_done")\n'),
        Edit(consumer, "wait_products(0 if first else 1, s)", "wait_products(1 + (not first), s)"),
        Edit(consumer, "wait_products(0, dq)", "wait_products(1, dq)"),
    ]
    spec = WarpgroupBackwardSpec(head_dim=64, head_dim_v=64)
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(edits, tmp_path, patch)
        compiled = compile_warpgroup_backward(spec)
    products = read_products(compiled.artifacts.CUBIN, compiled.artifacts.PTX)
    assert any(one.wait for one in products.values())
