"""What a Hopper GPU computed: the recorded comparison, its replay, and the facts it taught.

`lab/hardware/emulator_hopper` runs PTX programs on an H200 and on the emulator. Its result file
holds digests of what the GPU computed, so that the emulator is held to them without a GPU.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4.emulator.tma.descriptor import TensorMap
from lab.hardware.emulator_hopper import (
    barriers,
    compare,
    programs,
    run_there,
    storage,
    suite,
    values,
)
from lab.hardware.emulator_hopper.emulate import CHECKED, emulate
from lab.records import read_record
from tests.emulator.kernels import aligned, kinds, run_ptx
from tests.emulator.opcode_runner import check

LANES = 32


@cache
def recorded() -> dict[str, Any]:
    return read_record("emulator_hopper")


def faults_of(report: dict[str, Any]) -> list[str]:
    """What is wrong with a result file: disagreements, and what has not been compared."""
    found = [f"disagreement: {text}" for text in report["disagreements"]]
    for family in suite.FAMILIES:
        row = report["families"].get(family)
        if row is None or not row["values"]:
            found.append(f"{family}: not compared")
        elif row["mismatches"]:
            found.append(f"{family}: {row['mismatches']} mismatches")
    for form, row in report["approximate"].items():
        if row["max_ulp"] > row["bound_ulp"] and row["max_absolute"] > row["bound_absolute"]:
            found.append(f"{form}: beyond its bounds")
    return found + [f"no {name}" for name in ("confirmed", "replays") if not report[name]]


def test_a_gpu_agreed_in_every_family() -> None:
    report = recorded()
    assert faults_of(report) == []
    assert "H200" in report["hardware"]["gpu"] or "H100" in report["hardware"]["gpu"]
    assert {"add", "fma", "cvt", "cp.async.bulk.tensor", "mbarrier.try_wait"} <= set(
        report["confirmed"]
    )


def change(report: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(report)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("families", "tensors"), None),
        (("families", "integer", "mismatches"), 1),
        (("families", "float64", "values"), 0),
        (("disagreements",), ["float32-add: changed since it ran on the GPU"]),
        (("approximate", "rcp.approx.f32", "max_ulp"), 2),
        (("confirmed",), {}),
    ],
)
def test_a_worse_result_file_is_refused(path: tuple[str, ...], value: Any) -> None:
    changed = change(recorded(), *path, value=value)
    if path[0] == "approximate":
        changed["approximate"][path[1]]["max_absolute"] = 1.0
    assert len(faults_of(changed)) == 1


# Replays

FAST = (
    "float64-sums",
    "float64-extremes-f64",
    "conversions-tf32",
    "halves-fma-bf16x2",
    "exchanges-redux",
    "control-specials",
    "control-loops",
    "accesses-matrices",
    "accesses-cp-async",
    "atomics-shared-0",
    "atomics-vectors",
    "barriers-hints",
    "barriers-mbarrier-2",
    "barriers-reductions",
    "clusters-remote",
    "clusters-async-stores",
    "clusters-copies",
    "tensors-loads-14",
    "tensors-stores-1",
    "tensors-reductions-0",
    "tensors-maps",
)


@cache
def family_of(name: str) -> dict[str, programs.Program]:
    return {program.name: program for program in suite.FAMILIES[name]()}


def replay(name: str) -> tuple[programs.Program, list[np.ndarray]]:
    """A program, shortened, and its arrays after a run on the emulator."""
    whole = family_of(name.partition("-")[0])[name]
    assert storage.identity(whole) == recorded()["replays"][name][0], "the program has changed"
    program = suite.shortened(whole)
    return program, emulate(program, checks=program.family in CHECKED)


@pytest.mark.parametrize("name", FAST)
def test_the_emulator_repeats_what_the_gpu_computed(name: str) -> None:
    program, arrays = replay(name)
    assert storage.head(program, arrays) == recorded()["replays"][name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in recorded()["replays"] if n not in FAST])
def test_all_programs_repeat(name: str) -> None:
    program, arrays = replay(name)
    assert storage.head(program, arrays) == recorded()["replays"][name][1]


def test_every_program_of_the_suite_has_run() -> None:
    small = ("control", "barriers", "clusters", "tensors")
    names = {name for family in small for name in family_of(family)}
    assert names <= set(recorded()["replays"])


def test_a_wrong_bit_is_found() -> None:
    """In the replay, and in the comparison with a GPU's values."""
    program, arrays = replay("control-loops")
    gpu = [array.copy() for array in arrays]
    digests = storage.digests_of(program, gpu)
    kept = {
        f"digests/{program.name}": digests,
        f"values/{program.name}/0/3": gpu[1][3072:4096].copy(),
    }
    assert all(not a.mismatches for a in compare.compare_program(program, arrays, kept.get))
    assert storage.head(program, arrays) == storage.head_of(program, digests)
    arrays[1][3072 + 5] ^= 1
    (agreement,) = compare.compare_program(program, arrays, kept.get)
    assert agreement.mismatches == 1 and agreement.shown[0].startswith("value 3077: GPU 0x")
    arrays[1][0] ^= 1 << 31
    (agreement,) = compare.compare_program(program, arrays, kept.get)
    assert agreement.mismatches == 2
    assert storage.head(program, arrays) != recorded()["replays"][program.name][1]
    (agreement,) = compare.compare_program(program, arrays, {}.get)
    assert agreement.mismatches == 1, "a program without results does not count as confirmed"


