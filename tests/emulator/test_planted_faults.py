"""Faults that the planting campaign once missed, and the checks that now see them."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.checks.clocks import AsyncPool, Stream, WarpClock
from fa4.emulator.checks.conflict import MISSING_PROXY_FENCE, WRITE_AFTER_READ, Access
from fa4.emulator.checks.shadow import Shadow
from fa4.emulator.execute import Report
from fa4.emulator.machine.actor_rows import POOL_ROWS
from fa4.emulator.warp_lanes import FULL_MASK
from tests.emulator.kernels import aligned, run_ptx

ROWS, STREAM_ROW = 8, 2
HOW = Access(line=1)


def run(body: str, *arrays: np.ndarray, threads: int = 32) -> Report:
    return run_ptx(body, list(arrays), block=(threads, 1, 1), smem=4096, collect=True)


# Tensor memory loads and stores of a warp share an id that is theirs alone.


@pytest.mark.parametrize("later", [0, 1, 32 * POOL_ROWS, 1000])
@pytest.mark.parametrize("waited", [True, False])
def test_a_load_is_told_from_the_warps_later_ones(later: int, waited: bool) -> None:
    """A writer hears from the reader after the first load, whether that was waited for or not; the
    later loads, under way all the time, change nothing."""
    memory = Shadow(4, 4, ROWS)
    reader, writer = WarpClock(0, ROWS), WarpClock(1, ROWS)
    stream, how = Stream(STREAM_ROW, 0, reader), Access(check_initialised=False)
    first = stream.begin()
    assert memory.read(np.array([0]), first.lane, first, how) is None
    if waited:
        stream.settle()
    writer.acquire(reader.release())
    for _ in range(later):
        actor = stream.begin()
        assert memory.read(np.array([1]), actor.lane, actor, how) is None
    writer.acquire(reader.release())
    kinds = [memory.write(np.array([granule]), 0, writer, HOW) for granule in (0, 1)]
    assert (kinds[0] is None) == waited
    assert (kinds[1] is None) == (later == 0)
    assert all(kind is None or kind.kind == WRITE_AFTER_READ for kind in kinds)


def test_who_knows_of_a_stores_end_knows_of_those_before() -> None:
    memory, warp, other = Shadow(8, 4, ROWS), WarpClock(0, ROWS), WarpClock(1, ROWS)
    stream = Stream(STREAM_ROW, 5, warp)
    for granule in range(8):
        actor = stream.begin()
        assert memory.write(np.array([granule]), actor.lane, actor, HOW) is None
    assert memory.read(np.array([7]), 0, other, HOW) is not None
    stream.settle()
    other.acquire(warp.release())
    assert memory.read(np.arange(8), 0, other, HOW) is None


def test_a_stream_is_of_the_generic_proxy() -> None:
    """What tcgen05.st wrote is not fenced by waiting for it."""
    memory, warp = Shadow(1, 4, ROWS), WarpClock(0, ROWS)
    stream, pool = Stream(STREAM_ROW, 1, warp), AsyncPool(3, 1)
    actor = stream.begin()
    memory.write(np.array([0]), actor.lane, actor, HOW)
    stream.settle()
    copy = pool.begin(warp.snapshot(FULL_MASK))
    found = memory.read(np.array([0]), copy.lane, copy, Access(line=2, async_proxy=True))
    assert found is not None and found.kind == MISSING_PROXY_FENCE


# A count that does not fit the threads that arrive.

ARRIVE = """
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], COUNT;
  bar.warp.sync 0xffffffff;
  setp.lt.u32 %p2, %r1, LANES;
  @%p2 mbarrier.arrive.shared::cta.b64 _, [%r20];
"""


@pytest.mark.parametrize("count, lanes, fits", [(32, 32, True), (31, 32, False), (5, 9, False),
                                                (5, 5, True), (33, 32, True)])  # fmt: skip
def test_lanes_that_arrive_in_two_phases(count: int, lanes: int, fits: bool) -> None:
    report = run(ARRIVE.replace("COUNT", str(count)).replace("LANES", str(lanes)))
    assert report.ok == fits, str(report)
    if not fits:
        (finding,) = report.findings
        assert finding.kind == "mbarrier"
        assert f"{count} of its lanes complete the phase" in finding.message
        assert f"other {lanes - count} arrive in the next" in finding.message


# The initialisation of an mbarrier that a copy signals.

COPY = """
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
  FENCE
  bar.sync 0;
  setp.eq.u32 %p2, %r1, ISSUER;
  @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;
  @%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
    [%r20+16], [%rd1], 16, [%r20];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r20], 0;
  @!%p3 bra WAIT;
"""


@pytest.mark.parametrize("issuer", [0, 40])
@pytest.mark.parametrize("fence, works", [
    ("", False), ("fence.acq_rel.cta;", False), ("fence.proxy.async.global;", True),
    ("fence.proxy.async.shared::cta;", True), ("fence.mbarrier_init.release.cluster;", True),
    ("@!%p1 fence.mbarrier_init.release.cluster;", False),
])  # fmt: skip
def test_initialisation_is_fenced_for_copies(fence: str, works: bool, issuer: int) -> None:
    source = aligned(np.arange(4, dtype=np.uint32))
    body = COPY.replace("FENCE", fence).replace("ISSUER", str(issuer))
    report = run(body, source, threads=64)
    assert {f.kind for f in report.findings} == (set() if works else {"missing-proxy-fence"})


def test_the_fence_of_mbarriers_does_not_fence_data() -> None:
    body = """
  mov.u32 %r1, %tid.x; mov.u32 %r20, smem;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 st.shared.b32 [%r20+16], %r1;
  @%p1 st.shared.b32 [%r20+20], %r1;
  @%p1 st.shared.b32 [%r20+24], %r1;
  @%p1 st.shared.b32 [%r20+28], %r1;
  FENCE
  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r20+16], 16;
  @%p1 cp.async.bulk.commit_group;
  @%p1 cp.async.bulk.wait_group 0;
"""
    found = {}
    for fence in ("fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;"):
        target = aligned(np.ones(4, np.uint32))
        report = run(body.replace("FENCE", fence), target)
        found[fence.split(".")[1]] = {finding.kind for finding in report.findings}
    assert found == {"mbarrier_init": {"missing-proxy-fence"}, "proxy": set()}


# Waiting without an arrival.


@pytest.mark.parametrize("sync, works", [
    ("barrier.cluster.arrive; barrier.cluster.wait;", True),
    ("barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.wait;", False),
    ("barrier.cluster.arrive; @%p1 barrier.cluster.wait; @!%p1 barrier.cluster.wait;", True),
    ("barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.arrive;"
     " barrier.cluster.wait;", True),
])  # fmt: skip
def test_each_cluster_wait_needs_an_arrival(sync: str, works: bool) -> None:
    body = f"mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; {sync}"
    report = run_ptx(body, grid=(2, 1, 1), cluster=(2, 1, 1), block=(32, 1, 1), collect=True)
    assert report.ok == works, str(report)
    if not works:
        assert {finding.kind for finding in report.findings} == {"barrier"}
