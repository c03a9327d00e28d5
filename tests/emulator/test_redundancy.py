"""Synchronisation that orders nothing, and its neighbours that do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
     True),  # either of the two waits
    (COPIES, {"mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20+8], 0;": PASS.format("%p4"),
              "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r20], 0;": PASS.format("%p5")},
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


# CTA 0 writes and sets a flag; CTA 1, which starts when CTA 0 is over, finds it set.
FLAG = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0;
  setp.ne.u32 %p2, %r1, 0; @%p2 bra OVER; mov.u32 %r3, 7;
  @%p1 bra SECOND;
  st.global.b32 [%rd1+128], %r3;
  EXTRA
  st.release.gpu.global.b32 [%rd1], %r3;
  bra OVER;
SECOND:
  ld.acquire.gpu.global.b32 %r4, [%rd1];
  ld.global.b32 %r5, [%rd1+128];
OVER:
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [("", "", True), ("EXTRA", "fence.acq_rel.gpu;", True), (".acquire", ".relaxed", False),
     (".release", ".relaxed", False)],
)  # fmt: skip
def test_what_another_cluster_tells(old: str, new: str, same: bool) -> None:
    """It has another number in each run of the process, and other epochs."""
    found = []
    for text in (FLAG, FLAG.replace(old, new) if old else FLAG):
        found.append(Orderings())
        run_ptx(
            text.replace("EXTRA", ""), [np.zeros(64, np.uint32)], block=(32, 1, 1), grid=(2, 1, 1),
            collect=True, events=found[-1], clusters_limit=1, resident_clusters=1,
        )  # fmt: skip
    assert found[0].same_as(found[1]) == same


# What touches a kind of memory, in every thread or in the first; the mbarriers have places of
# their own. Of a product: nothing that is told, it is its operands that it reads.
ACCESSES = {
    "shared write": ("shared", "st.shared.b32 [%a+1024], %r1;"),
    "shared read": ("shared", "ld.shared.b32 %r2, [%b+1024];"),
    "shared read of the first": ("shared", "@%p1 ld.shared.b32 %r2, [%r20+1024];"),
    "global write": ("global", "st.global.b32 [%rd1], %r1;"),
    "global read of the 33rd": ("global", "@%p2 ld.global.b32 %r2, [%rd1];"),
    "arrival": ("mbarrier", "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r20];"),
    "arrival of the 33rd": ("mbarrier", "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r20];"),
    "shuffle": ("nothing", "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"),
}


def conflict(first: str, second: str) -> bool:
    """Whether they touch the same kind of memory; a guard may hold for any lane of its warp."""
    return ACCESSES[first][0] == ACCESSES[second][0] != "nothing"


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(sorted(ACCESSES)), max_size=2), min_size=2, max_size=4),
       st.data())  # fmt: skip
def test_a_barrier_is_needed_by_what_touches_the_same_kind_of_memory(parts, data) -> None:
    """Between drawn accesses stand barriers; without one of them, those on both sides of it are in
    no order."""
    removed = data.draw(st.integers(0, len(parts) - 2))
    texts = ["\n".join(ACCESSES[name][1] for name in part) for part in parts]
    begin = START + "@%p1 mbarrier.init.shared::cta.b64 [%r20], 1000;\nbar.sync 0;\n"
    whole = begin + "\nbar.sync 0;\n".join(texts)
    # The line of the barrier stays, empty, so that lines name the same instructions.
    at = [n for n, line in enumerate(whole.split("\n")) if line == "bar.sync 0;"][removed + 1]
    without = "\n".join("" if n == at else line for n, line in enumerate(whole.split("\n")))
    needed = any(conflict(a, b) for a in parts[removed] for b in parts[removed + 1])
    assert orderings(whole).same_as(orderings(without)) == (not needed)