@pytest.mark.parametrize(
    ("own", "gpu", "closeness", "mismatches"),
    [
        (0x3F800000, 0x3F800001, programs.Closeness(1), 0),
        (0x3F800000, 0x3F800002, programs.Closeness(1), 1),
        (0x3F800000, 0x3F800002, programs.Closeness(0, 1e-6), 0),
        (0x00000000, 0x80000000, programs.Closeness(0), 0),
        (0x00000001, 0x80000001, programs.Closeness(1), 1),
        (0x7FFFFFFF, 0xFFC00000, programs.Closeness(0), 0),
        (0x7FFFFFFF, 0x7F800000, programs.Closeness(9, 1.0), 1),
        (0x7F7FFFFF, 0x7F800000, programs.Closeness(1), 0),
        (0x3F800000, 0x7F800000, programs.Closeness(1, 1.0), 1),
    ],
)
def test_how_close_is_close(own: int, gpu: int, closeness: Any, mismatches: int) -> None:
    result = programs.Result("ex2", 0, 0, 1, "f32", closeness)
    mine, theirs = (np.array([bits], np.uint32) for bits in (own, gpu))
    agreement = compare.compare_close(result, mine, theirs, closeness)
    assert agreement.mismatches == mismatches


def test_a_stored_suite_runs_as_it_was_made(tmp_path: Path) -> None:
    """Programs survive the file; only blocks that differ from what was expected are kept."""
    (program,) = (p for p in family_of("tensors").values() if p.name == "tensors-maps")
    expected = storage.digests_of(program, emulate(program))
    storage.save(tmp_path / "suite.npz", [program], {program.name: {"expected": expected}})
    stored = storage.Suite(tmp_path / "suite.npz")
    again = stored.program(program.name)
    assert storage.identity(again) == storage.identity(program) == stored.identity(program.name)
    arrays = emulate(again)
    kept = run_there.measured(again, arrays, stored.extra("expected", program.name))
    assert list(kept) == [f"digests/{program.name}"]
    arrays[2].reshape(-1)[40] ^= 1
    kept = run_there.measured(again, arrays, stored.extra("expected", program.name))
    assert f"values/{program.name}/1/0" in kept and len(kept) == 2


def test_values_depend_on_no_library() -> None:
    """The first numbers of SplitMix64 as its authors print them for seed 0."""
    assert values.random_words(2, 0).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


# Facts, each measured because the emulator once disagreed.


