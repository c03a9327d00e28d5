"""tcgen05.alloc, dealloc, ld, st and their waits, executed: results and every misuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli
from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.tcgen05.tmem_access import access_map, register_count
from tests.emulator.kernels import kinds, module_text, run_ptx
from tests.emulator.tensor_kernels import (
    DECLARATIONS,
    LANE_ADDRESS,
    SCHEDULES,
    TensorKernel,
    load_values,
    own_row,
    read_out,
    registers,
    store_values,
)

THREADS, COLUMNS = 128, 32
POISON = 0xFFFFFFFF
STORE = f"  tcgen05.st.sync.aligned.32x32b.x32.b32 [%r22], {registers(COLUMNS)};\n"
LOAD = f"  tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(COLUMNS)}, [%r22];\n"
WAIT_STORE = "  tcgen05.wait::st.sync.aligned;\n"
WAIT_LOAD = "  tcgen05.wait::ld.sync.aligned;\n"
# Every thread fills its lane of 32 columns from array 1.
FILL = own_row("%rd1", COLUMNS) + load_values(COLUMNS) + LANE_ADDRESS + STORE + WAIT_STORE
FORMS = [
    ("32x32b", 1, None), ("32x32b", 4, None), ("32x32b", 32, None), ("16x64b", 1, None),
    ("16x64b", 16, None), ("16x128b", 2, None), ("16x128b", 8, None), ("16x256b", 1, None),
    ("16x256b", 4, None), ("16x32bx2", 8, 16), ("16x32bx2", 1, 3),
]  # fmt: skip


def memory(seed: int = 0) -> np.ndarray:
    """128 lanes x 32 columns."""
    return np.random.default_rng(seed).integers(0, 1 << 32, (THREADS, COLUMNS), np.uint32)


def cells(shape: str, count: int, half_split: int | None, packed: bool, lane: int, column: int):
    """(lanes, columns), each (128 threads, registers), of a form at a warp's lane and column."""
    maps = [
        access_map(shape, count, warp, (32 * warp + lane) << 16 | column, half_split, packed)
        for warp in range(4)
    ]
    return np.concatenate([m.lanes for m in maps]), np.concatenate([m.columns for m in maps])


def halves(shape: str) -> list[int]:
    """Lanes within the warp's 32 at which the form can start."""
    return [0] if shape in ("32x32b", "16x32bx2") else [0, 16]


def low_half(words: np.ndarray) -> np.ndarray:
    return words & np.uint32(0xFFFF)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "count", "split"), FORMS)
def test_load_delivers_the_cells_of_its_shape(shape, count, split, packed) -> None:
    while cells(shape, count, split, packed, 0, 0)[1].max() >= COLUMNS:
        count //= 2
    used = register_count(shape, count)
    data = memory()
    form = f"{shape}.x{count}" + (".pack::16b" if packed else "")
    text, expected = FILL + own_row("%rd2", 64), np.zeros((THREADS, 64), np.uint32)
    for index, lane in enumerate(halves(shape)):
        operand = f", {split}" if split is not None else ""
        text += f"""
  tcgen05.ld.sync.aligned.{form}.b32 {registers(used)}, [%r22+{lane << 16}]{operand};
  tcgen05.wait::ld.sync.aligned;
""" + store_values(used, 32 * index)
        lanes, columns = cells(shape, count, split, packed, lane, 0)
        values = data[lanes, columns]
        if packed:
            values = low_half(values[:, 0::2]) | values[:, 1::2] << np.uint32(16)
        expected[:, 32 * index : 32 * index + used] = values
    out = np.zeros((THREADS, 64), np.uint32)
    report = TensorKernel(before=text).run([data.copy(), out])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "count", "split"), FORMS)
def test_store_fills_the_cells_of_its_shape_and_no_others(shape, count, split, packed) -> None:
    while cells(shape, count, split, packed, 0, 0)[1].max() >= COLUMNS:
        count //= 2
    used = register_count(shape, count)
    data, values = memory(), memory(1)
    form = f"{shape}.x{count}" + (".unpack::16b" if packed else "")
    text, expected = FILL + own_row("%rd2", COLUMNS) + load_values(COLUMNS), data.copy()
    for lane in halves(shape):
        operand = f"{split}, " if split is not None else ""
        text += f"  tcgen05.st.sync.aligned.{form}.b32 [%r22+{lane << 16}], {operand}"
        text += registers(used) + ";\n"
        lanes, columns = cells(shape, count, split, packed, lane, 0)
        words = values[:, :used]
        if packed:
            words = np.stack([low_half(words), words >> np.uint32(16)], 2).reshape(THREADS, -1)
        expected[lanes, columns] = words
    out = np.zeros_like(data)
    kernel = TensorKernel(before=text + WAIT_STORE, after=read_out("%rd3", COLUMNS))
    report = kernel.run([data.copy(), values.copy(), out])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=12)
