"""Work that a role issues instruction by instruction: a unit serves roles in turns."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.plan.schema import Arrive, Mma, PipelinePlan, Role, Signal, Wait, Work
from fa4.sim import engine, engine_python
from fa4.sim.code import EventCode
from fa4.sim.lower import SignalCost, WorkCost, lower
from fa4.sim.machine import find_machine
from lab.hardware.hopper_units.figures import figures

BESIDE = "hopper_beside"
QUEUED = find_machine("h200").costs.mma_queued
CYCLES = st.floats(8.0, 256.0)


def begin_together(counts: list[int], cycles: float, queued: float) -> EventCode:
    """A plan in which each role has a product of so many instructions, and waits for it."""
    names = [f"role{i}" for i in range(len(counts))]
    product = Mma(rows=64, cols=64, depth=16, a_bytes=0, b_bytes=0, in_registers=True)
    plan = PipelinePlan(
        name="products",
        roles=tuple(
            Role(name=name, warps=(i,), registers=32, program=(
                Work(name, product, asynchronous=True),
                Arrive(f"{name}_done", after="u"), Wait(f"{name}_done"),
            )) for i, name in enumerate(names)
        ),
        signals=tuple(Signal(name=f"{name}_done", arrivals={name: 1}, waiters=(name,))
                      for name in names),
        buffers=(), trips=("n",),
    )  # fmt: skip

    def cost(role: Role, work: Work) -> WorkCost:
        count = counts[names.index(role.name)]
        return WorkCost(occupancy_cycles={"u": cycles * count}, instructions=count, queued=queued)

    return lower(plan, cost, lambda _: SignalCost())


@given(st.lists(st.integers(1, 24), min_size=1, max_size=3), CYCLES, st.integers(0, 9))
def test_nothing_is_lost_between_instructions(
    counts: list[int], cycles: float, queued: int
) -> None:
    """All work is done, by a unit that never stands still; both engines agree."""
    code, trips = begin_together(counts, cycles, queued), np.array([[1]])
    run = engine.execute(code, trips, log=True)
    assert run.end == pytest.approx(sum(counts) * cycles)
    assert run.busy.tolist() == pytest.approx([run.end])
    assert np.array_equal(engine_python.execute(code, trips).log, run.log)


@given(st.integers(1, 24), CYCLES, st.integers(0, 9))
def test_roles_that_begin_together_end_together(count: int, cycles: float, queued: int) -> None:
    """But for the instructions that the first one has in its queue and the other behind them."""
    code = begin_together([count, count], cycles, queued)
    first, second = engine.execute(code, np.array([[1]])).finish
    assert second == pytest.approx(2 * count * cycles)
    assert first >= second - (1 + min(count, queued + 1)) * cycles - 1e-6


@given(st.integers(1, 24), CYCLES, st.integers(0, 9))
def test_a_role_waits_until_what_is_left_fits_into_its_queue(
    count: int, cycles: float, queued: int
) -> None:
    """For so many instructions its last issue comes before the end."""
    cost = WorkCost(
        occupancy_cycles={"u": count * cycles}, issue_cycles=5.0, instructions=count, queued=queued
    )
    parts = list(cost.parts())
    assert len(parts) == count and {part.instructions for part in parts} == {1}
    assert sum(part.occupancy_cycles["u"] for part in parts) == pytest.approx(count * cycles)
    waiting = max(0, count - max(queued, 1))
    own = 5.0 / count
    issued = waiting * max(cycles, own) + (count - waiting) * own
    assert sum(part.issue_cycles for part in parts) == pytest.approx(issued)


def test_the_queue_is_the_measured_one() -> None:
    """The last of 24 wgmma is done as many of its own durations after its issue, alone or not."""
    found = figures(BESIDE)
    behind: dict[int, list[float]] = {64: [], 128: []}
    for name, figure in found.items():
        match = re.match(r"queue/m64n(\d+)k16, .*, all done", name)
        if match:
            issued = found[name.replace("all done", "all issued")].value
            behind[int(match[1])].append(figure.value - issued)
    for width, cycles in behind.items():
        assert len(cycles) >= 6 and np.ptp(cycles) < 0.1 * np.mean(cycles), width
    per_instruction = (np.median(behind[128]) - np.median(behind[64])) / (128 / 2 - 64 / 2)
    assert per_instruction == pytest.approx(QUEUED, abs=0.3)


def test_two_warpgroups_take_turns_as_measured() -> None:
    """Of two that begin together, each one's instructions are two durations apart."""
    found = figures(BESIDE)
    name = "queue/m64n64k16, A from shared memory, {}, warpgroup 0, instruction {}"
    for how, apart in (("alone", 32.0), ("second after 0 cycles", 64.0)):
        issues = [found[name.format(how, i)].value for i in range(16, 23)]
        assert np.mean(np.diff(issues)) == pytest.approx(apart, rel=0.1), how
