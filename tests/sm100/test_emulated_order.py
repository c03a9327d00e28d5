"""What each warp waits for and arrives at in the emulator is its role's program, unrolled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

import ml_dtypes

from fa4 import emulator
from fa4.compiled.build import build
from fa4.config import ForwardConfig
from fa4.emulator import BarrierUse, RunEvents
from fa4.kit.signals import mbarrier_numbers
from fa4.plan.schema import Arrive, PipelinePlan, Role, Wait, unroll
from fa4.sm100.forward.spec import ForwardSpec

TILE = 128
Events = dict[tuple[int, int], list[tuple[str, str]]]


@pytest.fixture(scope="module")
def spec() -> ForwardSpec:
    return ForwardSpec(
        head_dim=64, head_dim_v=64, causal=True, numerics=ForwardConfig.tuned("bf16", 64, True)
    )


# What a step of a role's program does to an mbarrier. A copy signals one for itself: its thread has
# arrived before, with the bytes to come.
VERBS = {
    BarrierUse.WAIT: "wait",
    BarrierUse.ARRIVE: "arrive",
    BarrierUse.COMMIT: "arrive",
}


class UsedSignals(RunEvents):
    """(CTA, warp) -> (verb, signal) of its mbarrier instructions, in the order of their ends."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.events: Events = defaultdict(list)
        self.names = _names(plan)

    def barrier_used(self, fragment: Any, cta: Any, offset: int, use: BarrierUse) -> None:
        """An instruction used an mbarrier."""
        if use in VERBS:
            name = self.names[(offset - min(cta.mbarriers)) // 8]
            self.events[fragment.warp.cta.index, fragment.warp.index].append((VERBS[use], name))


def _names(plan: PipelinePlan) -> dict[int, str]:
    """Number of an mbarrier -> its signal."""
    starts = mbarrier_numbers(plan)
    return {
        start + stage: name
        for name, start in starts.items()
        for stage in range(plan.signal(name).stages)
    }


def expected(
    plan: PipelinePlan, role: Role, tiles: list[dict[str, int]]
) -> Iterator[tuple[str, str]]:
    """The role's mbarrier steps."""
    unrolled = (step for trips in tiles for step in unroll(role.program, trips))
    steps = [*role.prologue, *unrolled, *role.closing]
    for step in steps:
        if isinstance(step, (Wait, Arrive)) and plan.signal(step.signal).kind == "mbarrier":
            yield "wait" if isinstance(step, Wait) else "arrive", step.signal


def test_every_warp_follows_its_program(spec: ForwardSpec) -> None:
    """One CTA, four work tiles of two and four KV tiles, every role."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 400, 1, 64)).astype(ml_dtypes.bfloat16)
    out, lse = np.zeros_like(q), np.zeros((2, 1, 400), np.float32)
    recorder = UsedSignals(spec.plan)
    arguments = (q, q, q, out, lse, 0.125, *[None] * 3, 400, *[None] * 6, 1)
    emulator.launch(build(spec), *arguments, events=recorder)
    events = recorder.events
    tiles = [_trips(block) for _ in range(2) for block in range(2)]
    checked = 0
    for role in spec.plan.roles:
        for warp in role.warps:
            want = list(expected(spec.plan, role, [x[_tile(role.name)] for x in tiles]))
            got = events[0, warp]
            if role.name == "epilogue":  # one store waits while the other runs
                want, got = sorted(want), sorted(got)
            assert got == want, role.name
            checked += len(want)
    assert checked > 500


def _tile(role: str) -> int:
    return int(role[-1]) if role.startswith("softmax") else 0


def _trips(block: int) -> list[dict[str, int]]:
    """Trips of Q tile 0 and 1 of a block of 256 rows, of 400 keys under a causal mask."""
    stop = min(-(-(block + 1) * 256 // TILE), -(-400 // TILE))
    trips = []
    for tile in range(2):
        whole = min((block * 256 + tile * TILE + 1) // TILE, 400 // TILE, stop)
        trips.append({"kv_tiles": stop, "masked_tiles": stop - whole, "plain_tiles": whole})
    return trips


def test_a_step_too_many_is_seen(spec: ForwardSpec) -> None:
    """The unrolled programs differ if a KV tile is left out."""
    role = spec.plan.role("mma")
    one, two = ({"kv_tiles": n, "masked_tiles": n, "plain_tiles": 0} for n in (1, 2))
    assert list(expected(spec.plan, role, [one])) != list(expected(spec.plan, role, [two]))
