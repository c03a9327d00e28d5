"""Barriers of CTAs and clusters, mbarriers: results, orders, and every misuse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulationFailed
from fa4.emulator.execute import Report
from fa4.emulator.machine.mbarrier import MBarrier, MBarrierFault
from tests.emulator.kernels import kinds, run_ptx

SCHEDULES = ("fifo", "random", "adversarial")
MINE = """
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  mov.u32 %r20, smem;
  shl.b32 %r2, %r1, 2;
  add.u32 %r21, %r20, %r2;
"""
# Each thread writes its number to shared memory and reads that of the thread `xor` 32.
EXCHANGE = """
  st.shared.b32 [%r21], %r1;
  {sync}
  xor.b32 %r3, %r1, 32;
  shl.b32 %r3, %r3, 2;
  add.u32 %r3, %r20, %r3;
  ld.shared.b32 %r4, [%r3];
  st.global.b32 [%rd3], %r4;
"""


def exchange(sync: str, **options: object) -> tuple[np.ndarray, Report]:
    out = np.zeros(64, np.uint32)
    report = run_ptx(
        MINE + EXCHANGE.format(sync=sync), [out], block=(64, 1, 1), smem=1024, collect=True,
        **options,
    )  # fmt: skip
    return out, report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "sync",
    ["bar.sync 0;", "bar.sync 3, 64;", "barrier.sync 1;", "barrier.cta.sync.aligned 15, 64;",
     "bar.red.popc.u32 %r9, 0, %p0;", "barrier.cluster.arrive; barrier.cluster.wait;"],
)  # fmt: skip
def test_barriers_order_accesses(sync: str, schedule: str) -> None:
    out, report = exchange("setp.eq.u32 %p0, %r1, 5;" + sync, schedule=schedule, seed=3)
    assert report.ok, str(report)
    assert out.tolist() == [t ^ 32 for t in range(64)]


@pytest.mark.parametrize(
    "sync", ["", "bar.warp.sync 0xffffffff;", "fence.acq_rel.cta;",
             "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"],
)  # fmt: skip
def test_no_barrier_is_a_race(sync: str) -> None:
    _, report = exchange(sync)
    assert "race" in kinds(report) or "uninitialised" in kinds(report)


def test_warp_sync_orders_lanes_of_a_warp() -> None:
    body = (
        MINE
        + """
  st.shared.b32 [%r21], %r1;
  {sync}
  xor.b32 %r3, %r2, 4;
  add.u32 %r3, %r20, %r3;
  ld.shared.b32 %r4, [%r3];
  st.global.b32 [%rd3], %r4;
"""
    )
    out = np.zeros(32, np.uint32)
    synced = body.format(sync="bar.warp.sync 0xffffffff;")
    assert run_ptx(synced, [out], smem=1024).ok
    assert out.tolist() == [t ^ 1 for t in range(32)]
    assert kinds(run_ptx(body.format(sync=""), [out], smem=1024, collect=True)) == {"race"}


def test_barrier_reductions() -> None:
    body = (
        MINE
        + """
  setp.lt.u32 %p1, %r1, 40;
  bar.red.popc.u32 %r5, 0, %p1;
  bar.red.and.pred %p2, 1, %p1;
  bar.red.or.pred %p3, 2, !%p1;
  selp.u32 %r6, 1000, 0, %p2;
  selp.u32 %r7, 2000, 0, %p3;
  add.u32 %r5, %r5, %r6;
  add.u32 %r5, %r5, %r7;
  st.global.b32 [%rd3], %r5;
"""
    )
    out = np.zeros(64, np.uint32)
    run_ptx(body, [out], block=(64, 1, 1))
    assert set(out.tolist()) == {2040}


PRODUCE = (
    MINE
    + """
  setp.lt.u32 %p1, %r1, 32;
  @!%p1 bra CONSUMER;
  st.shared.b32 [%r21], %r1;
  bar.arrive 1, 64;
  bra END;
CONSUMER:
  bar.sync 1, 64;
  ld.shared.b32 %r4, [%r21+-128];
  st.global.b32 [%rd3], %r4;
