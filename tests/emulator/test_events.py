"""What a run tells a recorder of the mbarriers that its warps use."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from fa4.emulator import BarrierUse, RunEvents
from tests.emulator.kernels import run_ptx
from tests.emulator.test_barriers import PIPELINE, SCHEDULES

STAGES, TRIPS = 2, 6


class Uses(RunEvents):
    """Warp -> (use, which mbarrier counted from the first) in the order of their end."""

    def __init__(self) -> None:
        self.by_warp: dict[int, list[tuple[BarrierUse, int]]] = defaultdict(list)

    def barrier_used(self, fragment: Any, cta: Any, offset: int, use: BarrierUse) -> None:
        """An instruction used an mbarrier."""
        self.by_warp[fragment.warp.index].append((use, (offset - min(cta.mbarriers)) // 8))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_waits_are_told_when_they_succeed(schedule: str, seed: int) -> None:
    """However often they poll: one wait and one arrival of each warp in every trip."""
    uses = Uses()
    out = np.zeros(64, np.uint32)
    run_ptx(PIPELINE, [out, out, out], block=(64, 1, 1), smem=2048, schedule=schedule, seed=seed,
            events=uses)  # fmt: skip
    full, empty = ([first + k % STAGES for k in range(TRIPS)] for first in (0, STAGES))
    for warp, (waits, arrivals) in enumerate(((empty, full), (full, empty))):
        expected = [
            use
            for waited, arrived in zip(waits, arrivals, strict=True)
            for use in ((BarrierUse.WAIT, waited), (BarrierUse.ARRIVE, arrived))
        ]
        assert uses.by_warp[warp] == expected


COPY = """
  setp.ne.u32 %p1, %tid.x, 0; @%p1 bra DONE;
  mov.u32 %r20, smem; mbarrier.init.shared::cta.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 64;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20+64], [%rd1], 64, [%r20];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r20], 0; @!%p2 bra WAIT;
  mbarrier.inval.shared::cta.b64 [%r20];
DONE:
"""


def test_a_copy_tells_which_mbarrier_it_signals() -> None:
    """When it is issued, by the warp that issues it."""
    uses = Uses()
    source = np.zeros(64 + 256, np.uint8)
    start = -source.ctypes.data % 256
    run_ptx(COPY, [source[start : start + 64]], smem=256, events=uses)
    assert [use for use, _ in uses.by_warp[0]] == [
        BarrierUse.ARRIVE, BarrierUse.COPY, BarrierUse.WAIT, BarrierUse.INVALIDATE
    ]  # fmt: skip
