"""Tensor copies: boxes against NumPy slices, signals, tensor maps that kernels change, faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.tma.descriptor import TensorMap
from tests.emulator.kernels import aligned, kinds, run_ptx

FEW = settings(max_examples=10)
SCHEDULES = ("fifo", "random", "adversarial")
ELEMENTS = {
    "u8": np.uint8, "u16": np.uint16, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f32": np.float32, "s32": np.int32, "u64": np.uint64, "f64": np.float64,
}  # fmt: skip
COMPLETE = "mbarrier::complete_tx::bytes"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;"


def tensor(dims: tuple[int, ...], element: str, seed: int = 0) -> np.ndarray:
    """A tensor of small numbers whose axis 0 is dimension 0, contiguous; other strides are
    multiples of 16 bytes."""
    dtype = np.dtype(ELEMENTS[element])
    raw = aligned(np.zeros((*dims[:0:-1], pitch_of(dims, dtype)), dtype))
    raw[...] = np.random.default_rng(seed).integers(0, 60, raw.shape).astype(dtype)
    return raw.T[: dims[0]]


def pitch_of(dims: tuple[int, ...], dtype: np.dtype) -> int:
    """Elements from one line of a tensor to the next."""
    return -(-dims[0] * dtype.itemsize // 16) * 16 // dtype.itemsize


def buffer_of(array: np.ndarray) -> np.ndarray:
    """All of the memory of a tensor, padding included, as a contiguous array."""
    shape = (*array.shape[:0:-1], pitch_of(array.shape, array.dtype))
    return np.lib.stride_tricks.as_strided(array.T, shape)


def tensor_map(array: np.ndarray, element: str, box: tuple[int, ...], **options: Any) -> TensorMap:
    return TensorMap(
        address=array.ctypes.data, element=element, dims=array.shape,
        strides_bytes=array.strides[1:], box=box, element_strides=(1,) * array.ndim, **options,
    )  # fmt: skip


def box_in_smem(
    array: np.ndarray, at: tuple[int, ...], box: tuple[int, ...], swizzle: int = 0
) -> np.ndarray:
    """The bytes a load leaves in shared memory that starts at a multiple of 1024."""
    size = array.itemsize
    data = np.zeros(int(np.prod(box)) * size, np.uint8)
    index_mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    for position, index in enumerate(product(*(range(b) for b in reversed(box)))):
        place = tuple(c + i for c, i in zip(at, reversed(index), strict=True))
        if all(0 <= p < d for p, d in zip(place, array.shape, strict=True)):
            byte = position * size
            # The 16-byte chunk's number within its span changes with the 128-byte line.
            byte ^= ((byte // 128) & index_mask) * 16
            data[byte : byte + size] = np.frombuffer(array[place].tobytes(), np.uint8)
    return data


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(c) for c in at) + "}"


SETUP = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.eq.u32 %p1, %r1, 0; mov.b64 %rd9, block0;
  @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
"""
# Copies %r9 bytes (a multiple of 16) from shared address %r3 to %rd10.
DUMP = """
  mov.u32 %r4, 0;
loop: mad.lo.u32 %r5, %r1, 16, %r4; setp.ge.u32 %p3, %r5, %r9; @%p3 bra next;
  add.u32 %r6, %r3, %r5; cvt.u64.u32 %rd11, %r5; add.s64 %rd11, %rd10, %rd11;
  ld.shared.v2.b64 {%rd12, %rd13}, [%r6]; st.global.v2.b64 [%rd11], {%rd12, %rd13};
next: add.u32 %r4, %r4, 512; setp.lt.u32 %p3, %r4, %r9; @%p3 bra loop;
"""
FILL = DUMP.replace("ld.shared.v2.b64 {%rd12, %rd13}, [%r6]; st.global.v2.b64 [%rd11]",
                    "ld.global.v2.b64 {%rd12, %rd13}, [%rd11]; st.shared.v2.b64 [%r6]")  # fmt: skip