END:
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrive_and_sync(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    assert run_ptx(PRODUCE, [out], block=(64, 1, 1), smem=1024, schedule=schedule).ok
    assert out[32:].tolist() == list(range(32))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("bar.arrive 1, 64;", ""), "deadlock"),
        (("bar.arrive 1, 64;", "bar.arrive 1, 96;"), "barrier"),
        (("bar.arrive 1, 64;", "bar.arrive 2, 64;"), "deadlock"),
        (("bar.sync 1, 64;", ""), "race"),
        (("bar.sync 1, 64;", "bar.sync 1, 48;"), "barrier"),
        (("bar.sync 1, 64;", "bar.sync 17, 64;"), "barrier"),
    ],
)
def test_barrier_faults(change: tuple[str, str], kind: str) -> None:
    assert change[0] in PRODUCE
    out = np.zeros(64, np.uint32)
    report = run_ptx(PRODUCE.replace(*change), [out], block=(64, 1, 1), smem=1024, collect=True)
    assert kind in kinds(report), str(report)


def test_exited_warps_are_not_waited_for() -> None:
    body = (
        MINE
        + """
  setp.ge.u32 %p1, %r1, 32;
  @%p1 ret;
  bar.sync 0;
  st.global.b32 [%rd3], %r1;
"""
    )
    out = np.zeros(64, np.uint32)
    for schedule in SCHEDULES:
        assert run_ptx(body, [out], block=(64, 1, 1), schedule=schedule).ok


# Warp 0 fills two stages in turn, warp 1 reads them. Full barriers at smem+0 and +8, empty ones at
# +16 and +24.
PIPELINE = (
    MINE
    + """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r20], 32;
  mbarrier.init.shared::cta.b64 [%r20+8], 32;
  mbarrier.init.shared::cta.b64 [%r20+16], 32;
  mbarrier.init.shared::cta.b64 [%r20+24], 32;
READY:
  bar.sync 0;
  and.b32 %r22, %r2, 127;
  add.u32 %r22, %r22, %r20;
  mov.u32 %r5, 0;
  mov.u32 %r9, 0;
  setp.ge.u32 %p2, %r1, 32;
LOOP:
  and.b32 %r6, %r5, 1;
  shl.b32 %r7, %r6, 3;
  add.u32 %r7, %r7, %r20;
  shl.b32 %r11, %r6, 7;
  add.u32 %r11, %r11, %r22;
  shr.u32 %r8, %r5, 1;
  and.b32 %r8, %r8, 1;
  @%p2 bra CONSUME;
  xor.b32 %r8, %r8, 1;
WAIT_EMPTY:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r7+16], %r8;
  @!%p3 bra WAIT_EMPTY;
  mad.lo.u32 %r10, %r5, 100, %r1;
  st.shared.b32 [%r11+1024], %r10;
  mbarrier.arrive.shared::cta.b64 _, [%r7];
  bra NEXT;
CONSUME:
WAIT_FULL:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r7], %r8;
  @!%p3 bra WAIT_FULL;
  ld.shared.b32 %r10, [%r11+1024];
  mad.lo.u32 %r9, %r9, 3, %r10;
  mbarrier.arrive.shared::cta.b64 _, [%r7+16];
NEXT:
  add.u32 %r5, %r5, 1;
  setp.lt.u32 %p4, %r5, 6;
  @%p4 bra LOOP;
  st.global.b32 [%rd3], %r9;
"""
)


def pipeline(text: str, **options: object) -> tuple[list[int], Report]:
    out = np.zeros(64, np.uint32)
    report = run_ptx(text, [out], block=(64, 1, 1), smem=4096, collect=True, **options)
    return out[32:].tolist(), report


def expected_pipeline() -> list[int]:
    sums = []
    for lane in range(32):
        total = 0
        for k in range(6):
            total = (total * 3 + 100 * k + lane) & 0xFFFFFFFF
        sums.append(total)
    return sums


