"""Kernels around tcgen05.mma with one synchronisation left out: each must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fa4.emulator.execute import Report
from fa4.emulator.machine import grid
from fa4.emulator.machine.state import Grid
from fa4.emulator.machine.tensor import SwizzleNotes, swizzle_of
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.kernels import kinds, run_ptx
from tests.emulator.tensor_kernels import (
    DATA,
    DECLARATIONS,
    LANE_ADDRESS,
    SCHEDULES,
    SHARED_START,
    TensorKernel,
    load_values,
    own_row,
    read_out,
    registers,
    wait,
)
from tests.emulator.tensor_operands import commit, mma, operands

LANES, N = 128, 32
PROBLEM = operands("f16", Format.F16, LANES, N)
MMA = mma(PROBLEM, "f16")
AGAIN = mma(PROBLEM, "f16", accumulate="1")
GOOD = TensorKernel(
    image_bytes=PROBLEM.image.shape[1], work=MMA + commit(), after=wait() + read_out("%rd2", N)
)


def run(kernel: TensorKernel, **options: Any) -> Report:
    out = np.zeros((kernel.group * LANES, N), np.uint32)
    a_words = PROBLEM.a.astype(np.float16).view(np.uint32)
    return kernel.run([np.repeat(PROBLEM.image, kernel.group, 0), out, a_words], **options)


def test_the_kernel_without_a_fault() -> None:
    for schedule in SCHEDULES:
        assert run(GOOD, schedule=schedule).ok


A_STORE = (
    own_row("%rd3", 8) + load_values(8) + LANE_ADDRESS
    + f"  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r22+32], {registers(8)};\n"
)  # fmt: skip
A_IN_TMEM = GOOD.but(
    before=A_STORE + "  tcgen05.wait::st.sync.aligned;\n  tcgen05.fence::before_thread_sync;\n"
    "  bar.sync 0;\n  tcgen05.fence::after_thread_sync;\n",
    work=mma(PROBLEM, "f16", a="[%r21+32]") + commit(),
)
# A second MMA overwrites D while the warps still read the first; the release is `second`.
PING_PONG = """
{read}
  mbarrier.arrive.shared::cta.b64 _, [%r20+8];
  @!%p1 bra LATER;
