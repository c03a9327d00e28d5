"""Waits and arrivals of an mbarrier that meet the phase they mean by luck alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from fa4.emulator.checks.clocks import WarpClock
from fa4.emulator.checks.phases import PhaseOrder
from fa4.emulator.execute import Report
from tests.emulator.kernels import kinds, run_ptx
from tests.emulator.test_barriers import SCHEDULES

ROWS, LINE = 3, 7


def clocks() -> list[WarpClock]:
    return [WarpClock(row, ROWS) for row in range(2)]


@pytest.mark.parametrize("told", [False, True])
def test_an_arrival_needs_to_know_of_the_phase_before(told: bool) -> None:
    (first, second), order = clocks(), PhaseOrder()
    end = first.release(1)
    assert order.arrives(second)
    order.ended(end)
    if told:
        second.acquire(end)
    assert order.arrives(second) == told
    assert order.arrives(first)  # its own arrival was the phase


@pytest.mark.parametrize("told", [False, True])
def test_a_wait_needs_to_know_of_the_phase_before_the_one_it_finds(told: bool) -> None:
    (first, second), order = clocks(), PhaseOrder()
    end = first.release(1)
    order.ended(end)
    assert order.waited(second, LINE)  # the first phase has none before
    order.ended(first.release(1))
    if told:
        second.acquire(end)
    assert order.waited(second, LINE) == told


@pytest.mark.parametrize("how", ["", "release", "relaxed"])
def test_the_next_phase_must_not_end_before_a_wait(how: str) -> None:
    (arriver, waiter), order = clocks(), PhaseOrder()
    order.ended(arriver.release(1))
    order.waited(waiter, LINE)
    if how == "release":
        arriver.acquire(waiter.release(1))
    elif how == "relaxed":
        arriver.acquire_order(waiter.release_order(1, None))
    assert order.ended(arriver.release(1)) == ([] if how else [(LINE, 1)])
    assert order.ended(arriver.release(1)) == []


@pytest.mark.parametrize("told", [False, True])
def test_phases_of_relaxed_arrivals(told: bool) -> None:
    (first, second), order = clocks(), PhaseOrder()
    end = first.release_order(1, None)
    order.ended(end)
    if told:
        second.acquire_order(end)
    assert order.arrives(second) == told
    assert not second.knowledge.seen.any()


def test_other_clusters_are_exempt() -> None:
    (first, _), order = clocks(), PhaseOrder()
    order.ended(first.release(1))
    assert order.arrives(WarpClock(1, ROWS, cluster=4))


# Warp 0 arrives, warp 1 waits; INIT arrivals make a phase.
START = """
  .reg .b32 %w;
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem; shr.u32 %w, %r1, 5;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 32;
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8], 32;
  bar.sync 0;
  setp.ne.u32 %p2, %w, 0;
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r20+{}];\n"


def wait(name: str, offset: int, parity: int) -> str:
    return (
        f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20+{offset}], {parity};\n"
        f"@!%p3 bra {name};\n"
    )


def run(first: str, second: str, schedule: str) -> Report:
    """first, second: what warps 0 and 1 do."""
    body = f"{START} @%p2 bra SECOND;\n{first} bra JOIN;\nSECOND:\n{second} JOIN:\n bar.sync 0;\n"
    return run_ptx(
        body, [np.zeros(1, np.uint32)], block=(64, 1, 1), smem=64, schedule=schedule, collect=True
    )


ONCE = ARRIVE.format(0)
CASES = {
    "two phases, waited for": (
        ONCE + wait("A", 8, 0) + ONCE, wait("B", 0, 0) + ARRIVE.format(8) + wait("C", 0, 1), True
    ),
    "the second phase does not wait for the waiter": (ONCE + ONCE, wait("B", 0, 0), False),
    "parity of the phase before": (ONCE, wait("B", 0, 1), False),
    "two warps arrive at a barrier for one": (ONCE, ONCE, False),
    "two warps arrive in turn": (ONCE, wait("B", 0, 0) + ONCE, True),
}  # fmt: skip


def relaxed(text: str) -> str:
    """The same with relaxed arrivals and waits."""
    text = text.replace("mbarrier.arrive.", "mbarrier.arrive.relaxed.cta.")
    return text.replace("try_wait.parity.", "try_wait.parity.relaxed.cta.")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", [str, relaxed])
def test_phases_in_a_kernel(name: str, schedule: str, form: Callable[[str], str]) -> None:
    first, second, right = CASES[name]
    first, second = form(first), form(second)
    found = kinds(run(first, second, schedule))
    if right:
        assert found == set()
    else:
        assert found in ({"mbarrier"}, {"deadlock"}, {"mbarrier", "deadlock"})


# CTA 1 arrives at an mbarrier of CTA 0.

REMOTE = """
  .reg .b32 %w;
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem; mov.u32 %w, %cluster_ctarank;
  setp.eq.u32 %p1, %r1, 0; setp.ne.u32 %p2, %w, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 32;
  @%p1 fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive; barrier.cluster.wait;
  @!%p2 bra FIRST;
  mapa.shared::cluster.u32 %r21, %r20, 0;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r21];
  bra LAST;
FIRST:
  WAIT
LAST:
  END
"""
WAITS = wait("A", 0, 0).replace("parity.", "parity.acquire.cluster.")
CLUSTER = "barrier.cluster.arrive{}; barrier.cluster.wait;"


@pytest.mark.parametrize("waits, end, fine", [
    (WAITS, "", True), (WAITS.replace("acquire", "relaxed"), "", True), ("", "", False),
    ("", CLUSTER.format(""), True), ("", CLUSTER.format(".relaxed"), True),
])  # fmt: skip
def test_a_cta_outlives_the_arrivals_of_others(waits: str, end: str, fine: bool) -> None:
    body = REMOTE.replace("WAIT\n", waits).replace("END\n", end)
    for schedule, form in product(SCHEDULES, ("release", "relaxed")):
        report = run_ptx(
            body.replace("arrive.release", f"arrive.{form}"), grid=(2, 1, 1), cluster=(2, 1, 1),
            block=(32, 1, 1), smem=64, schedule=schedule, collect=True,
        )  # fmt: skip
        assert kinds(report) == (set() if fine else {"exit"}), str(report)