@settings(max_examples=12)
@given(st.sampled_from(SCHEDULES), st.integers(0, 99))
def test_pipeline(schedule: str, seed: int) -> None:
    values, report = pipeline(PIPELINE, schedule=schedule, seed=seed)
    assert report.ok, str(report)
    assert values == expected_pipeline()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  mbarrier.arrive.shared::cta.b64 _, [%r7];\n", "", {"deadlock"}),
        ("  mbarrier.arrive.shared::cta.b64 _, [%r7+16];\n", "", {"deadlock"}),
        ("  @!%p3 bra WAIT_FULL;\n", "", {"race", "uninitialised"}),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r7], %r8;", "setp.eq.u32 %p3, 1, 1;",
         {"race", "uninitialised"}),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r7+16], %r8;",
         "setp.eq.u32 %p3, 1, 1;", {"race", "deadlock"}),
        ("arrive.shared::cta.b64 _, [%r7];", "arrive.relaxed.cta.shared::cta.b64 _, [%r7];",
         {"race"}),
        ("try_wait.parity.shared::cta.b64 %p3, [%r7], %r8",
         "try_wait.parity.relaxed.cta.shared::cta.b64 %p3, [%r7], %r8", {"race"}),
        ("[%r20+8], 32", "[%r20+8], 33", {"deadlock"}),
        ("[%r20+8], 32", "[%r20+8], 31", {"race"}),
        ("[%r20+8], 32", "[%r20+8], 0", {"mbarrier"}),
        ("  bar.sync 0;\n", "", {"race", "mbarrier"}),
        ("[%r20+24], 32;", "[%r20+28], 32;", {"misaligned"}),
        ("  xor.b32 %r8, %r8, 1;\n", "", {"deadlock"}),
    ],
)  # fmt: skip
def test_pipeline_faults(old: str, new: str, expected: set[str]) -> None:
    assert old in PIPELINE
    found = set()
    for schedule, seed in product(SCHEDULES, range(3)):
        _, report = pipeline(PIPELINE.replace(old, new), schedule=schedule, seed=seed)
        found |= kinds(report)
    assert found & expected


def test_deadlock_report_names_the_cycle() -> None:
    text = PIPELINE.replace("  mbarrier.arrive.shared::cta.b64 _, [%r7+16];\n", "")
    out = np.zeros(64, np.uint32)
    with pytest.raises(EmulationFailed) as failure:
        run_ptx(text, [out], block=(64, 1, 1), smem=4096)
    message = str(failure.value)
    assert "CTA 0 warp 0: parity 0 of mbarrier 0x410 of CTA 0" in message
    assert "32 of 32 arrivals missing" in message
    assert "CTA 0 warp 1: parity 1 of mbarrier 0x400" in message


def test_polling_forever_is_a_livelock() -> None:
    body = (
        MINE
        + """
  mbarrier.init.shared::cta.b64 [%r20], 1;
AGAIN:
  mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r20], 0;
  nanosleep.u32 100;
  @!%p1 bra AGAIN;
"""
    )
    report = run_ptx(body, [], smem=64, block=(1, 1, 1), collect=True)
    assert kinds(report) == {"livelock"}


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.integers(1, 3), st.integers(-64, 64).map(lambda b: b * 16)), max_size=20),
)
def test_mbarrier_phases(count: int, events: list[int]) -> None:
    """Positive small numbers arrive, multiples of 16 expect (+) or complete (-) bytes; the phase
    ends exactly when all arrived and no bytes are missing."""
    barrier = MBarrier(0, count, 0)
    pending, missing, phase = count, 0, 0
    for event in events:
        if event % 16:
            if event > pending:
                with pytest.raises(MBarrierFault):
                    barrier.arrive(event, None)
                return
            assert barrier.arrive(event, None) == phase
            pending -= event
            over = pending == 0 and missing == 0
        elif event > 0:
            barrier.expect(event)
            missing += event
            over = False
        else:
            barrier.complete(-event, None)
            missing += event
            over = pending == 0 and missing == 0
        if over:
            phase, pending = phase + 1, count
        assert (barrier.phase, barrier.pending, barrier.tx_bytes) == (phase, pending, missing)
        assert barrier.passed(1 - phase % 2) and not barrier.passed(phase % 2)


def test_setmaxnreg() -> None:
    body = """
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 128;
  @%p1 bra LOW;
  setmaxnreg.inc.sync.aligned.u32 {high};
  bra END;
LOW:
  setmaxnreg.dec.sync.aligned.u32 {low};
END:
"""
    text = body.format(high=200, low=56)
    for schedule in SCHEDULES:
        assert run_ptx(text, [], block=(512, 1, 1), schedule=schedule, collect=True).findings
    fitting = body.format(high=152, low=56)
    for schedule in SCHEDULES:
        assert run_ptx(fitting, [], block=(512, 1, 1), schedule=schedule).ok
    report = run_ptx(text, [], block=(512, 1, 1), collect=True)
    assert kinds(report) == {"deadlock"} and "more registers" in str(report)
