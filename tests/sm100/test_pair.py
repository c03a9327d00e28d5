"""The forward kernel of a CTA pair, and what only (192, 128) needs, run in the emulator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4 import emulator
from fa4.compiled.forward import compile_forward
from fa4.config import ForwardConfig
from fa4.emulator.execute import run
from fa4.plan.schema import Arrive, Wait, Work, walk
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing.budget import Outputs, assert_within_budget
from fa4.testing.case import Case
from fa4.testing.layouts import build_inputs

SCHEDULES = ["fifo", "random", "adversarial"]


class Kernel(NamedTuple):
    """A compiled kernel and the steps that were traced, (role, Wait or Arrive)."""

    spec: ForwardSpec
    compiled: Any
    trace: list[tuple[str, Wait | Arrive]]

    @property
    def ptx(self) -> str:
        return str(self.compiled.artifacts.PTX)


def build(head_dim: int, head_dim_v: int, cta_group: int, **choices: Any) -> Kernel:
    trace: list[tuple[str, Wait | Arrive]] = []
    numerics = ForwardConfig.tuned("bf16", head_dim, choices.get("causal", False))
    spec = ForwardSpec(
        head_dim=head_dim, head_dim_v=head_dim_v, cta_group=cta_group, numerics=numerics, **choices
    )
    return Kernel(spec, compile_forward(spec, trace=trace), trace)


@pytest.fixture(scope="module")
def pair() -> Kernel:
    return build(128, 128, 2)


@pytest.fixture(scope="module")
def wide_pair() -> Kernel:
    """O in the place of Q, and a window whose bounds are those of both CTAs."""
    return build(192, 128, 2, window_left=True, window_right=True)


@pytest.fixture(scope="module")
def uneven() -> Kernel:
    """K and V in slots of two sizes."""
    return build(192, 128, 1, causal=True)


@pytest.fixture(params=["pair", "uneven"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.getfixturevalue(request.param)


def attend(kernel: Kernel, case: Case, *, sms: int, **options: Any) -> list[Any]:
    """One call in the emulator: its reports. The result must be within the error budget."""
    inputs = build_inputs(case)
    out = np.full_like(inputs.q, np.nan, shape=(*inputs.q.shape[:3], case.head_dim_v))
    lse = np.full((case.batch, inputs.q.shape[2], case.seqlen_q), np.nan, np.float32)
    window = [None if w is None else int(w) for w in case.window_size]
    reports = emulator.launch(
        kernel.compiled, inputs.q, inputs.k, inputs.v, out, lse, case.head_dim**-0.5, None,
        *window, case.seqlen_q, *[None] * 6, sms, **options,
    )  # fmt: skip
    assert not [finding for report in reports for finding in report.findings]
    assert_within_budget(inputs, Outputs(out, lse))
    return reports


def shaped(kernel: Kernel, **choices: Any) -> Case:
    spec = kernel.spec
    return Case(
        head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype="bf16", causal=spec.causal,
        **choices,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pair(pair: Kernel, schedule: str) -> None:
    """Two pairs with two work tiles each; the second block of rows ends in the leader's tile."""
    case = shaped(pair, seqlen_q=580, seqlen_k=300, heads_k=1, group=2)
    attend(pair, case, sms=4, schedule=schedule)


def test_wide_pair_with_a_window(wide_pair: Kernel) -> None:
    """Rows of the leader see no key of some of the KV tiles that the follower needs."""
    case = shaped(wide_pair, seqlen_q=900, seqlen_k=800, window_size=(90, 40))
    attend(wide_pair, case, sms=2, schedule="adversarial")


@pytest.mark.parametrize("seqlen_k", [129, 640])
def test_uneven_ring(uneven: Kernel, seqlen_k: int) -> None:
    """The ring comes round several times, and K and V change places in it."""
    case = shaped(uneven, seqlen_q=500, seqlen_k=seqlen_k, heads_k=1)
    attend(uneven, case, sms=1, schedule="random")


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs(dims: tuple[int, int], causal: bool) -> None:
    """Every shape of head that pairs are for, and masks that are not their default."""
    kernel = build(*dims, 2, causal=causal)
    case = shaped(kernel, batch=2, seqlen_q=700, seqlen_k=513, heads_k=1, group=2)
    for schedule in SCHEDULES:
        attend(kernel, case, sms=4, schedule=schedule)


# The plan


def test_steps_are_the_plans(kernel: Kernel) -> None:
    """Role by role. A thread that waits for its own copy arrives later than the plan's copy."""
    for role in kernel.spec.plan.roles:
        wanted = [s for s in walk(role.steps) if not isinstance(s, Work)]
        traced = [step for name, step in kernel.trace if name == role.name]
        if role.name == "epilogue":
            wanted.sort(key=is_delayed)
            traced.sort(key=is_delayed)
        assert traced == wanted


def is_delayed(step: Wait | Arrive) -> bool:
    return isinstance(step, Arrive) and step.after is not None


def test_counts_are_the_plans(kernel: Kernel) -> None:
    """Arrive counts, register budgets and tensor memory in the PTX."""
    plan, ptx = kernel.spec.plan, kernel.ptx
    counts = [s.arrive_count for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    assert sorted(init_counts(ptx)) == sorted(counts)
    budgets = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert budgets == {role.registers for role in plan.roles}
    group = f"cta_group::{kernel.spec.cta_group}"
    assert plan.bytes_used("tmem") <= 512
    assert len(re.findall(rf"tcgen05\.alloc\.{group}\b", ptx)) == 1
    assert set(re.findall(r"cta_group::\d", ptx)) == {group}


def init_counts(ptx: str) -> Iterator[int]:
    """Counts of the mbarriers: the last constant moved to the register before each init."""
    values: dict[str, int] = {}
    for line in ptx.splitlines():
        if move := re.match(r"\s*mov\.b32\s+(%r\d+), (\d+);", line):
            values[move[1]] = int(move[2])
        elif init := re.match(r"\s*mbarrier\.init\.shared\S*\s+\[.*\], (%r\d+|\d+);", line):
            yield values[init[1]] if init[1] in values else int(init[1])


# Planted faults

FAULTS = {
    # The follower never hears that its scores are there.
    "commit to the leader only": (
        "test_pair", r"mov\.b16(\s+%rs\d+), 3;", r"mov.b16\1, 1;", "deadlock"
    ),
    # A CTA that is done gives tensor memory back while others still need it.
    "no meeting at the end": (
        "test_pair", r"(?s)(.*)barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;", r"\1", "tmem"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(pair: Kernel, name: str) -> None:
    _, pattern, instead, finding = FAULTS[name]
    case = shaped(pair, seqlen_q=300, seqlen_k=130)
    with pytest.raises(emulator.EmulationFailed) as failure:
        attend(pair, case, sms=2, executor=partial(run_edited, pattern, instead))
    assert finding in {found.kind for found in failure.value.report.findings}


def run_edited(pattern: str, instead: str, launches: Any, *args: Any) -> Any:
    """The emulator, on kernels with something else in the place of `pattern`."""
    edited = []
    for launch in launches:
        text, count = re.subn(pattern, instead, launch.ptx)
        assert count
        edited.append(replace(launch, ptx=text))
    return run(edited, *args)
