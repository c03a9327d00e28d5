"""Grids: special registers, clusters, dependent launches, cancelled clusters, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulationFailed, LaunchError, PtxError, UnsupportedInstruction
from fa4.emulator.execute import Report, load_module, run
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.tools.trace import ASYNCHRONOUS, WAIT, Recorder
from tests.emulator.kernels import kinds, module_text, run_ptx

SCHEDULES = ("fifo", "random", "adversarial")
# The thread's place in the grid, linear, in %r1; its place in the output in %rd3.
PLACE = """
  mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y;
  mad.lo.u32 %r1, %r1, %r2, %r3;
  mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ctaid.x;
  mad.lo.u32 %r1, %r1, %r2, %r3;
  mov.u32 %r2, %ntid.x; mov.u32 %r3, %ntid.y; mov.u32 %r4, %ntid.z;
  mul.lo.u32 %r5, %r2, %r3; mul.lo.u32 %r5, %r5, %r4;
  mul.lo.u32 %r1, %r1, %r5;
  mov.u32 %r6, %tid.z; mov.u32 %r7, %tid.y;
  mad.lo.u32 %r6, %r6, %r3, %r7; mov.u32 %r7, %tid.x;
  mad.lo.u32 %r6, %r6, %r2, %r7;
  add.u32 %r1, %r1, %r6;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
"""
shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=15)
@given(shapes, shapes, st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)]))
def test_every_thread_runs_once(
    grid: tuple[int, int, int], block: tuple[int, int, int], cluster: tuple[int, int, int]
) -> None:
    grid = tuple(g * c for g, c in zip(grid, cluster, strict=True))
    count = int(np.prod(grid)) * int(np.prod(block))
    out = np.zeros(count, np.uint32)
    body = PLACE + "atom.global.add.u32 %r9, [%rd3], 1;"
    assert run_ptx(body, [out], grid=grid, block=block, cluster=cluster).ok
    assert out.tolist() == [1] * count


def test_cluster_registers() -> None:
    body = (
        PLACE
        + """
  mov.u32 %r10, %cluster_ctarank; mov.u32 %r11, %cluster_nctarank;
  mov.u32 %r12, %clusterid.x; mov.u32 %r13, %cluster_ctaid.x;
  mad.lo.u32 %r10, %r10, 1000, %r11;
  mad.lo.u32 %r10, %r12, 1000000, %r10;
  mad.lo.u32 %r10, %r13, 100, %r10;
  st.global.b32 [%rd3], %r10;
"""
    )
    out = np.zeros(6, np.uint32)
    run_ptx(body, [out], grid=(6, 1, 1), block=(1, 1, 1), cluster=(2, 1, 1))
    assert out.tolist() == [c // 2 * 1000000 + c % 2 * 1100 + 2 for c in range(6)]


def test_the_memory_of_a_cluster() -> None:
    """Each CTA writes into the shared memory of the other, and reads what it was given."""
    body = (
        PLACE
        + """
  mov.u32 %r20, smem; mov.u32 %r21, %cluster_ctarank; xor.b32 %r22, %r21, 1;
  mapa.shared::cluster.u32 %r23, %r20, %r22;
  add.u32 %r24, %r21, 40;
  {first}
  st.shared::cluster.b32 [%r23], %r24;
  {second}
  ld.shared.b32 %r25, [%r20];
  st.global.b32 [%rd3], %r25;
  {last}
"""
    )
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    for schedule in SCHEDULES:
        out = np.zeros(2, np.uint32)
        text = body.format(first=sync, second=sync, last=sync)
        settings = {"grid": (2, 1, 1), "block": (1, 1, 1), "cluster": (2, 1, 1), "smem": 64}
        assert run_ptx(text, [out], schedule=schedule, **settings).ok
        assert out.tolist() == [41, 40]
        text = body.format(first=sync, second="", last=sync)
        report = run_ptx(text, [out], schedule=schedule, collect=True, **settings)
        assert kinds(report) & {"race", "uninitialised"}


def launches(bodies: list[str], out: np.ndarray, programmatic: bool) -> list[Launch]:
    pointer = (out.ctypes.data.to_bytes(8, "little"),)
    made = [
        Launch("kernel", module_text(body, 1), (3, 1, 1), (32, 1, 1), (1, 1, 1), 0, pointer)
        for body in bodies
    ]
    return [replace(launch, programmatic=programmatic and k > 0) for k, launch in enumerate(made)]


FIRST = PLACE + "griddepcontrol.launch_dependents; nanosleep.u32 9; st.global.b32 [%rd3], %r1;"
SECOND = (
    PLACE
    + """
  {wait}
  ld.global.b32 %r2, [%rd3]; add.u32 %r2, %r2, 7; st.global.b32 [%rd3], %r2;
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("programmatic", [False, True])
def test_dependent_launches(schedule: str, programmatic: bool) -> None:
    out = np.zeros(96, np.uint32)
    pair = launches([FIRST, SECOND.format(wait="griddepcontrol.wait;")], out, programmatic)
    memory = [Allocation("out", out.ctypes.data, out.nbytes, True, out)]
    assert run(pair, memory, Options(schedule=schedule)).ok
    assert out.tolist() == [t + 7 for t in range(96)]


