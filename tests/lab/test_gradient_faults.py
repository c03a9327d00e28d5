"""Planted faults that survive in Hopper's gradients: each has a reason."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from lab.benchmarks.emulated_kernels import capture
from lab.benchmarks.gradient_faults import waits_for
from lab.benchmarks.wide_gradient_faults import arrivals_at
from lab.records import read_record

PLAN = WarpgroupBackwardSpec(head_dim=64, head_dim_v=64).plan


@pytest.mark.parametrize("record", ["gradient_faults", "wide_gradient_faults"])
def test_every_survivor_is_explained(record: str) -> None:
    """As docs/hopper.md says."""
    kernels = read_record(record)["kernels"]
    survivors = [one for kernel in kernels for one in kernel["survivors"]]
    assert survivors
    assert not [one for one in survivors if one["why"] == "not explained"]


@pytest.mark.parametrize("name", ["work_full", "q_empty", "dk0_full"])
def test_waits_are_found_by_the_place_of_their_mbarrier(name: str) -> None:
    """The first mbarrier has no offset in its address; a wait for another one is not found."""
    names = [s.name for s in PLAN.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    start = 4096
    lines = ["mbarrier.init.shared.b64 [%r2], %r9;"]
    lines += [f"mbarrier.init.shared.b64 [%r1+{start + 8 * n}], %r9;" for n in range(1, len(names))]
    for at in (names.index(name), names.index(name) - 1):
        lines += [
            f"add.s32 %r7, %r1, {start + 8 * at};",
            "{",
            "mbarrier.try_wait.parity.shared.b64 P1, [%r7], %r8, 10000000;",
            "}",
            *[""] * 8,
        ]
    assert waits_for(lines, PLAN, name) == [len(names) + 3]


@pytest.mark.parametrize("number", range(3))
def test_last_arrivals_are_found_by_the_place_of_their_mbarrier(number: int) -> None:
    """Of a ring's own, in the order of the code; those of other rings are not found."""
    plan = WideBackwardSpec(head_dim=136, head_dim_v=24).queries_plan
    names = [s.name for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    start = 512
    lines = ["mbarrier.init.shared.b64 [%r2], %r9;"]
    lines += [f"mbarrier.init.shared.b64 [%r1+{start + 8 * n}], %r9;" for n in range(1, len(names))]
    rings = [name for name in dict.fromkeys(names) if name.endswith("_empty")]
    order = [rings[n % len(rings)] for n in range(number + 2)]
    lines += [
        f"mbarrier.arrive.shared.b64 %rd1, [%r7+{start + 8 * names.index(name)}], %r8;"
        for name in order
    ]
    for ring in rings:
        found = [at - len(names) - 1 for at in arrivals_at(lines, plan, ring)]
        assert found == [at for at, name in enumerate(order) if name == ring]


def test_a_program_of_other_launches_is_refused() -> None:
    with pytest.raises(ValueError, match="must launch 2 kernels; got 0"):
        capture("nothing", lambda session: None, of=2)
