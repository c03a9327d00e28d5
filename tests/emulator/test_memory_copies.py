"""cp.async and cp.async.bulk: data, groups, mbarriers, and the races of those who do not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from tests.emulator.kernels import aligned, kinds, run_ptx

FEW = settings(max_examples=8)
SCHEDULES = ("fifo", "random", "adversarial")
LANE = "mov.u32 %r1, %tid.x; cvt.u64.u32 %rd20, %r1; mov.u32 %r2, smem;\n"
ELECT = "setp.eq.u32 %p1, %r1, 0;\n"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;"


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return aligned(np.random.default_rng(seed).integers(0, 256, count, np.uint8))


# cp.async


@FEW
@given(
    size=st.sampled_from([4, 8, 16]),
    taken=st.lists(st.integers(0, 16), min_size=32, max_size=32),
    mask=st.integers(1, 2**32 - 1),
    schedule=st.sampled_from(SCHEDULES),
)
def test_cp_async_fills_with_zeros(size: int, taken: list[int], mask: int, schedule: str) -> None:
    """Each active lane copies its own number of bytes; the others' places stay as they were."""
    source, out = random_bytes(32 * size), aligned(np.zeros(32 * size, np.uint8))
    counts = np.minimum(taken, size).astype(np.uint32)
    body = (
        LANE
        + f"""
      mad.lo.s64 %rd21, %rd20, {size}, %rd1; mad.lo.s64 %rd22, %rd20, {size}, %rd2;
      mad.wide.u32 %rd23, %r1, 4, %rd3; ld.global.b32 %r4, [%rd23];
      mad.lo.u32 %r3, %r1, {size}, %r2; mov.b32 %r9, 0x07070707;
      {"".join(f"st.shared.b32 [%r3+{k}], %r9;" for k in range(0, size, 4))}
      mov.u32 %r6, {mask}; shr.u32 %r6, %r6, %r1; and.b32 %r6, %r6, 1; setp.eq.u32 %p1, %r6, 1;
      @%p1 cp.async.ca.shared.global [%r3], [%rd21], {size}, %r4;
      cp.async.commit_group; cp.async.wait_group 0;
    """
    )
    for k in range(0, size, 4):
        body += f"ld.shared.b32 %r5, [%r3+{k}]; st.global.b32 [%rd22+{k}], %r5;"
    report = run_ptx(body, [source, out, counts], smem=512, schedule=schedule)
    expected = np.full((32, size), 7, np.uint8)
    for lane in range(32):
        if mask >> lane & 1:
            expected[lane] = 0
            expected[lane, : counts[lane]] = source.reshape(32, size)[lane, : counts[lane]]
    np.testing.assert_array_equal(out.reshape(32, size), expected)
    assert report.ok


def test_ignored_sources_are_not_read() -> None:
    """With ignore-src or no bytes, the address may point nowhere."""
    out = aligned(np.ones(4, np.uint32))
    body = (
        LANE
        + ELECT
        + """
      mov.u64 %rd9, 48; setp.ne.u32 %p3, %r1, 99; mov.u32 %r4, 0;
      @%p1 cp.async.cg.shared.global.L2::128B [%r2], [%rd9], 16, %p3;
      @%p1 cp.async.ca.shared.global.L2::cache_hint [%r2+16], [%rd9], 16, %r4, %rd9;
      cp.async.wait_all;
      @%p1 ld.shared.v2.b64 {%rd10, %rd11}, [%r2+16]; @%p1 st.global.v2.b64 [%rd1], {%rd10, %rd11};
    """
    )
    run_ptx(body, [out], smem=64)
    assert out.tolist() == [0, 0, 0, 0]