@pytest.mark.parametrize(
    ("opcode", "types", "row", "want"),
    [
        ("add.f64", ("f64",) * 3, (0x7FF0000000000001, 0xFFF8000000000002), 0xFFF8000000000002),
        ("sub.f64", ("f64",) * 3, (0xFFF0000000000001, 0), 0xFFF8000000000001),
        ("div.rn.f64", ("f64",) * 3, (0x7FF0000000000001, 0xFFF8000000000002), 0x7FF8000000000001),
        ("fma.rn.f64", ("f64",) * 4, (0x7FF8000000000001, 0, 0x7FF8000000000003), 0x7FF8 << 48 | 3),
        ("neg.f64", ("f64",) * 2, (0x7FF0000000000001,), 0x7FF8000000000001),
        ("abs.f64", ("f64",) * 2, (0xFFF0000000000001,), 0xFFF8000000000001),
        ("max.f64", ("f64",) * 3, (0xFFFFFFFFFFFFFFFF, 0x7FF8000000000000), 0x7FF8000000000000),
        ("cvt.f64.f16", ("f64", "f16"), (0x7C01,), 0x7FF8040000000000),
        ("cvt.ftz.f64.f32", ("f64", "f32"), (0xFFC00000,), 0x7FFFFFFFE0000000),
        ("cvt.rn.f16.f64", ("f16", "f64"), (0x7FF0000000000001,), 0x7E00),
        ("cvt.rm.ftz.f16.f32", ("f16", "f32"), (0x80000001,), 0x8001),
        ("cvt.rna.tf32.f32", ("b32", "f32"), (0x7F800001,), 0x7F800000),
        ("cvt.rna.satfinite.tf32.f32", ("b32", "f32"), (0x7FC00000,), 0x7FBFE000),
    ],
)
def test_nans_and_subnormals(
    opcode: str, types: tuple[str, ...], row: tuple[int, ...], want: int
) -> None:
    check(opcode, types, [row] * LANES, [want] * LANES)


@pytest.mark.parametrize(("space", "want"), [("shared", 0x7FF8000000000001), ("global", None)])
def test_f64_atomics_quieten_nans_in_shared_memory_alone(space: str, want: int | None) -> None:
    """(old, operand): both NaN."""
    body = f"""
  mov.u32 %r1, smem; ld.global.b64 %rd10, [%rd1]; ld.global.b64 %rd11, [%rd1+8];
  st.shared.b64 [%r1], %rd10;
  red.{space}.add.f64 [{"%r1" if space == "shared" else "%rd1"}], %rd11;
  ld.shared.b64 %rd12, [%r1]; st.global.b64 [%rd1+16], %rd12;
"""
    memory = aligned(np.array([0x7FF0000000000001, 0x7FF0000000000002, 0], np.uint64))
    run_ptx(body, [memory], block=(1, 1, 1), smem=64)
    assert memory[2 if want else 0] == (want or 0x7FF0000000000002)


def test_the_last_arrival_may_drop() -> None:
    """The next phase already waits for fewer: one arrival ends it."""
    body = """
  mov.u32 %r1, smem; mbarrier.init.shared.b64 [%r1], 2;
  mbarrier.arrive.shared.b64 _, [%r1];
  mbarrier.arrive_drop.shared.b64 _, [%r1];
  mbarrier.arrive.shared.b64 _, [%r1];
  mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 1;
  selp.u32 %r2, 1, 0, %p1; st.global.b32 [%rd1], %r2;
"""
    out = np.zeros(1, np.uint32)
    run_ptx(body, [out], block=(1, 1, 1), smem=64)
    assert out[0] == 1


@pytest.mark.parametrize(("registers", "found"), [(136, set()), (144, {"deadlock"})])
def test_warps_share_the_registers_of_their_own_cta(registers: int, found: set[str]) -> None:
    """Half of the warps give 40 each; an H200 waits for ever for more."""
    (program,) = (p for p in barriers.barriers() if p.name == "barriers-setmaxnreg")
    text = program.text.replace("u32 136;", f"u32 {registers};")
    assert text.count(f"u32 {registers};") == 1
    report = run_ptx(text, [program.arrays[0].copy()], block=(256, 1, 1), smem=4096, collect=True)
    assert kinds(report) == found