@given(
    columns=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
)
def test_stores_and_loads_in_sequence_act_like_an_array(columns, schedule, seed) -> None:
    """Each step adds 1 to the eight columns from `column` on."""
    data = memory(seed)
    text, expected = FILL, data.copy()
    for column in columns:
        text += f"  tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [%r22+{column}];\n"
        text += WAIT_LOAD + "".join(f"  add.u32 %v{k}, %v{k}, 1;\n" for k in range(8))
        text += f"  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r22+{column}], {registers(8)};\n"
        text += WAIT_STORE
        expected[:, column : column + 8] += np.uint32(1)
    out = np.zeros_like(data)
    kernel = TensorKernel(before=text, after=read_out("%rd2", COLUMNS))
    report = kernel.run([data.copy(), out], schedule=schedule, seed=seed)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("form", "expected"),
    [("32x32b.x32.max.u32", lambda d: d.max(1)), ("32x32b.x32.min.s32",
      lambda d: d.view(np.int32).min(1).view(np.uint32)),
     ("32x32b.x32.max.abs.f32", lambda d: np.abs(d.view(np.float32)).max(1).view(np.uint32))],
)  # fmt: skip
def test_reducing_load_also_gives_the_extreme(form, expected) -> None:
    data = np.random.default_rng(5).normal(size=(THREADS, COLUMNS)).astype(np.float32)
    words = data.view(np.uint32)
    text = FILL + own_row("%rd2", COLUMNS + 1)
    text += f"  tcgen05.ld.red.sync.aligned.{form} {registers(32)}, %v32, [%r22];\n"
    out = np.zeros((THREADS, COLUMNS + 1), np.uint32)
    kernel = TensorKernel(before=text + WAIT_LOAD + store_values(33))
    report = kernel.run([words.copy(), out])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out[:, :COLUMNS], words)
    np.testing.assert_array_equal(out[:, COLUMNS], expected(words))


def test_new_columns_hold_nothing() -> None:
    out = np.zeros((THREADS, COLUMNS), np.uint32)
    report = TensorKernel(before=read_out("%rd1", COLUMNS)).run([out])
    assert kinds(report) == {"uninitialised"}
    assert (out == POISON).all()


