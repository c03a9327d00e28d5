"""Synchronisation that orders nothing, and its neighbours that do."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.tools.redundancy import Orderings
from tests.emulator.kernels import aligned, run_ptx
from tests.emulator.test_barriers import PIPELINE, SCHEDULES


def orderings(body: str, schedule: str = "fifo", seed: int = 0) -> Orderings:
    """Of two warps."""
    found = Orderings()
    run_ptx(
        body, [aligned(np.arange(64, dtype=np.uint32))], block=(64, 1, 1), smem=4096,
        collect=True, events=found, schedule=schedule, seed=seed,
    )  # fmt: skip
    return found


START = """
  .reg .b32 %a, %b, %w;
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem; shr.u32 %w, %r1, 5;
  setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32;
  mad.lo.u32 %a, %r1, 4, %r20; xor.b32 %b, %a, 128;
"""
EXCHANGE = START + """
  st.shared.b32 [%a+1024], %r1;
  bar.sync 0;
  bar.sync 1;
  ld.shared.b32 %r2, [%b+1024];
  bar.sync 2;
  ld.shared.b32 %r2, [%a+1024];
  bar.sync 3;
"""  # fmt: skip
# Lane 0 starts a copy that signals one mbarrier, and then another that signals two waits.
COPIES = START + """
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8], 1;
  @%p1 fence.mbarrier_init.release.cluster;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @!%p1 bra READ;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 128;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r20+1024], [%rd1], 128, [%r20];
FIRST:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], 0;
  @!%p3 bra FIRST;
  mbarrier.arrive.shared::cta.b64 _, [%r20+8];
READ:
  bar.warp.sync 0xffffffff;
SECOND:
  mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20+8], 0;
  @!%p4 bra SECOND;
THIRD:
  mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r20], 0;
  @!%p5 bra THIRD;
  ld.shared.b32 %r2, [%r20+1024];
"""  # fmt: skip
PASS = "setp.eq.u32 {}, 0, 0;"


@pytest.mark.parametrize("body, removed, same", [
    (EXCHANGE, {"bar.sync 0;": ""}, True),
    (EXCHANGE, {"bar.sync 1;": ""}, True),
    (EXCHANGE, {"bar.sync 0;": "", "bar.sync 1;": ""}, False),
    (EXCHANGE, {"bar.sync 2;": ""}, False),  # the reads of one warp before those of the other
    (EXCHANGE, {"bar.sync 3;": ""}, True),
    (COPIES, {"mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r20], 0;": PASS.format("%p5")},
     True),
    (COPIES, {"mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20+8], 0;": PASS.format("%p4")},
     False),
    (COPIES, {"mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], 0;": PASS.format("%p3")},
     False),
    (COPIES, {"fence.proxy.async.shared::cta;": ""}, False),
    (COPIES, {"@%p1 fence.mbarrier_init.release.cluster;": ""}, True),  # the proxy fence does it
])  # fmt: skip
def test_redundant(body: str, removed: dict[str, str], same: bool) -> None:
    changed = body
    for old, new in removed.items():
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    before = orderings(body)
    for schedule in SCHEDULES:
        assert before.same_as(orderings(changed, schedule)) == same, schedule


@pytest.mark.parametrize("body", [EXCHANGE, COPIES, PIPELINE])
def test_what_is_ordered_does_not_depend_on_the_schedule(body: str) -> None:
    before = orderings(body)
    for schedule in SCHEDULES:
        for seed in range(3):
            assert before.same_as(orderings(body, schedule, seed))


def test_other_events_are_another_order() -> None:
    more = EXCHANGE + "  st.shared.b32 [%a+2048], %r1;\n"
    assert not orderings(EXCHANGE).same_as(orderings(more))