def load_kernel(at: tuple[int, ...], total_bytes: int, dims: int, mode: str = "tile",
                space: str = "shared::cluster") -> str:  # fmt: skip
    """Loads one box to smem + 1024 and copies it to array 1."""
    return f"""{SETUP}
      @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {total_bytes};
      @%p1 cp.async.bulk.tensor.{dims}d.{space}.global.{mode}.{COMPLETE}.L2::cache_hint
        [%r2+1024], [%rd9, {coordinates(at)}], [%r2], %rd1;
    again: {WAIT}
      add.u32 %r3, %r2, 1024; mov.b64 %rd10, %rd2; mov.u32 %r9, {total_bytes};
      {DUMP}
    """


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str, int]:
    """(dims, box, coordinates, element, swizzle): small, at the edges too."""
    element = draw(st.sampled_from(sorted(ELEMENTS)))
    size = np.dtype(ELEMENTS[element]).itemsize
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    rank = draw(st.integers(1, 5))
    inner = (swizzle or draw(st.sampled_from([16, 32, 48, 256]))) // size
    dims = tuple(draw(st.integers(1, 2 * inner if d == 0 else 5)) for d in range(rank))
    box = (inner, *(draw(st.integers(1, (9, 3, 2, 2)[d])) for d in range(rank - 1)))
    at = [draw(st.integers(-b, n)) for b, n in zip(box, dims, strict=True)]
    at[0] -= at[0] % (16 // size)
    return dims, box, tuple(at), element, swizzle


@FEW
@given(case=boxes(), schedule=st.sampled_from(SCHEDULES))
def test_loads_of_any_box(case: tuple, schedule: str) -> None:
    dims, box, at, element, swizzle = case
    array = tensor(dims, element)
    total = int(np.prod(box)) * array.itemsize
    out = aligned(np.full(total, 99, np.uint8))
    table = tensor_map(array, element, box, swizzle=swizzle)
    text = load_kernel(at, total, len(dims), space="shared::cta")
    report = run_ptx(
        text, [buffer_of(array), out], smem=1024 + total, blocks=[table.encode()],
        schedule=schedule,
    )  # fmt: skip
    np.testing.assert_array_equal(out, box_in_smem(array, at, box, swizzle))
    assert report.ok


@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
def test_out_of_bounds_elements_may_load_as_nan(element: str) -> None:
    array = tensor((8, 4), element)
    box, at = (16 // array.itemsize, 4), (0, 2)
    out = aligned(np.zeros((4, 16 // array.itemsize), array.dtype))
    table = tensor_map(array, element, box, fill_nan=True)
    run_ptx(load_kernel(at, 64, 2), [buffer_of(array), out], smem=2048, blocks=[table.encode()])
    np.testing.assert_array_equal(out[:2], array[: box[0], 2:].T)
    assert np.isnan(out[2:].astype(np.float64)).all()


def store_kernel(instruction: str, at: tuple[int, ...], total_bytes: int, fence: str = "default",
                 wait: str = "cp.async.bulk.wait_group 0;") -> str:  # fmt: skip
    """Fills smem + 1024 from array 1 and gives it to a storing instruction."""
    fence = "fence.proxy.async.shared::cta;" if fence == "default" else fence
    return f"""{SETUP}
      add.u32 %r3, %r2, 1024; mov.b64 %rd10, %rd2; mov.u32 %r9, {total_bytes};
      {FILL}
      {fence} bar.sync 0;
      @%p1 {instruction} [%rd9, {coordinates(at)}], [%r3];
      @%p1 cp.async.bulk.commit_group; @%p1 {wait}
    """


@FEW
@given(case=boxes(), schedule=st.sampled_from(SCHEDULES))
def test_stores_of_any_box(case: tuple, schedule: str) -> None:
    """Elements outside stay, but for the padding in a 16-byte chunk that the tensor ends in: the
    hardware (H200) writes such a chunk whole. Negative coordinates are illegal in stores."""
    dims, box, at, element, swizzle = case
    at = tuple(max(c, 0) for c in at)
    array, new = tensor(dims, element), tensor(dims, element, seed=1)
    # What a load of the new values would leave in shared memory, a store must put back.
    smem = aligned(box_in_smem(new, at, box, swizzle))
    expected = array.copy()
    inside = tuple(
        slice(max(c, 0), max(min(c + b, n), 0)) for c, b, n in zip(at, box, dims, strict=True)
    )
    expected[inside] = new[inside]
    table = tensor_map(array, element, box, swizzle=swizzle)
    text = store_kernel(
        f"cp.async.bulk.tensor.{len(dims)}d.global.shared::cta.tile.bulk_group", at, smem.size
    )
    memory = buffer_of(array)
    report = run_ptx(
        text, [memory, smem], smem=1024 + smem.size, blocks=[table.encode()], schedule=schedule
    )
    np.testing.assert_array_equal(array, expected)
    assert report.ok


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("operation", "element", "rule"),
    [("add", "f32", np.add), ("add", "bf16", np.add), ("max", "s32", np.maximum),
     ("min", "f16", np.minimum), ("xor", "u64", np.bitwise_xor)],
)  # fmt: skip
def test_reductions(schedule: str, operation: str, element: str, rule: np.ufunc) -> None:
    """Three CTAs combine one box with the tensor; a corner of it lies outside."""
    array, new = tensor((24, 6), element), tensor((24, 6), element, seed=1)
    box, at = (16 // array.itemsize, 4), (8, 3)
    smem = aligned(box_in_smem(new, at, box))
    expected = array.copy()
    inside = (slice(8, 8 + box[0]), slice(3, 6))
    for _ in range(3):
        expected[inside] = rule(expected[inside], new[inside])
    table = tensor_map(array, element, box)
    instruction = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    report = run_ptx(
        store_kernel(instruction, at, smem.size), [buffer_of(array), smem], grid=(3, 1, 1),
        smem=2048, blocks=[table.encode()], schedule=schedule,
    )  # fmt: skip
    np.testing.assert_array_equal(array, expected)
    assert report.ok


ROWS = (5, 0, 9, 2)  # row 9 is outside


def test_gathered_and_scattered_rows() -> None:
    array, new = tensor((16, 8), "f32"), tensor((16, 8), "f32", seed=1)
    table = tensor_map(array, "f32", (8, 1))
    out = aligned(np.zeros((4, 8), np.float32))
    at = (4, *ROWS)
    run_ptx(
        load_kernel(at, 128, 2, "tile::gather4"), [buffer_of(array), out], smem=2048,
        blocks=[table.encode()],
    )  # fmt: skip
    expected = np.array([array[4:12, r] if r < 8 else np.zeros(8) for r in ROWS])
    np.testing.assert_array_equal(out, expected)
    rows = aligned(np.ascontiguousarray(new[4:12, :4].T))
    text = store_kernel(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group", at, 128
    )
    updated = array.copy()
    for k, row in enumerate(ROWS):
        if row < 8:
            updated[4:12, row] = rows[k]
    run_ptx(text, [buffer_of(array), rows], smem=2048, blocks=[table.encode()])
    np.testing.assert_array_equal(array, updated)


CLUSTER = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.eq.u32 %p1, %r1, 0; mov.b64 %rd9, block0;
  mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p4, %r10, {sender}; and.pred %p4, %p4, %p1;
  @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
  setp.eq.u32 %p5, %r10, 0; {who}
  @%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {bytes};
  barrier.cluster.arrive; barrier.cluster.wait;
  {copies}
again: @%p7 mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p7 setp.eq.u32 %p2, %r1, %r1;
  @!%p2 bra again;
  barrier.cluster.arrive; barrier.cluster.wait;
  mad.lo.u32 %r8, %r10, 256, 0; cvt.u64.u32 %rd10, %r8; add.s64 %rd10, %rd10, %rd2;
  add.u32 %r3, %r2, 1024; mov.u32 %r9, 256;
""" + DUMP.replace("{", "{{").replace("}", "}}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_signals_each_destination(schedule: str) -> None:
    array = tensor((16, 8), "f32")
    out = aligned(np.zeros((2, 4, 16), np.float32))
    copy = f"""
      @%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.{COMPLETE}.multicast::cluster
      [%r2+1024], [%rd9, {{0, 2}}], [%r2], 3;"""
    text = CLUSTER.format(
        sender=1, bytes=256, copies=copy, who="and.pred %p6, %p1, %p1; setp.eq.u32 %p7, %r1, %r1;"
    )
    table = tensor_map(array, "f32", (16, 4))
    report = run_ptx(
        text, [buffer_of(array), out], grid=(2, 1, 1), cluster=(2, 1, 1), smem=2048,
        blocks=[table.encode()], schedule=schedule,
    )  # fmt: skip
    for rank in range(2):
        np.testing.assert_array_equal(out[rank], array[:, 2:6].T)
    assert report.ok


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("multicast", "pair", "finding"), [
    (False, True, None), (True, True, None), (False, False, "mbarrier"),
])  # fmt: skip
def test_a_pair_signals_the_barrier_of_one_cta(
    schedule: str, multicast: bool, pair: bool, finding: str | None
) -> None:
    """Both CTAs load; the barrier of CTA 0 counts the bytes of both."""
    array = tensor((16, 8), "f32")
    out = aligned(np.zeros((2, 4, 16), np.float32))
    cast, mask = (".multicast::cluster", ", %h1") if multicast else ("", "")
    copies = f"""
      shl.b32 %r11, %r10, 2; and.b32 %r12, %r2, 0xFEFFFFFF; mov.u32 %r13, 1;
      shl.b32 %r13, %r13, %r10; cvt.u16.u32 %h1, %r13;
      @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast}{
        ".cta_group::2" if pair else ""
    } [%r2+1024], [%rd9, {{0, %r11}}], [%r12]{mask};
    """
    text = CLUSTER.format(
        sender=0, bytes=512, copies=copies,
        who="and.pred %p6, %p1, %p5; and.pred %p7, %p5, %p5;",
    )  # fmt: skip
    table = tensor_map(array, "f32", (16, 4))
    report = run_ptx(
        text, [buffer_of(array), out], grid=(2, 1, 1), cluster=(2, 1, 1), smem=2048,
        blocks=[table.encode()], schedule=schedule, collect=True,
    )  # fmt: skip
    assert kinds(report) == ({finding} if finding else set())
    if finding is None:
        np.testing.assert_array_equal(out.reshape(8, 16), array.T)


LOAD_FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "no wait": (lambda t: t.replace(WAIT, ""), "race"),
    "misaligned": (lambda t: t.replace("[%r2+1024], [%rd9", "[%r2+1040], [%rd9"), "misaligned"),
    "past smem": (lambda t: t.replace("[%r2+1024], [%rd9", "[%r2+1920], [%rd9"), "out-of-bounds"),
    "no barrier": (lambda t: t.replace("[%r2], %rd1", "[%r2+16], %rd1"), "mbarrier"),
    "map at an odd address": (lambda t: t.replace("[%rd9,", "[%rd9+16,"), "descriptor"),
    "no map": (lambda t: t.replace("[%rd9,", "[%rd2,"), "descriptor"),
    "bytes": (lambda t: t.replace("[%r2], 256;", "[%r2], 128;"), "deadlock"),
}


@pytest.mark.parametrize("what", LOAD_FAULTS)
def test_faults_of_loads(what: str) -> None:
    change, kind = LOAD_FAULTS[what]
    array = tensor((16, 8), "f32")
    table = tensor_map(array, "f32", (16, 4), swizzle=64)
    out = aligned(np.full((4, 64), 255, np.uint8))
    report = run_ptx(
        change(load_kernel((0, 0), 256, 2)), [buffer_of(array), out], smem=2048, collect=True,
        blocks=[table.encode()], schedule="adversarial",
    )  # fmt: skip
    assert kind in kinds(report)


def test_a_map_that_reaches_past_its_buffer() -> None:
    array = tensor((16, 8), "f32")
    table = replace(tensor_map(array, "f32", (16, 4)), dims=(16, 12))
    out = aligned(np.zeros(256, np.uint8))
    for row, found in ((4, set()), (6, {"out-of-bounds"})):
        report = run_ptx(
            load_kernel((0, row), 256, 2), [buffer_of(array), out], smem=2048, collect=True,
            blocks=[table.encode()],
        )  # fmt: skip
        assert kinds(report) == found
    assert "array0" in report.findings[0].message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("options", "after", "finding"),
    [
        ({"fence": ""}, "", "missing-proxy-fence"),
        ({"wait": "mov.u32 %r12, 0;"}, "@%p1 st.shared.b32 [%r3], %r1;", "race"),
        ({"wait": "cp.async.bulk.wait_group.read 0;"}, "@%p1 st.shared.b32 [%r3], %r1;", None),
        ({"wait": "cp.async.bulk.wait_group.read 0;"}, "@%p1 ld.global.b32 %r12, [%rd1];", "race"),
        ({}, "@%p1 ld.global.b32 %r12, [%rd1];", None),
    ],
)
def test_faults_of_stores(
    schedule: str, options: dict[str, str], after: str, finding: str | None
) -> None:
    array, smem = tensor((16, 8), "f32"), aligned(np.zeros(256, np.uint8))
    table = tensor_map(array, "f32", (16, 4))
    instruction = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    text = store_kernel(instruction, (0, 0), 256, **options) + after
    report = run_ptx(
        text, [buffer_of(array), smem], smem=2048, collect=True, blocks=[table.encode()],
        schedule=schedule,
    )  # fmt: skip
    assert kinds(report) - {"exit"} == ({finding} if finding else set())


# Tensor maps that the kernel changes.

FIELDS = {
    "global_address": (
        "b64", "", lambda m: replace(m, address=m.address + 64), lambda m: m.address,
    ),
    "global_dim.1": ("b32", "1, ", lambda m: replace(m, dims=(16, 5)), lambda m: m.dims[1]),
    "global_dim.0": ("b32", "0, ", lambda m: replace(m, dims=(9, 8)), lambda m: m.dims[0]),
    "global_stride.0": (
        "b64", "0, ", lambda m: replace(m, strides_bytes=(1 << 37,)), lambda m: m.strides_bytes[0],
    ),
    "box_dim.0": ("b32", "0, ", lambda m: replace(m, box=(4, 4)), lambda m: m.box[0]),
    "box_dim.1": ("b32", "1, ", lambda m: replace(m, box=(16, 8)), lambda m: m.box[1]),
    "element_stride.1": (
        "b32", "1, ", lambda m: replace(m, element_strides=(1, 3)), lambda m: m.element_strides[1],
    ),
    "elemtype": ("b32", "", lambda m: replace(m, element="s32"), lambda m: 3),
    "elemtype.tf32": ("b32", "", lambda m: replace(m, element="tf32"), lambda m: 11),
    "swizzle_mode": ("b32", "", lambda m: replace(m, swizzle=64), lambda m: 2),
    "fill_mode": ("b32", "", lambda m: replace(m, fill_nan=True), lambda m: 1),
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared::cta", ""])
@pytest.mark.parametrize("name", FIELDS)
def test_replacing_a_field(name: str, space: str) -> None:
    kind, ordinal, change, value = FIELDS[name]
    before = tensor_map(tensor((16, 8), "f32"), "f32", (16, 4))
    after = change(before)
    data = aligned(np.frombuffer(before.encode(), np.uint8).copy())
    dot = f".{space}" if space else ""
    address = "%rd1" if space == "global" else "%rd15"
    register = "%rd14" if kind == "b64" else "%r14"
    body = f"""
      mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.eq.u32 %p1, %r1, 0; cvt.u64.u32 %rd15, %r2;
      mov.b64 %rd10, %rd1; mov.u32 %r3, %r2; mov.u32 %r9, 128;
      {FILL} bar.warp.sync 0xffffffff;
      {"cvta.shared.u64 %rd15, %rd15;" if not space else ""}
      mov.{kind} {register}, {value(after)};
      @%p1 tensormap.replace.tile.{name.split(".")[0]}{dot}.b1024.{kind}
        [{address}], {ordinal}{register};
      bar.warp.sync 0xffffffff;
      {DUMP.replace("loop", "loop2").replace("next", "next2") if space != "global" else ""}
    """
    run_ptx(body, [data], smem=1024)
    assert TensorMap.decode(data.tobytes()) == after


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_map_made_in_shared_memory(schedule: str) -> None:
    """As in a grouped GEMM: change a copy of the map, publish it in global memory, load by it."""
    first, second = tensor((16, 8), "f32"), tensor((16, 8), "f32", seed=1)
    table = tensor_map(first, "f32", (16, 4))
    out, workspace = aligned(np.zeros((4, 16), np.float32)), aligned(np.zeros(128, np.uint8))
    body = load_kernel((0, 4), 256, 2).replace(SETUP, SETUP + """
      mov.u32 %r3, %r2; add.u32 %r3, %r3, 256; mov.b64 %rd10, block0; mov.u32 %r9, 128;
      """ + FILL.replace("loop", "loop2").replace("next", "next2").replace("ld.global", "ld") + """
      bar.warp.sync 0xffffffff;
      @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r3], %rd3;
      bar.warp.sync 0xffffffff;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%rd4], [%r3], 128;
      fence.proxy.tensormap::generic.acquire.gpu [%rd4], 128;
      mov.b64 %rd9, %rd4;
    """)  # fmt: skip
    arrays = [buffer_of(first), out, buffer_of(second), workspace]
    report = run_ptx(body, arrays, smem=2048, blocks=[table.encode()], schedule=schedule)
    np.testing.assert_array_equal(out, second[:, 4:].T)
    assert report.ok


def test_prefetches_change_nothing_but_are_checked() -> None:
    array = tensor((16, 8), "f32")
    body = """mov.b64 %rd9, block0; prefetch.tensormap [%rd9]; prefetch.global.L2 [%rd1];
      mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;
      createpolicy.fractional.L2::evict_first.b64 %rd10, 1.0;
      @%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%rd9, {0, 0}], %rd10;
      @%p1 cp.async.bulk.prefetch.L2.global [%rd1], 64; discard.global.L2 [%rd1], 128;"""
    table = tensor_map(array, "f32", (16, 4))
    assert run_ptx(body, [buffer_of(array)], blocks=[table.encode()]).ok
    wrong = replace(table, dims=(16, 100))
    moved = body.replace("{0, 0}", "{0, 50}")
    report = run_ptx(moved, [buffer_of(array)], blocks=[wrong.encode()], collect=True)
    assert kinds(report) == {"out-of-bounds"}


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r2], "
        "[%rd9, {0, 0, 0, 0}], [%r2], {%h1};",
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], "
        "[%rd9, {0, 0}], [%r2];",
        "tensormap.replace.tile.swizzle_mode.global.b1024.b64 [%rd1], %rd2;",
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%rd1], 5, %r1;",
    ],
)
def test_forms_that_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text, [np.zeros(64, np.uint32)], smem=1024)
