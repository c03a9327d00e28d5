"""Names of signals in a kernel: numbers in them, the steps that are kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass import Int32, cute

from fa4.kit.signals import Signals, mbarrier_numbers, named_numbers
from fa4.plan.schema import Arrive, PipelinePlan, Wait
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.halves.spec import HalvesSpec

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


HALVES = HalvesSpec(head_dim=128, head_dim_v=128).plan


def test_numbers_and_letters_at_run_time() -> None:
    """Code that serves all halves of all Q tiles: every role's step, places by one formula."""
    found, trace = signals("softmax#@", HALVES)
    found = found.numbered(Int32(1), Int32(0))
    assert found._record("p#@_full", Arrive, None) == HALVES.signal("p0a_full")
    found._record("max#^_full", Wait)
    names = ["0a", "0b", "1a", "1b"]
    others = ["0b", "0a", "1b", "1a"]
    assert trace[:4] == [(f"softmax{x}", Arrive(f"p{x}_full")) for x in names]
    pairs = zip(names, others, strict=True)
    assert trace[4:] == [(f"softmax{x}", Wait(f"max{y}_full")) for x, y in pairs]
    numbers = mbarrier_numbers(HALVES)
    for i, half in ((0, 0), (0, 1), (1, 0), (1, 1)):
        one = found.numbered(i, half)
        assert one._place(numbers, "p#@_full") == numbers[f"p{i}{'ab'[half]}_full"]
        assert one._place(numbers, "p#a_full") == numbers[f"p{i}a_full"]
    with pytest.raises(ValueError, match=r"which p#@_full\? say it with numbered"):
        signals("mma", HALVES)[0].wait("p#@_full")
    uneven = {"x0a": 0, "x0b": 2, "x1a": 5, "x1b": 8}
    with pytest.raises(ValueError, match=r"equal distances; got \[0, 2, 5, 8\]"):
        found._place(uneven, "x#@")


def test_a_named_signal_of_two_stages_is_two_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp may be a phase ahead of one that has not waited for the last: not at its barrier."""
    used: list[Any] = []
    for name in ("barrier_arrive", "barrier"):
        monkeypatch.setattr(cute.arch, name, lambda barrier_id, **_: used.append(barrier_id))
    found, _ = signals("softmax#@", HALVES)
    ring = found.ring("max1b")
    assert ring.stages == 2
    for slot in range(2):
        found.numbered(1, 1).arrive("max#@_full", ring.on(slot))
        found.numbered(1, 0).wait("max#^_full", ring.on(slot))
    first = named_numbers(HALVES)["max1b_full"]
    assert used == [first, first, first + 1, first + 1]


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