def test_dependent_launch_without_its_wait_is_a_race() -> None:
    out = np.zeros(96, np.uint32)
    memory = [Allocation("out", out.ctypes.data, out.nbytes, True, out)]
    overlapping = launches([FIRST, SECOND.format(wait="")], out, True)
    assert kinds(run(overlapping, memory, Options(collect=True))) == {"race"}
    in_order = launches([FIRST, SECOND.format(wait="")], out, False)
    assert run(in_order, memory, Options(collect=True)).ok


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))
def test_racing_launches_are_named_by_their_own_shapes(
    warps: int, others: int, cluster: int, ctas: int
) -> None:
    """Each side of a race has the CTA, warp and lane of the thread, and its own launch's line."""
    shapes = ((12, others, 1), (cluster * ctas, warps, cluster))
    out = np.zeros(12 * 32 * others, np.uint32)
    texts = (FIRST, "add.u32 %r9, %r9, 0;" + SECOND.format(wait=""))
    pair = [
        replace(one, grid=(grid, 1, 1), block=(32 * size, 1, 1), cluster=(together, 1, 1))
        for one, (grid, size, together) in zip(launches([*texts], out, True), shapes, strict=True)
    ]
    memory = [Allocation("out", out.ctypes.data, out.nbytes, True, out)]
    if ctas * cluster * warps > 12 * others:
        return
    report = run(pair, memory, Options(collect=True, schedule="adversarial"))
    found = [str(finding) for finding in report.findings]
    assert found
    for text in found:
        place = re.search(r"at bytes (\d+)", text)
        assert place is not None
        number = int(place[1]) // 4
        named = r"CTA (\d+) warp (\d+) lane (\d+)"
        names = re.search(rf"{named} \(.* what {named} of launch (\d)", text)
        assert names is not None
        *numbers, other = map(int, names.groups())
        for launch, (cta, warp, lane) in ((1 - other, numbers[:3]), (other, numbers[3:])):
            assert 32 * (cta * (others, warps)[launch] + warp) + lane == number