GROUPS = (
    LANE
    + """
  mad.lo.s64 %rd21, %rd20, 4, %rd1; mad.lo.u32 %r3, %r1, 4, %r2;
  cp.async.ca.shared.global [%r3], [%rd21], 4; cp.async.commit_group;
  cp.async.ca.shared.global [%r3+128], [%rd21+128], 4; cp.async.commit_group;
  {wait}
  ld.shared.b32 %r4, [%r3{offset}]; mad.lo.s64 %rd22, %rd20, 4, %rd2; st.global.b32 [%rd22], %r4;
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("wait", "offset", "ordered"),
    [
        ("cp.async.wait_group 1;", "", True),
        ("cp.async.wait_group 1;", "+128", False),
        ("cp.async.wait_group 0;", "+128", True),
        ("cp.async.wait_all;", "+128", True),
        ("cp.async.wait_group 2;", "", False),
        ("", "", False),
    ],
)
def test_waiting_for_all_groups_but_the_latest(
    schedule: str, wait: str, offset: str, ordered: bool
) -> None:
    source, out = random_bytes(256), np.zeros(32, np.uint32)
    report = run_ptx(
        GROUPS.format(wait=wait, offset=offset), [source, out], smem=256, schedule=schedule,
        collect=True,
    )  # fmt: skip
    assert kinds(report) - {"exit"} == (set() if ordered else {"race"})
    if ordered:
        start = int(offset or 0) // 4
        np.testing.assert_array_equal(out, source.view(np.uint32)[start : start + 32])


@pytest.mark.parametrize(("barrier", "ordered"), [("bar.sync 0;", True), ("", False)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_warps_need_a_barrier_too(schedule: str, barrier: str, ordered: bool) -> None:
    body = (
        LANE
        + f"""
      mad.lo.s64 %rd21, %rd20, 4, %rd1; mad.lo.u32 %r3, %r1, 4, %r2;
      cp.async.ca.shared.global [%r3], [%rd21], 4; cp.async.wait_all; {barrier}
      xor.b32 %r3, %r3, 128; ld.shared.b32 %r4, [%r3];
    """
    )
    report = run_ptx(body, [random_bytes(256)], block=(64, 1, 1), smem=256, collect=True,
                     schedule=schedule)  # fmt: skip
    found = kinds(report)
    assert not found if ordered else found & {"race", "uninitialised"}


def test_a_copy_may_outlive_its_warp() -> None:
    """A thread's own loads keep its CTA on the SM until they are done."""
    text = GROUPS.format(wait="", offset="").split("ld.shared")[0]
    arrays = [random_bytes(256), np.zeros(32, np.uint32)]
    assert run_ptx(text, arrays, smem=256, collect=True).ok


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("noinc", "count"), [(".noinc", 32), ("", 1)])
def test_cp_async_arrives_at_an_mbarrier(schedule: str, noinc: str, count: int) -> None:
    arrive = "" if noinc else "@%p1 mbarrier.arrive.shared.b64 _, [%r2];"
    body = (
        LANE
        + ELECT
        + f"""
      @%p1 mbarrier.init.shared.b64 [%r2], {count};
      bar.sync 0;
      mad.lo.s64 %rd21, %rd20, 16, %rd1; mad.lo.u32 %r3, %r1, 16, %r2;
      cp.async.cg.shared.global [%r3+64], [%rd21], 16;
      cp.async.mbarrier.arrive{noinc}.shared.b64 [%r2]; {arrive}
    again: {WAIT}
      xor.b32 %r3, %r3, 16; ld.shared.v2.b64 {{%rd10, %rd11}}, [%r3+64];
      xor.b32 %r4, %r1, 1; mad.wide.u32 %rd22, %r4, 16, %rd2;
      st.global.v2.b64 [%rd22], {{%rd10, %rd11}};
    """
    )
    source, out = random_bytes(512), random_bytes(512, 1)
    report = run_ptx(body, [source, out], smem=1024, schedule=schedule)
    np.testing.assert_array_equal(out, source)
    assert report.ok


# cp.async.bulk into shared memory

