"""Planted faults that survive in Hopper's gradients: each has a reason."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from lab.benchmarks.gradient_faults import waits_for
from lab.records import read_record

PLAN = WarpgroupBackwardSpec(head_dim=64, head_dim_v=64).plan


def test_every_survivor_is_explained() -> None:
    """As docs/hopper.md says."""
    kernels = read_record("gradient_faults")["kernels"]
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