""" + wait(8, name="FREE") + MMA + commit() + "LATER:\n" + wait(0, 1, "AGAIN") + """
"""  # fmt: skip
LOAD = LANE_ADDRESS + f"  tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(32)}, [%r22];\n"
REUSE = GOOD.but(
    barriers=(1, LANES),
    after=wait() + PING_PONG.format(read=LOAD + "  tcgen05.wait::ld.sync.aligned;"),
)


def unused_load(kernel: TensorKernel) -> TensorKernel:
    return kernel.but(after=kernel.after.replace("tcgen05.wait::ld.sync.aligned;", ""))


def late_read(kernel: TensorKernel) -> TensorKernel:
    """The warps release the accumulator before they read it."""
    load = LOAD + "  tcgen05.wait::ld.sync.aligned;"
    return kernel.but(after=kernel.after.replace(load, "").replace("@!%p1 bra LATER;",
                      load + "  @!%p1 bra LATER;"))  # fmt: skip


# name: (kernel, findings of which one must be there, schedules that show it)
FAULTS: dict[str, tuple[TensorKernel, set[str]]] = {
    "no commit": (GOOD.but(work=MMA), {"deadlock"}),
    "no commit, no wait": (GOOD.but(work=MMA, after=read_out("%rd2", N)), {"race"}),
    "commit before the MMA": (GOOD.but(work=commit() + MMA), {"race"}),
    "nobody waits for the mbarrier": (GOOD.but(after=read_out("%rd2", N)), {"race"}),
    "nobody waits before dealloc": (GOOD.but(after=""), {"race"}),
    "no fence.proxy.async": (GOOD.but(fence=""), {"missing-proxy-fence"}),
    "no barrier behind the fill": (
        GOOD.but(sync="", before="  bar.sync 1, 128;\n").but(fence="bar.warp.sync 0xffffffff;"),
        {"missing-proxy-fence", "race"},
    ),
    "accumulates on nothing": (GOOD.but(work=AGAIN + commit()), {"uninitialised"}),
    "operands were never written": (GOOD.but(fill=False), {"uninitialised"}),
    "issued by a warp": (
        GOOD.but(before="  setp.eq.u32 %p1, %r2, 0;\n", barriers=(32,)),
        {"divergence"},
    ),
    "columns not allocated": (
        GOOD.but(columns=32, work=MMA.replace("[%r21]", "[%r26]").replace(
            "tcgen05.mma", "add.u32 %r26, %r21, 16;\n  tcgen05.mma") + commit()),
        {"tmem"},
    ),
    "A not allocated": (A_IN_TMEM.but(columns=32, before=""), {"tmem"}),
    "no wait::st before A is read": (
        A_IN_TMEM.but(before=A_STORE + "  bar.sync 0;\n"), {"race"}
    ),
    "no barrier before A is read": (
        A_IN_TMEM.but(before=A_STORE + "  tcgen05.wait::st.sync.aligned;\n"),
        {"race", "uninitialised"},
    ),
    "released without wait::ld": (unused_load(REUSE), {"race"}),
    "released before the load": (late_read(REUSE), {"race"}),
    "descriptor of another chip": (
        GOOD.but(work=MMA.replace("mov.b64 %rd21", "mov.b64 %rd23").replace(
            "  tcgen05", "  mov.b64 %rd21, 0;\n  tcgen05") + commit()), {"descriptor"}
    ),
    "sparse descriptor": (
        GOOD.but(work=MMA.replace("  setp.ne", "  or.b32 %r25, %r25, 4;\n  setp.ne") + commit()),
        {"descriptor"},
    ),
    "operands past the end": (
        GOOD.but(work=MMA.replace("  setp.ne", "  add.u64 %rd21, %rd21, 0x200;\n  setp.ne")
                 + commit()), {"out-of-bounds"}
    ),
    "pair instruction without a pair": (
        GOOD.but(work=mma(PROBLEM, "f16", group=2) + commit()), {"tmem"}
    ),
    "commit to no mbarrier": (GOOD.but(work=MMA + commit(16)), {"mbarrier"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    kernel, expected = FAULTS[name]
    for schedule in SCHEDULES:
        report = run(kernel, schedule=schedule)
        assert kinds(report) & expected, f"{schedule}: {report}"


def test_a_race_on_tensor_memory_names_columns_and_lanes() -> None:
    (finding, *_) = run(FAULTS["no wait::st before A is read"][0], max_findings=1).findings
    assert "in TMEM column 32, lanes 0..15); CTA 0" in finding.message
    assert "bytes" not in finding.message


@pytest.mark.parametrize("kernel", [A_IN_TMEM, REUSE])
def test_kernels_that_the_faults_are_planted_in(kernel: TensorKernel) -> None:
    for schedule in SCHEDULES:
        for seed in range(3):
            report = run(kernel, schedule=schedule, seed=seed)
            assert report.ok, str(report)


def test_without_checks_the_values_still_come_out() -> None:
    out = np.zeros((LANES, N), np.uint32)
    report = GOOD.run([PROBLEM.image.copy(), out], checks=False, schedule="random")
    assert report.ok
    np.testing.assert_array_equal(out.view(np.float32), PROBLEM.product)


# Two threads issue to one pipe.

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
SECOND = (
    "  setp.ne.u32 %p1, %r1, 32;\n  @%p1 bra SKIP;\n" + AGAIN + commit() + "SKIP:\n" + wait()
    + read_out("%rd2", N)
)  # fmt: skip


@pytest.mark.parametrize("work, handover, fine", [
    (MMA, BEFORE + "bar.sync 0;\n" + AFTER, True),
    (MMA, "bar.sync 0;\n" + AFTER, False),
    (MMA, BEFORE + "bar.sync 0;\n", False),
    (MMA, "bar.sync 0;\n", False),
    (MMA + commit(8), wait(8, name="FIRST"), True),
    (MMA + commit(8), "bar.sync 0;\n", False),
])  # fmt: skip
def test_the_pipe_orders_operations_of_one_thread_only(
    work: str, handover: str, fine: bool
) -> None:
    kernel = GOOD.but(barriers=(1, 1), work=work, after=handover + SECOND)
    for schedule in SCHEDULES:
        report = run(kernel, schedule=schedule)
        assert kinds(report) == (set() if fine else {"race"}), str(report)
        assert fine or "the tensor pipe orders operations of one thread only" in str(report)


@pytest.mark.parametrize("column, fine", [(N, True), (0, False)])
def test_threads_may_issue_to_columns_of_their_own(column: int, fine: bool) -> None:
    """Both commit, and all wait for both."""
    other = f"  add.u32 %r26, %r21, {column};\n" + mma(PROBLEM, "f16", d="%r26")
    second = SECOND.replace(AGAIN, other) + wait(8, name="FIRST")
    kernel = GOOD.but(barriers=(1, 1), work=MMA + commit(8), after=second)
    assert kinds(run(kernel)) == (set() if fine else {"race"})


# Pairs.

PAIR = operands("f16", Format.F16, 256, N, group=2)
RANK = "  mov.b16 %h1, 3;\n  mov.u32 %r5, %cluster_ctarank;\n  setp.ne.u32 %p6, %r5, 0;\n"
LEADER = "  @%p6 bra JOIN;\n"
CLUSTER_SYNC = "  barrier.cluster.arrive.release;\n  barrier.cluster.wait.acquire;\n"
BOTH = commit(group=2).replace(".b64", ".multicast::cluster.b64").replace("];", "], %h1;")
PAIR_KERNEL = TensorKernel(
    group=2,
    image_bytes=PAIR.image.shape[1],
    before=RANK + CLUSTER_SYNC,
    work=LEADER + mma(PAIR, "f16", group=2) + BOTH,
    after=wait() + read_out("%rd2", N),
    sync_end=CLUSTER_SYNC,
)
PAIR_FAULTS = {
    "peer has not filled": (PAIR_KERNEL.but(before=RANK),
                            {"race", "uninitialised", "mbarrier", "tmem", "missing-proxy-fence"}),
    "only one CTA is signalled": (PAIR_KERNEL.but(work=PAIR_KERNEL.work.replace(
        "tcgen05.commit", "mov.b16 %h1, 1;\n  tcgen05.commit")), {"deadlock"}),
    "peer exits early": (
        PAIR_KERNEL.but(sync_end="bar.sync 0;", after="  @%p6 bra LAST;\n" + wait()
                        + read_out("%rd2", N) + "LAST:\n"), {"exit", "race"}),
    "issued by both CTAs": (PAIR_KERNEL.but(work=mma(PAIR, "f16", group=2) + BOTH),
                            {"mbarrier", "race"}),
}  # fmt: skip


def run_pair(kernel: TensorKernel, **options: Any) -> Report:
    return kernel.run([PAIR.image.copy(), np.zeros((2 * LANES, N), np.uint32)], **options)


@pytest.mark.parametrize("name", PAIR_FAULTS)
def test_fault_of_a_pair_is_found(name: str) -> None:
    kernel, expected = PAIR_FAULTS[name]
    found = set().union(*(kinds(run_pair(kernel, schedule=s, seed=1)) for s in SCHEDULES))
    assert found & expected, found


def test_pair_without_a_fault() -> None:
    for schedule in SCHEDULES:
        report = run_pair(PAIR_KERNEL, schedule=schedule)
        assert report.ok, str(report)


# Swizzles.


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Notes a swizzle for all operands, as a TMA load would have."""
    original = grid.start_cluster

    def use(span_bytes: int | None) -> None:
        def start(started: Grid, index: int) -> None:
            original(started, index)
            for cta in started.resident[-1].ctas:
                cta.swizzles.note(DATA, DATA + PROBLEM.image.shape[1], span_bytes)

        monkeypatch.setattr(grid, "start_cluster", start)

    return use