LOAD = (
    LANE
    + ELECT
    + """
  @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
  @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r2+128], [%rd1], 512, [%r2];
again: """
    + WAIT
    + """
  mad.lo.u32 %r3, %r1, 16, %r2; ld.shared.v2.b64 {%rd10, %rd11}, [%r3+128];
  mad.lo.s64 %rd22, %rd20, 16, %rd2; st.global.v2.b64 [%rd22], {%rd10, %rd11};
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_a_bulk_load(schedule: str, space: str) -> None:
    source, out = random_bytes(512), random_bytes(512, 1)
    text = LOAD.replace("shared::cluster.global", f"{space}.global")
    assert run_ptx(text, [source, out], smem=1024, schedule=schedule).ok
    np.testing.assert_array_equal(out, source)


PLANTED: dict[str, tuple[Callable[[str], str], str]] = {
    "no wait": (lambda t: t.replace(WAIT, ""), "race"),
    "no barrier object": (lambda t: t.replace("512, [%r2];", "512, [%r2+8];"), "mbarrier"),
    "too many bytes expected": (lambda t: t.replace("[%r2], 512", "[%r2], 528"), "deadlock"),
    "misaligned": (lambda t: t.replace("[%r2+128], [%rd1]", "[%r2+120], [%rd1]"), "misaligned"),
    "odd size": (lambda t: t.replace("[%rd1], 512", "[%rd1], 504"), "misaligned"),
    "past the buffer": (lambda t: t.replace("[%rd1], 512", "[%rd1+16], 512"), "out-of-bounds"),
    "past smem": (lambda t: t.replace("[%r2+128], [%rd1]", "[%r2+528], [%rd1]"), "out-of-bounds"),
    "exit": (lambda t: t.split("again:")[0], "exit"),
    "overwritten": (lambda t: t.replace("again:", "st.shared.b32 [%r2+256], %r1; again:"), "race"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_faults_of_bulk_loads(what: str) -> None:
    change, kind = PLANTED[what]
    arrays = [random_bytes(512), random_bytes(512, 1)]
    report = run_ptx(change(LOAD), arrays, smem=1024, collect=True, schedule="adversarial")
    assert kind in kinds(report)


def test_a_bulk_load_sent_to_several_ctas() -> None:
    """CTA 2 of 4 sends to CTAs 0, 1 and 3; each waits at its own mbarrier."""
    body = (
        LANE
        + """
      mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p4, %r9, 2;
      and.pred %p4, %p4, %p1; setp.eq.u32 %p5, %r9, 2;
      @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
      @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
      barrier.cluster.arrive; barrier.cluster.wait;
      mov.b16 %h1, 11;
      @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r2+128], [%rd1], 128, [%r2], %h1;
      @%p5 bra done;
    again: """
        + WAIT
        + """
      mad.lo.u32 %r3, %r1, 4, %r2; ld.shared.b32 %r4, [%r3+128];
      mad.lo.u32 %r5, %r9, 32, %r1; mad.wide.u32 %rd22, %r5, 4, %rd2; st.global.b32 [%rd22], %r4;
    done: barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    source, out = random_bytes(128), np.zeros((4, 32), np.uint32)
    for schedule in SCHEDULES:
        out[:] = 0
        options: dict[str, Any] = {
            "grid": (4, 1, 1),
            "cluster": (4, 1, 1),
            "smem": 1024,
            "schedule": schedule,
        }
        assert run_ptx(body, [source, out], **options).ok
        for rank in range(4):
            expected = 0 if rank == 2 else source.view(np.uint32)
            np.testing.assert_array_equal(out[rank], np.broadcast_to(expected, 32))
    report = run_ptx(body.replace("%h1, 11", "%h1, 27"), [source, out], collect=True, **options)
    assert kinds(report) == {"out-of-bounds"}


EXCHANGE = (
    LANE
    + """
  mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r1, 0; xor.b32 %r8, %r9, 1;
  @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
  mad.lo.u32 %r3, %r1, 4, %r2; mad.lo.u32 %r4, %r9, 100, %r1; st.shared.b32 [%r3+128], %r4;
  mov.u32 %r5, 1000; st.shared.b32 [%r3+256], %r5;
  {fence}
  barrier.cluster.arrive; barrier.cluster.wait;
  mapa.shared::cluster.u32 %r6, %r2, %r8;
  @%p1 {copy} [%r6+256], [%r2+128], 128, [%r6];
again: """
    + WAIT
    + """
  ld.shared.b32 %r7, [%r3+256];
  mad.lo.u32 %r5, %r9, 32, %r1; mad.wide.u32 %rd22, %r5, 4, %rd1; st.global.b32 [%rd22], %r7;
  barrier.cluster.arrive; barrier.cluster.wait;
"""
)
FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("prefix", "suffix", "base"), [
    ("cp.async.bulk", "", 0), ("cp.reduce.async.bulk", ".add.u32", 1000),
])  # fmt: skip
def test_copies_between_ctas(schedule: str, prefix: str, suffix: str, base: int) -> None:
    copy = f"{prefix}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{suffix}"
    out = np.zeros(64, np.uint32)
    options: dict[str, Any] = {
        "grid": (2, 1, 1),
        "cluster": (2, 1, 1),
        "smem": 1024,
        "schedule": schedule,
    }
    assert run_ptx(EXCHANGE.format(fence=FENCE, copy=copy), [out], **options).ok
    lane = np.arange(32)
    np.testing.assert_array_equal(out, base + np.concatenate([lane + 100, lane]))
    report = run_ptx(EXCHANGE.format(fence="", copy=copy), [out], collect=True, **options)
    assert kinds(report) == {"missing-proxy-fence"}


# cp.async.bulk into global memory

STORE = (
    LANE
    + ELECT
    + """
  mad.lo.u32 %r3, %r1, 4, %r2; mad.wide.u32 %rd9, %r1, 4, %rd1; ld.global.b32 %r4, [%rd9];
  st.shared.b32 [%r3+128], %r4;
  {fence}
  bar.sync 0;
  @%p1 {copy} [%rd2], [%r2+128], 128{operands};
  @%p1 cp.async.bulk.commit_group;
  @%p1 {wait}
  bar.warp.sync 0xffffffff;
  {after}
"""
)
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
WAIT_READ, WAIT_ALL = "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"
REUSE = "st.shared.b32 [%r3+128], %r1;"
READ_BACK = "mad.wide.u32 %rd9, %r1, 4, %rd2; ld.global.b32 %r5, [%rd9];"