# Waits.


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_using_a_register_waits_for_its_load(schedule: str) -> None:
    data, out = memory(), np.zeros((THREADS, COLUMNS), np.uint32)
    text = FILL + own_row("%rd2", COLUMNS) + LOAD + store_values(COLUMNS)
    report = TensorKernel(before=text).run([data.copy(), out], schedule=schedule)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, data)
    strict = TensorKernel(before=text).run([data.copy(), out], strict_tmem_loads=True)
    assert kinds(strict) == {"missing-wait"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_overwriting_a_register_waits_for_its_load(schedule: str) -> None:
    out = np.zeros((THREADS, 1), np.uint32)
    text = FILL + own_row("%rd2", 1) + LOAD + "  mov.b32 %v0, 7;\n" + WAIT_LOAD + store_values(1)
    report = TensorKernel(before=text).run([memory(), out], schedule=schedule)
    assert report.ok, str(report)
    assert (out == 7).all()


def test_load_that_nobody_awaits_races_with_dealloc() -> None:
    report = TensorKernel(before=FILL + LOAD).run([memory()], schedule="adversarial")
    assert "race" in kinds(report)
    assert TensorKernel(before=FILL + LOAD + WAIT_LOAD).run([memory()]).ok


@pytest.mark.parametrize("follower", [LOAD + WAIT_LOAD, STORE + WAIT_STORE])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_access_behind_a_store_needs_wait_st(follower: str, schedule: str) -> None:
    for wait, found in ((WAIT_STORE, set()), ("", {"race"}), (WAIT_LOAD, {"race"})):
        kernel = TensorKernel(before=FILL + STORE + wait + follower)
        report = kernel.run([memory()], schedule=schedule)
        assert kinds(report) - {"exit"} == found, str(report)


@pytest.mark.parametrize(("sync", "found"), [("bar.sync 1, 256;", False), ("", True)])
def test_two_warps_of_the_same_lanes_need_a_barrier(sync: str, found: bool) -> None:
    text = f"""
  setp.ge.u32 %p3, %r1, 128;
  @%p3 bra SECOND;
{FILL}
  {sync}
  bra END;
SECOND:
  {sync}
{LANE_ADDRESS + LOAD + WAIT_LOAD}
END:
"""
    report = TensorKernel(before=text, threads=256).run([memory()])
    assert bool(kinds(report) & {"race", "uninitialised"}) == found, str(report)


# Lanes, columns, allocation.

CASES = {
    "lane 8": (FILL + "  add.u32 %r22, %r22, 0x80000;\n" + LOAD, "tmem"),
    "beyond the allocation": (FILL + "  add.u32 %r22, %r22, 40;\n" + LOAD, "tmem"),
    "beyond the memory": (FILL + "  add.u32 %r22, %r22, 500;\n" + LOAD, "tmem"),
    "store beyond the allocation": (FILL + "  add.u32 %r22, %r22, 64;\n" + STORE, "tmem"),
    "different addresses": (FILL + "  and.b32 %r9, %r1, 1; add.u32 %r22, %r22, %r9;\n" + LOAD,
                            "tmem"),
    "half a warp": (FILL + "  and.b32 %r9, %r1, 31; setp.lt.u32 %p4, %r9, 16;\n  @%p4 " + LOAD
                    + WAIT_LOAD, "divergence"),
    "half a warp stores": (FILL + "  and.b32 %r9, %r1, 31; setp.lt.u32 %p4, %r9, 16;\n  @%p4 "
                           + STORE + WAIT_STORE, "divergence"),
    "not a power of two": ("  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
                           "[%r20+72], 48;\n", "tmem"),
    "too many columns": ("  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
                         "[%r20+72], 1024;\n", "tmem"),
    "after relinquish": ("  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
                         "[%r20+72], 32;\n", "tmem"),
    "dealloc of another size": ("  @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r21, 32;\n",
                                "tmem"),
    "dealloc elsewhere": ("  @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 32, 32;\n", "tmem"),
    "another cta_group": ("  @%p2 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;\n",
                          "tmem"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_found(case: str) -> None:
    text, kind = CASES[case]
    report = TensorKernel(before=text, dealloc="").run([memory()])
    assert kinds(report) - {"tmem"} <= {kind} and kind in kinds(report), str(report)
    # What is found is the misuse, not only the missing dealloc.
    assert any("without tcgen05.dealloc" not in f.message for f in report.findings)


# The address without a lane; that of the warp after this one; that of a second warpgroup.
ADDRESSES = {
    "none": "  mov.b32 %r22, %r21;\n",
    "another": "  add.u32 %r22, %r22, 0x200000;\n  and.b32 %r22, %r22, 0x7fffff;\n",
    "beyond": "  add.u32 %r22, %r22, 0x800000;\n",
}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_quarter_of_an_address_does_not_count(address: str, schedule: str) -> None:
    """Stored and loaded by addresses of other lanes, every warp has its own."""
    data, out = memory(), np.zeros((THREADS, COLUMNS), np.uint32)
    text = own_row("%rd1", COLUMNS) + load_values(COLUMNS) + LANE_ADDRESS + ADDRESSES[address]
    text += STORE + WAIT_STORE + "  bar.sync 0;\n"
    kernel = TensorKernel(before=text, after=read_out("%rd2", COLUMNS))
    report = kernel.run([data.copy(), out], schedule=schedule)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, data)
    strict = kernel.run([data.copy(), out], schedule=schedule, strict_tmem_lanes=True)
    assert kinds(strict) == {"tmem"} and "whose lanes are" in str(strict)
    np.testing.assert_array_equal(out, data)


def test_addresses_of_the_own_quarter_pass_the_strict_check() -> None:
    report = TensorKernel(before=FILL + LOAD + WAIT_LOAD).run([memory()], strict_tmem_lanes=True)
    assert report.ok, str(report)


def test_missing_dealloc_is_found() -> None:
    report = TensorKernel(dealloc="").run([])
    assert kinds(report) == {"tmem"} and "64 columns" in report.findings[0].message


def test_memory_before_any_allocation() -> None:
    report = run_ptx(
        "  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];\n", block=(32, 1, 1), collect=True
    )
    assert kinds(report) == {"tmem"}


ALLOC = "tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r20+{at}], {columns};"
DEALLOC = "tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r{r}, {columns};"
TWO_WARPS = """
  mov.u32 %r1, %tid.x;
  mov.u32 %r20, smem;
  setp.lt.u32 %p1, %r1, 32;
  @!%p1 bra SECOND;
  {alloc0}
  bar.sync 0;
  ld.shared.b32 %r21, [%r20];
  {dealloc0}
  bra END;
SECOND:
  bar.sync 0;
  {alloc1}
  ld.shared.b32 %r22, [%r20+4];
  st.global.b32 [%rd1], %r22;
  {dealloc1}
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("first", "second", "address"), [(512, 512, 0), (256, 256, None)])
def test_allocation_waits_until_columns_are_free(schedule, first, second, address) -> None:
    pieces = {
        "alloc0": ALLOC.format(group=1, at=0, columns=first),
        "alloc1": ALLOC.format(group=1, at=4, columns=second),
        "dealloc0": DEALLOC.format(group=1, r=21, columns=first),
        "dealloc1": DEALLOC.format(group=1, r=22, columns=second),
    }
    out = np.full(32, 99, np.uint32)
    options = {"block": (64, 1, 1), "smem": 64, "schedule": schedule, "collect": True}
    report = run_ptx(TWO_WARPS.format(**pieces), [out], **options)
    assert report.ok, str(report)
    assert out[0] in ((address,) if address is not None else (0, 256))
    pieces["dealloc0"] = ""
    stuck = run_ptx(TWO_WARPS.format(**pieces), [out], **options)
    assert kinds(stuck) == ({"deadlock"} if address is not None else {"tmem"})


def test_allocations_do_not_grow() -> None:
    text = TWO_WARPS.format(
        alloc0=ALLOC.format(group=1, at=0, columns=32),
        alloc1=ALLOC.format(group=1, at=4, columns=64),
        dealloc0=DEALLOC.format(group=1, r=21, columns=32),
        dealloc1=DEALLOC.format(group=1, r=22, columns=64),
    )
    report = run_ptx(text, [np.zeros(32, np.uint32)], block=(64, 1, 1), smem=64, collect=True)
    assert kinds(report) == {"tmem"} and "must not increase" in report.findings[0].message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ctas_of_a_pair_allocate_together(schedule: str) -> None:
    data, out = memory(), np.zeros((2 * THREADS, COLUMNS), np.uint32)
    kernel = TensorKernel(group=2, before=FILL, after=read_out("%rd2", COLUMNS))
    report = kernel.run([np.concatenate([data, ~data]), out], schedule=schedule)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, np.concatenate([data, ~data]))


def test_allocation_waits_for_the_peer() -> None:
    text = """
  mov.u32 %r20, smem;
  mov.u32 %r1, %cluster_ctarank;
  setp.eq.u32 %p1, %r1, {rank};
  @%p1 bra END;
""" + ALLOC.format(group=2, at=0, columns=64) + "\nEND:\n"  # fmt: skip
    options = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "smem": 64, "collect": True}
    for rank in (0, 1):
        report = run_ptx(text.format(rank=rank), **options)
        assert kinds(report) == {"deadlock"}
        assert f"peer, CTA {rank}" in report.findings[0].message
    alone = run_ptx(text.format(rank=1), smem=64, collect=True)
    assert kinds(alone) == {"tmem"} and "no peer" in alone.findings[0].message


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];",
        "tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r1, %r3}, [%r2];",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r1}, [%r2];",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.abs.u32 {%r1, %r3}, %r4, [%r2];",
        "tcgen05.st.sync.aligned.16x256b.x64.b32 [%r2], {%r1};",
        "tcgen05.alloc.sync.aligned.shared::cta.b32 [%r2], 32;",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text)


def test_the_command_reports_lanes_of_others(tmp_path: Path) -> None:
    """Only if it is asked to."""
    text = TensorKernel(before=own_row("%rd1", COLUMNS) + load_values(COLUMNS) + LANE_ADDRESS
                        + ADDRESSES["beyond"] + STORE + WAIT_STORE).text()  # fmt: skip
    file = tmp_path / "kernel.ptx"
    file.write_text(module_text(text, 1, declarations=DECLARATIONS))
    command = ["emulate", str(file), "--smem", "1024", "--arg", f"i32[{THREADS},{COLUMNS}]=arange"]
    for more, code in (([], 0), (["--strict-tmem-lanes"], 1)):
        with pytest.raises(SystemExit) as done:
            cli.main([*command, *more])
        assert done.value.code == code