def filled_by_copy() -> Report:
    size = PROBLEM.image.shape[1]
    work = f"""
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8], {size};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20+{DATA - SHARED_START}],
    [%rd1], {size}, [%r20+8];
""" + wait(8, name="FULL") + MMA + commit()  # fmt: skip
    kernel = GOOD.but(barriers=(1, 1), image_bytes=0, work=work)
    out = np.zeros((LANES, N), np.uint32)
    return run_ptx(
        kernel.text(), [PROBLEM.image.copy(), out], block=(LANES, 1, 1), collect=True,
        smem=DATA - SHARED_START + size, declarations=DECLARATIONS,
    )  # fmt: skip


@pytest.mark.parametrize(("span", "found"), [(32, set()), (None, set()), (128, {"descriptor"}),
                                             (0, {"descriptor"})])  # fmt: skip
def test_descriptor_must_have_the_swizzle_of_the_copy(noting, span, found) -> None:
    noting(span)
    assert kinds(filled_by_copy()) == found
    # Threads that wrote the bytes since then may have laid them out differently.
    assert run(GOOD).ok


def test_swizzle_notes() -> None:
    notes = SwizzleNotes()
    assert notes.at(5000) is None
    notes.note(4096, 6144, 128, 32)
    assert notes.at(4096) == notes.at(6143) == (128, 32)
    assert notes.at(6144) is None and notes.at(4095) is None
    notes.note(5120, 5136, None)
    assert notes.at(5120) is None and notes.at(4096) == (128, 32)
    spans = {Swizzle.NONE: (0, 16), Swizzle.B32: (32, 16), Swizzle.B64: (64, 16),
             Swizzle.B128: (128, 16), Swizzle.B128_BASE32: (128, 32)}  # fmt: skip
    assert {swizzle: swizzle_of(swizzle) for swizzle in Swizzle} == spans