def store_text(fence: str = FENCE, copy: str = BULK_STORE, operands: str = "",
               wait: str = WAIT_READ, after: str = "") -> str:  # fmt: skip
    return STORE.format(fence=fence, copy=copy, operands=operands, wait=wait, after=after)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({}, None),
        ({"after": REUSE}, None),
        ({"after": REUSE, "wait": "mov.u32 %r9, 0;"}, "race"),
        ({"wait": WAIT_ALL, "after": READ_BACK}, None),
        ({"wait": WAIT_READ, "after": READ_BACK}, "race"),
        ({"wait": WAIT_ALL, "after": READ_BACK + REUSE}, None),
        ({"fence": ""}, "missing-proxy-fence"),
        ({"wait": "cp.async.bulk.wait_group.read 1;", "after": REUSE}, "race"),
    ],
)
def test_bulk_stores(schedule: str, options: dict[str, str], finding: str | None) -> None:
    source, out = random_bytes(128), random_bytes(128, 1)
    report = run_ptx(
        store_text(**options), [source, out], smem=512, schedule=schedule, collect=True
    )
    assert kinds(report) - {"exit"} == ({finding} if finding else set())
    if finding is None:
        np.testing.assert_array_equal(out, source)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store_that_nobody_waited_for_outlives_its_source(schedule: str) -> None:
    """Whether it has read in time or not."""
    text = store_text(wait="mov.u32 %r9, 0;")
    report = run_ptx(text, [random_bytes(128), random_bytes(128, 1)], smem=512, collect=True,
                     schedule=schedule)  # fmt: skip
    assert kinds(report) == {"exit"}


@pytest.mark.parametrize("mask", [0xFFFF, 0x0001, 0xA5C3, 0])
def test_bytes_chosen_by_a_mask(mask: int) -> None:
    source, out = random_bytes(128), random_bytes(128, 1)
    before = out.copy()
    text = store_text(copy=BULK_STORE + ".cp_mask", operands=f", {mask}", wait=WAIT_ALL)
    run_ptx(text, [source, out], smem=512)
    chosen = np.array([mask >> k % 16 & 1 for k in range(128)], bool)
    np.testing.assert_array_equal(out, np.where(chosen, source, before))


@pytest.mark.parametrize(("second", "races"), [(0xFF00, False), (0xFF80, True)])
def test_ctas_that_store_parts_of_the_same_16_bytes(second: int, races: bool) -> None:
    choose = f"mov.u32 %r8, %ctaid.x; setp.eq.u32 %p5, %r8, 0; selp.b16 %h1, 255, {second}, %p5;"
    text = store_text(copy=BULK_STORE + ".cp_mask", operands=", %h1", fence=FENCE + choose)
    report = run_ptx(text, [random_bytes(128), random_bytes(128, 1)], grid=(2, 1, 1), smem=512,
                     collect=True)  # fmt: skip
    assert kinds(report) == ({"race"} if races else set())


@pytest.mark.parametrize(
    ("suffix", "dtype", "rule"),
    [
        ("add.f32", np.float32, np.add),
        ("add.u64", np.uint64, np.add),
        ("min.s32", np.int32, np.minimum),
        ("max.u32", np.uint32, np.maximum),
        ("xor.b64", np.uint64, np.bitwise_xor),
        ("add.noftz.f16", np.float16, np.add),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_reductions_of_many_ctas(
    suffix: str, dtype: type, rule: np.ufunc, schedule: str
) -> None:
    """Four CTAs combine the same source with one destination; nothing orders them."""
    small: np.ndarray = (
        np.random.default_rng(5).integers(0, 50, 128 // np.dtype(dtype).itemsize).astype(dtype)
    )
    source, out = aligned(small), aligned(small[::-1].copy())
    expected = out.copy()
    for _ in range(4):
        expected = rule(expected, source).astype(dtype)
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group." + suffix
    text = store_text(copy=copy, wait=WAIT_ALL)
    shape: dict[str, Any] = {"grid": (4, 1, 1), "smem": 512, "schedule": schedule}
    report = run_ptx(text, [source, out], **shape)
    np.testing.assert_array_equal(out, expected)
    assert report.ok
    strict = run_ptx(text, [source, out], collect=True, ordered_sums=True, **shape)
    assert kinds(strict) == ({"race"} if "add" in suffix and ".f" in suffix else set())


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.ca.shared.global [%r2], [%rd1], 12;",
        "cp.async.cg.shared.global [%r2], [%rd1], 8;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.b32 [%rd1], [%r2], 16;",
        "cp.async.bulk.global.shared::cluster.bulk_group [%rd1], [%r2], 16;",
        "cp.async.wait_group %r1;",
    ],
)  # fmt: skip
def test_forms_that_ptx_excludes(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text, [np.zeros(8, np.uint32)], smem=64)