# (warps, registers of warps 0-7, 8-11 and from 12 on, whether warp 15 keeps its own, finished):
# all that was tried on an H100, every kernel launched with 128 registers per thread.
SHARED_REGISTERS = [
    (16, 192, 80, 48, False, True),
    (16, 200, 80, 48, False, False),
    (16, 152, 80, 48, True, True),
    (16, 176, 80, 48, True, False),
    (15, 192, 80, 48, False, False),
    (15, 184, 80, 64, False, False),
    (15, 176, 80, 48, False, False),
    (15, 160, 80, 48, False, False),
    (15, 152, 80, 48, False, True),
    (15, 136, 80, 48, False, True),
    (14, 192, 80, 48, False, False),
    (14, 152, 80, 128, False, True),
    (13, 160, 80, 48, False, False),
    (13, 152, 80, 48, False, True),
    (12, 160, 80, 80, False, False),
    (12, 152, 80, 80, False, True),
    (9, 136, 40, 40, False, False),
    (9, 128, 40, 40, False, True),
]


@pytest.mark.parametrize(("warps", "high", "middle", "low", "keeps", "finished"), SHARED_REGISTERS)
def test_registers_are_those_of_a_quarter_of_the_sm(
    warps: int, high: int, middle: int, low: int, keeps: bool, finished: bool
) -> None:
    """Warp i takes what the CTA's other warps with its i % 4 gave: a missing warp has none."""
    body = f"""
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 256; @%p1 bra HIGH;
  setp.lt.u32 %p1, %r1, 384; @%p1 bra MIDDLE;
  setp.ge.u32 %p1, %r1, {480 if keeps else 512}; @%p1 bra END;
  setmaxnreg.dec.sync.aligned.u32 {low}; bra END;
MIDDLE:
  setmaxnreg.dec.sync.aligned.u32 {middle}; bra END;
HIGH:
  setmaxnreg.inc.sync.aligned.u32 {high};
END:
  bar.sync 0;
"""
    header = f".maxntid {32 * warps}, 1, 1\n.maxnreg 128\n{{\n  .reg .pred"
    text = programs.module_text(body, 1).replace("{\n  .reg .pred", header)
    report = run_ptx(text, [np.zeros(1, np.uint32)], block=(32 * warps, 1, 1), collect=True)
    assert kinds(report) == (set() if finished else {"deadlock"})


def test_out_of_bounds_nan_of_every_type() -> None:
    """Each 16 bits are 0x7ff7."""
    tensor = aligned(np.zeros(4, np.float32))
    tensor_map = TensorMap(tensor.ctypes.data, "f32", (4,), (), (8,), (1,), fill_nan=True, hints=0)
    body = """
  mov.u32 %r1, smem; mov.b64 %rd9, block0; mbarrier.init.shared.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 32;
  cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r1+128], [%rd9, {4}], [%r1];
again: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra again;
  ld.shared.v2.b64 {%rd10, %rd11}, [%r1+144]; st.global.v2.b64 [%rd2], {%rd10, %rd11};
"""
    out = np.zeros(2, np.uint64)
    run_ptx(body, [tensor, out], block=(1, 1, 1), smem=1024, blocks=[tensor_map.encode()])
    assert set(out.view(np.uint16).tolist()) == {0x7FF7}


def test_sizes_of_shared_memory() -> None:
    body = """
  mov.u32 %r1, %total_smem_size; mov.u32 %r2, %aggr_smem_size; mov.u32 %r3, %dynamic_smem_size;
  st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+4], %r2; st.global.b32 [%rd1+8], %r3;
"""
    out = np.zeros(3, np.uint32)
    run_ptx(body, [out], block=(1, 1, 1), smem=4096)
    assert out.tolist() == [4096, 5120, 4096]
