"""The kernel with halves is its plan: steps, counts, order of events; faults that break it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

import ml_dtypes

from fa4 import emulator
from fa4.kit.signals import named_numbers
from fa4.plan.halves import halves_numerics
from fa4.plan.schema import Arrive, PipelinePlan, Wait, Work, unroll, walk
from fa4.sm100.halves.spec import HalvesSpec
from fa4.testing.case import Case
from tests.sm100.forward_kernel import Kernel
from tests.sm100.halves_kernel import build, halves_spec, kernel
from tests.sm100.test_emulated_order import UsedSignals, expected
from tests.sm100.test_pair import SCHEDULES, attend, init_counts, is_delayed, run_edited

ROWS, TILE = 256, 128  # of a CTA's two Q tiles; of a KV tile


@pytest.fixture(scope="module")
def pair() -> Kernel:
    return build()


@pytest.fixture(scope="module")
def traced() -> tuple[Kernel, list[Any]]:
    steps: list[Any] = []
    return build(steps, cta_group=1, causal=True, scheduler="lpt"), steps


def shaped(spec: HalvesSpec, **choices: Any) -> Case:
    return Case(head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype,
                causal=spec.causal, **choices)  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pairs_of_several_work_tiles(pair: Kernel, schedule: str) -> None:
    """Two pairs with two work tiles each; the second block of rows ends in the leader's tile."""
    case = shaped(pair.spec, seqlen_q=580, seqlen_k=300, heads_k=1, group=2)
    attend(pair, case, sms=4, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ctas", [1, 2])
def test_shapes(dims: tuple[int, int], causal: bool, ctas: int) -> None:
    """Every shape of head, pairs and CTAs alone, under every schedule."""
    found = build(head_dim=dims[0], head_dim_v=dims[1], causal=causal, cta_group=ctas)
    case = shaped(found.spec, batch=2, seqlen_q=700, seqlen_k=513, heads_k=1, group=2)
    for schedule in SCHEDULES:
        attend(found, case, sms=2 * ctas, schedule=schedule)


def test_halves_change_the_order_of_sums_only(pair: Kernel) -> None:
    """A key in one half alone, and rows whose maxima are in either half."""
    q = np.ones((1, 300, 1, 128), ml_dtypes.bfloat16)
    k, v = (np.zeros((1, 129, 1, 128), ml_dtypes.bfloat16) for _ in range(2))
    k[0, 70], k[0, 128], v[0, 70], v[0, 128] = 4, 4, 1, 3
    out, lse = np.full_like(q, np.nan), np.full((1, 1, 300), np.nan, np.float32)
    emulator.launch(pair.compiled, q, k, v, out, lse, 1.0, *[None] * 3, 300, *[None] * 6, 2)
    assert np.unique(out.astype(np.float32)).tolist() == [2.0]
    np.testing.assert_allclose(lse, 512 + np.log(2), rtol=1e-6)


# The plan


def test_steps_are_the_plans(traced: tuple[Kernel, list[Any]]) -> None:
    """Role by role. A thread that waits for its own copy arrives later than the plan's copy."""
    found, steps = traced
    for role in found.spec.plan.roles:
        wanted = [s for s in walk(role.steps) if not isinstance(s, Work)]
        mine = [step for name, step in steps if name == role.name]
        if role.name == "epilogue":
            wanted.sort(key=is_delayed)
            mine.sort(key=is_delayed)
        assert mine == wanted, role.name


@pytest.mark.parametrize("ctas", [1, 2])
def test_counts_are_the_plans(ctas: int, pair: Kernel, traced: Any) -> None:
    """Arrive counts, registers, tensor memory, bytes and named barriers in the PTX."""
    found = pair if ctas == 2 else traced[0]
    plan, ptx = found.spec.plan, str(found.compiled.artifacts.PTX)
    counts = [s.arrive_count for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    assert sorted(init_counts(ptx)) == sorted(counts)
    budgets = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert budgets == {role.registers for role in plan.roles} == {104, 64}
    assert plan.bytes_used("tmem") == 512
    assert set(re.findall(r"cta_group::\d", ptx)) == {f"cta_group::{ctas}"}
    assert sorted(named_numbers(plan).values()) == [1, 3, 5, 7]  # two stages each
    mbarriers = len(counts)
    assert max(int(n) for n in re.findall(r"\+(\d+)\]", ptx)) <= plan.bytes_used("smem")
    assert plan.buffer("barriers").size >= 8 * (mbarriers + 1)


def test_every_warp_follows_its_program(traced: tuple[Kernel, list[Any]]) -> None:
    """Four CTAs with a work tile each, every role."""
    found, _ = traced
    spec = found.spec
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 400, 1, 128)).astype(ml_dtypes.bfloat16)
    out, lse = np.zeros_like(q), np.zeros((2, 1, 400), np.float32)
    recorder = UsedSignals(spec.plan)
    arguments = (q, q, q, out, lse, 0.1, *[None] * 3, 400, *[None] * 6, 1)
    emulator.launch(found.compiled, *arguments, events=recorder)
    checked = 0
    for cta, block in enumerate((1, 1, 0, 0)):  # the longest first
        for role in spec.plan.roles:
            number = int(role.name[-2]) if role.name.startswith("softmax") else 0
            want = list(expected(spec.plan, role, [trips(block, number)]))
            for warp in role.warps:
                got = recorder.events[cta, warp]
                if role.name == "epilogue":  # one store waits while the other runs
                    want, got = sorted(want), sorted(got)
                assert sorted(got) == sorted(want), (cta, role.name)
                assert got == want or role.name == "epilogue", (cta, role.name)
                checked += len(want)
    assert checked > 1000


