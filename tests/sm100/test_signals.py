"""Names of signals in a kernel: numbers in them, the steps that are kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass import Int32

from fa4.kit.signals import Signals, mbarrier_numbers
from fa4.plan.schema import Arrive, PipelinePlan, Wait
from fa4.sm100.forward.spec import ForwardSpec

PLAN = ForwardSpec(head_dim=64, head_dim_v=64).plan
NUMBERS = mbarrier_numbers(PLAN)


def signals(role: str, plan: PipelinePlan = PLAN) -> tuple[Signals, list[Any]]:
    """As a role uses them, and its trace; there are no barriers to wait at."""
    trace: list[Any] = []
    return Signals(plan, role, trace, None), trace


@pytest.mark.parametrize("number", [0, 1])
def test_a_known_number(number: int) -> None:
    """One signal, one step, the role's own name."""
    found, trace = signals("mma")
    found = found.numbered(number)
    assert found._place(NUMBERS, "q#_full") == NUMBERS[f"q{number}_full"]
    assert found._place(NUMBERS, "kv_full") == NUMBERS["kv_full"]
    found._record("q#_full", Wait)
    assert trace == [("mma", Wait(f"q{number}_full"))]


def test_a_number_at_run_time() -> None:
    """The step of every role that the code serves; one signal stands for all."""
    found, trace = signals("softmax#")
    signal = found.numbered(Int32(1))._record("p#_full_o#_scaled", Arrive, None)
    assert signal == PLAN.signal("p0_full_o0_scaled")
    assert trace == [(f"softmax{i}", Arrive(f"p{i}_full_o{i}_scaled")) for i in range(2)]


def test_refusals() -> None:
    """A number that nobody says, a signal of others, barriers that no one formula finds."""
    found, trace = signals("mma")
    with pytest.raises(ValueError, match=r"which q#_full\? say it with numbered"):
        found.wait("q#_full")
    with pytest.raises(ValueError, match="gives mma no part in signal epi1_full"):
        found.numbered(1).wait("epi#_full")
    uneven = {"a0": 0, "a1": 3, "a2": 4}
    with pytest.raises(
        ValueError, match=r"barriers of a# must lie at equal distances; got \[0, 3, 4"
    ):
        found.numbered(Int32(1))._place(uneven, "a#")
    with pytest.raises(ValueError, match="mma has one number"):
        found.numbered(Int32(1)).wait("q#_full")
    assert trace == []


def test_a_signal_that_the_plan_forgets() -> None:
    """A wait in the kernel that the plan's waiters do not have is an error while it is traced."""
    kept = tuple(
        replace(signal, waiters=()) if signal.name == "kv_empty" else signal
        for signal in PLAN.signals
    )
    found, _ = signals("load", replace(PLAN, signals=kept))
    with pytest.raises(ValueError, match="gives load no part in signal kv_empty"):
        found.wait("kv_empty", found.ring("kv"))