CANCEL = (
    PLACE
    + """
  mov.u32 %r20, smem; add.u32 %r21, %r20, 16; mov.u32 %r22, 0;
  mbarrier.init.shared::cta.b64 [%r21], 1;
  mov.u32 %r10, %ctaid.x;
NEXT:
  mul.wide.u32 %rd4, %r10, 4; add.s64 %rd5, %rd1, %rd4;
  atom.global.add.u32 %r9, [%rd5], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
    [%r20], [%r21];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], %r22;
  @!%p1 bra WAIT;
  xor.b32 %r22, %r22, 1;
  ld.shared.b128 %q1, [%r20];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
  @!%p2 bra END;
  clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r11, %r12, _}, %q1;
  fence.proxy.async.shared::cta;
  bra NEXT;
END:
"""
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clusters_taken_over(schedule: str) -> None:
    out = np.zeros(23, np.uint32)
    report = run_ptx(
        CANCEL, [out], grid=(23, 1, 1), block=(1, 1, 1), smem=64, schedule=schedule, seed=4
    )
    assert report.ok and out.tolist() == [1] * 23


# Reads the response without query_cancel, as NVIDIA's own kernels may: %r10 to %r12 are x, y, z.
DECODE = """
  ld.shared.v4.b32 {%r10, %r11, %r13, %r14}, [%r20];
  and.b32 %r13, %r13, 1; setp.ne.u32 %p2, %r13, 0;
  shr.u32 %r12, %r11, 16; and.b32 %r11, %r11, 0xffff;
  @!%p2 bra END;
"""
QUERY = """
  ld.shared.b128 %q1, [%r20];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1;
  @!%p2 bra END;
  clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r11, %r12, _}, %q1;
"""
QUERY_SINGLY = QUERY.replace(
    QUERY.splitlines()[-1],
    "".join(
        f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %r{number}, %q1;"
        for axis, number in zip("xyz", (10, 11, 12), strict=True)
    ),
)
STEAL = """
  mov.u32 %r20, smem; add.u32 %r21, %r20, 16; mov.u32 %r22, 0;
  mbarrier.init.shared::cta.b64 [%r21], 1;
  mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y; mov.u32 %r12, %ctaid.z;
NEXT:
  mov.u32 %r2, %nctaid.y; mad.lo.u32 %r1, %r12, %r2, %r11;
  mov.u32 %r2, %nctaid.x; mad.lo.u32 %r1, %r1, %r2, %r10;
  mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd1, %rd4;
  atom.global.add.u32 %r9, [%rd5], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
    [%r20], [%r21];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], %r22;
  @!%p1 bra WAIT;
  xor.b32 %r22, %r22, 1;
  READ
  fence.proxy.async.shared::cta;
  bra NEXT;
END:
"""


@pytest.mark.parametrize("read", [DECODE, QUERY, QUERY_SINGLY])
@pytest.mark.parametrize("grid", [(23, 1, 1), (3, 5, 4), (1, 70, 2)])
def test_who_takes_a_cluster_over_reads_its_place(read: str, grid: tuple[int, int, int]) -> None:
    """Every CTA's work is done once, however the response is read."""
    out = np.zeros(grid, np.uint32)
    run_ptx(STEAL.replace("READ", read), [out], grid=grid, block=(1, 1, 1), smem=64)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (1025, 1, 1)}, "at most 1024, 1024, 64"),
        ({"grid": (0, 1, 1)}, "three positive integers"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of cluster"),
        ({"cluster": (32, 1, 1), "grid": (32, 1, 1)}, "32 CTAs, at most 16"),
        ({"smem": 227 * 1024 + 1}, "at most 232448"),
    ],
)
def test_impossible_launches(change: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run_ptx("mov.u32 %r1, 1;", [], **change)


def test_unusable_texts() -> None:
    good = module_text("mov.u32 %r1, 1;", 0)
    with pytest.raises(LaunchError, match=r"target sm_80: the emulator runs"):
        load_module(good.replace("sm_100a", "sm_80"))
    with pytest.raises(PtxError, match="7"):
        load_module(good.replace("8.8", "7.0"))
    for end in range(len(good) // 2, len(good) - 3, 7):
        with pytest.raises(PtxError):
            load_module(good[:end])


def test_all_unsupported_instructions_are_listed() -> None:
    refused = "wgmma.mma_async.sp.sync.aligned"
    body = f"mov.u32 %r1, 1;\n{refused};\nadd.u32 %r1, %r1, 1;\ntex.1d.v4.s32.s32 %r1;"
    with pytest.raises(UnsupportedInstruction) as failure:
        run_ptx(body, [])
    lines = [line for line, _, _ in failure.value.problems]
    assert len(lines) == 2 and lines[1] == lines[0] + 2
    assert refused in str(failure.value) and f"line {lines[1]}" in str(failure.value)


def test_unknown_schedule() -> None:
    with pytest.raises(LaunchError, match="allowed are fifo, random, adversarial"):
        Options(schedule="lifo")


def test_global_memory_of_others_is_out_of_reach() -> None:
    out, other = np.zeros(8, np.uint32), np.zeros(1 << 16, np.uint8)
    address = other.ctypes.data + 1024
    body = f"mov.b64 %rd9, {address}; ld.global.b32 %r1, [%rd9];"
    report = run_ptx(body, [out], collect=True)
    assert kinds(report) == {"out-of-bounds"}
    with pytest.raises(EmulationFailed, match="reads 4 bytes at global address"):
        run_ptx(body, [out])


def counted(text: str, **options: object) -> Report:
    return run_ptx(text, [np.zeros(23, np.uint32)], grid=(23, 1, 1), block=(1, 1, 1), smem=64,
                   **options)  # fmt: skip


def test_counts_and_trace() -> None:
    recorder = Recorder()
    report = counted(CANCEL, events=recorder)
    assert report.warp_instructions["atom.global.add.u32"] == 23
    assert sum(report.by_warp[0].values()) == report.warp_instructions.total()
    columns = recorder.arrays()
    assert (columns["end"] >= columns["start"]).all()
    cancels = columns["kind"] == ASYNCHRONOUS
    assert (
        cancels.sum()
        == report.warp_instructions[
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
        ]
    )
    assert (columns["kind"] == WAIT).any()
    trace = recorder.perfetto()["traceEvents"]
    rows: dict[tuple[int, int], int] = {}
    for event in trace:
        if event["ph"] == "X":
            key = (event["pid"], event["tid"])
            assert event["ts"] >= rows.get(key, 0)
            rows[key] = event["ts"] + event["dur"]


def test_same_seed_same_run() -> None:
    runs = []
    for seed in (1, 1, 2):
        recorder = Recorder()
        counted(CANCEL, schedule="random", seed=seed, events=recorder)
        runs.append(recorder.events)
    assert runs[0] == runs[1] != runs[2]