def trips(block: int, tile: int) -> dict[str, int]:
    """Trips of a Q tile of a block of 256 rows, of 400 keys under a causal mask."""
    stop = min(-(-(block + 1) * ROWS // TILE), -(-400 // TILE))
    whole = min((block * ROWS + tile * TILE + 1) // TILE, 400 // TILE, stop)
    return {"kv_tiles": stop, "masked_tiles": stop - whole, "plain_tiles": whole}


def test_maxima_are_exchanged_once_more_than_there_are_tiles() -> None:
    """The last exchange is of sums: named barriers have phases of their own."""
    plan: PipelinePlan = halves_spec("plain").plan
    role = plan.role("softmax1b")
    steps = list(unroll(role.program, {"kv_tiles": 3, "masked_tiles": 1, "plain_tiles": 2}))
    assert steps.count(Arrive("max1b_full")) == steps.count(Wait("max1a_full")) == 4


# Planted faults


def test_a_fifth_warpgroup_leaves_no_120_registers(pair: Kernel) -> None:
    """What a plan of 4 x 120 + 32 would do: it waits for ever."""
    case = shaped(pair.spec, seqlen_q=300, seqlen_k=130)
    ptx = str(pair.compiled.artifacts.PTX)
    pattern = r"(setmaxnreg\.inc\.sync\.aligned\.u32\s+)104"
    assert re.search(pattern, ptx)
    with pytest.raises(emulator.EmulationFailed) as failure:
        attend(pair, case, sms=2, executor=partial(run_edited, pattern, r"\g<1>120"))
    assert {found.kind for found in failure.value.report.findings} == {"deadlock"}
    assert "setmaxnreg.inc to 120" in str(failure.value)


def test_specs_are_checked() -> None:
    """What such a kernel has not, with the value."""
    with pytest.raises(
        ValueError, match="scheduler must be static, lpt or naive with halves; got 'clc'"
    ):
        HalvesSpec(head_dim=128, head_dim_v=128, scheduler="clc")
    numerics = halves_numerics("bf16", 128, False, emulate=True)
    assert kernel("plain").spec.numerics == numerics
