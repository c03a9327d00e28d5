"""The rules of wgmma, each with a fault planted in a kernel that keeps them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.execute import Report
from fa4.emulator.machine import grid, warpgroup_checks
from fa4.emulator.machine.state import Grid
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tools.faults import plant
from tests.emulator.kernels import kinds
from tests.emulator.wgmma_kernels import (
    SMEM,
    Layouts,
    Types,
    WgmmaKernel,
    multiply,
    product,
    registers,
)

BF16 = Types(Format.F32, Format.BF16, Format.BF16)
SMEM_A = product(BF16, 16)
REGISTER_A = product(BF16, 16, Layouts(a=None))
BASE = WgmmaKernel(SMEM_A)
FENCE, COMMIT = "  wgmma.fence.sync.aligned;\n", "  wgmma.commit_group.sync.aligned;\n"
WAIT = "  wgmma.wait_group.sync.aligned 0;\n"
SCHEDULES = ("fifo", "random", "adversarial")
ODD_WARP = "  and.b32 %r3, %r2, 1;\n  setp.eq.u32 %p6, %r3, 1;\n"


def run(kernel: WgmmaKernel, schedule: str = "fifo", **options: object) -> Report:
    return kernel.run(schedule=schedule, **options)[1]


def sole_finding(report: Report, kind: str) -> str:
    """The message of the first finding, which must be of this kind, as all others."""
    assert kinds(report) == {kind}, str(report)
    return report.findings[0].message + f" at {report.findings[0].line}"


def line_of(kernel: WgmmaKernel, text: str, occurrence: int = 0) -> int:
    """PTX line of the instruction that begins so."""
    lines = kernel.module().splitlines()
    found = [k + 1 for k, line in enumerate(lines) if line.strip().startswith(text)]
    return found[occurrence]


# Kernels that keep the rules.

VALID: dict[str, WgmmaKernel] = {
    "one product": BASE,
    "A in registers": WgmmaKernel(REGISTER_A),
    "a chain without fences": BASE.but(work=multiply(SMEM_A) + multiply(SMEM_A, 1) * 3),
    "two groups, the older awaited": BASE.but(
        work=multiply(SMEM_A)
        + COMMIT
        + multiply(SMEM_A, first=8)
        + COMMIT
        + "  wgmma.wait_group.sync.aligned 1;\n  add.u32 %v0, %v0, 0;\n",
        commit="",
    ),
    "the same accumulator in two groups": BASE.but(
        work=multiply(SMEM_A) + COMMIT + multiply(SMEM_A, 1)
    ),
    "A overwritten behind a wait and a fence": WgmmaKernel(REGISTER_A).but(
        work=multiply(REGISTER_A) + COMMIT + WAIT + "  mov.b32 %a0, 0;\n" + FENCE
        + multiply(REGISTER_A, 1)
    ),
    "another shape behind a wait and a fence": BASE.but(
        work=multiply(SMEM_A) + COMMIT + WAIT + FENCE + multiply(product(BF16, 8))
    ),
    "other registers in the meantime": BASE.but(
        work=multiply(SMEM_A) + COMMIT + "  mov.b32 %v100, 1;\n"
    ),
    "a second warpgroup": BASE.but(threads=256, store=False),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", VALID)
def test_a_correct_kernel_has_no_findings(name: str, schedule: str) -> None:
    report = run(VALID[name], schedule)
    assert report.ok, str(report)


# Registers in flight.


@pytest.mark.parametrize(
    ("planted", "name", "what"),
    [
        ("  add.f32 %f1, %f2, %f3;\n  mov.b32 %r50, %v3;\n", "%v3", "the accumulator"),
        ("  mov.b32 %v5, 0;\n", "%v5", "the accumulator"),
        ("  mov.b32 %a2, 0;\n", "%a2", "A"),
        ("  add.u32 %r50, %a1, 1;\n", "%a1", "A"),
    ],
)
def test_a_register_in_flight_is_touched(planted: str, name: str, what: str) -> None:
    """Read or written before the wait: both lines are told."""
    kernel = WgmmaKernel(REGISTER_A).but(
        work=multiply(REGISTER_A) + COMMIT + planted, commit="", store=False
    )
    text = sole_finding(run(kernel), "missing-wait")
    last = planted.strip().splitlines()[-1].strip()
    assert f"touches {name}" in text and f"part of {what}:" in text
    assert f"PTX line {line_of(kernel, 'wgmma.mma_async')} holds" in text
    assert text.endswith(f"at {line_of(kernel, last)}")


def test_stores_before_the_wait() -> None:
    """Also where no group was committed, or too many may be under way."""
    for changes in (
        {"wait": ""}, {"wait": "wgmma.wait_group.sync.aligned 1;"}, {"commit": ""},
    ):  # fmt: skip
        found = kinds(run(BASE.but(**changes)))
        assert "missing-wait" in found and found <= {"missing-wait", "exit"}, changes


def test_the_check_of_registers_is_what_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it off, the same kernel passes."""
    planted = BASE.but(work=multiply(SMEM_A) + COMMIT + "  mov.b32 %v5, 0;\n", commit="")
    assert kinds(run(planted)) == {"missing-wait"}
    monkeypatch.setattr(warpgroup_checks, "_report_use", lambda warp, step: None)
    assert run(planted).ok


ANOTHER: dict[str, tuple[WgmmaKernel, str]] = {
    "another shape on the accumulator in flight": (
        BASE.but(work=multiply(SMEM_A) + COMMIT + FENCE + multiply(product(BF16, 8))),
        "missing-wait",
    ),
    "other places of the accumulator in flight": (
        BASE.but(work=multiply(SMEM_A) + multiply(SMEM_A, first=4)), "missing-wait",
    ),
    "the accumulator in flight as A": (
        WgmmaKernel(REGISTER_A).but(
            work=multiply(REGISTER_A)
            + multiply(REGISTER_A, first=8).replace("%a0, %a1, %a2, %a3", "%v0, %v1, %v2, %v3")
        ),
        "missing-wait",
    ),
    "another shape without a fence": (
        BASE.but(work=multiply(SMEM_A) + COMMIT + WAIT + multiply(product(BF16, 8))),
        "missing-fence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANOTHER)
def test_registers_used_in_another_way(name: str) -> None:
    kernel, kind = ANOTHER[name]
    text = sole_finding(run(kernel), kind)
    assert f"the wgmma.mma_async at PTX line {line_of(kernel, 'wgmma.mma_async')}" in text


# wgmma.fence.


def test_no_fence_before_the_first() -> None:
    text = sole_finding(run(BASE.but(fence="")), "missing-fence")
    assert "the first wgmma.mma_async" in text


@pytest.mark.parametrize(
    ("planted", "name"), [("  mov.b32 %v2, 0;\n", "%v2"), ("  mov.b32 %a3, 0;\n", "%a3")]
)
def test_no_fence_after_registers_were_written(planted: str, name: str) -> None:
    kernel = WgmmaKernel(REGISTER_A).but(work=planted + multiply(REGISTER_A, 1))
    text = sole_finding(run(kernel), "missing-fence")
    line = line_of(kernel, planted.strip())
    assert f"uses {name}, which PTX line {line}: mov.b32 has touched" in text
    assert text.endswith(f"at {line_of(kernel, 'wgmma.mma_async')}")


def test_the_check_of_fences_is_what_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = BASE.but(fence="")
    assert kinds(run(planted)) == {"missing-fence"}
    monkeypatch.setattr(warpgroup_checks, "_report_unfenced", lambda fragment, bits: None)
    assert run(planted).ok


# Shared memory.


def test_stores_that_no_proxy_fence_makes_visible() -> None:
    text = sole_finding(run(BASE.but(proxy_fence="")), "missing-proxy-fence")
    assert "a wgmma of CTA 0 warp" in text and "fence.proxy.async" in text
    assert run(BASE.but(proxy_fence=""), checks=False).ok


def test_no_synchronisation_after_the_stores() -> None:
    assert "race" in kinds(run(BASE.but(sync="")))


OVERWRITE = "  st.shared.b32 [%r20+{}], 0;\n"
ALONE = "  setp.eq.u32 %p7, %r1, 0;\n  @%p7 "


@pytest.mark.parametrize("offset", [64, len(SMEM_A.image) - 2048], ids=["A", "B"])
def test_operands_overwritten_in_flight(offset: int) -> None:
    """By a store of one thread before it has waited for the group."""
    planted = ALONE + OVERWRITE.format(offset).strip() + "\n"
    kernel = BASE.but(work=multiply(SMEM_A) + COMMIT + planted, commit="")
    text = sole_finding(run(kernel), "race")
    assert (
        f"overwrites what a wgmma of CTA 0 warp 0 (PTX line {line_of(kernel, 'wgmma.mma')}" in text
    )


def test_a_warp_may_overwrite_its_own_rows_of_a() -> None:
    """No other warp reads them, so its own wait is enough."""
    planted = ALONE + OVERWRITE.format(64).strip() + "\n"
    assert run(BASE.but(after=planted)).ok
    others = planted.replace("%r1, 0;", "%r1, 32;")
    assert "race" in kinds(run(BASE.but(after=others)))


def test_the_wait_of_one_warp_is_not_that_of_another() -> None:
    """B is read by all four: who overwrites it must know that all have waited."""
    planted = ALONE + OVERWRITE.format(len(SMEM_A.image) - 2048).strip() + "\n"
    text = sole_finding(run(BASE.but(after=planted)), "race")
    assert "a wgmma of CTA 0 warp" in text
    assert run(BASE.but(after="  bar.sync 0;\n" + planted)).ok


def copy_of(bytes_count: int) -> str:
    """A bulk copy over the operands, by thread 0, and the wait for it."""
    return f"""
  setp.eq.u32 %p7, %r1, 0;
  @!%p7 bra COPY_DONE;
  mbarrier.init.shared::cta.b64 [%r20+{len(SMEM_A.image)}], 1;
  fence.mbarrier_init.release.cluster;
  add.u32 %r30, %r20, {len(SMEM_A.image)};
  mbarrier.arrive.expect_tx.shared::cta.b64 %rd30, [%r30], {bytes_count};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r20], [%rd1], {bytes_count}, [%r30];
POLL:
  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r30], 0;
  @!%p9 bra POLL;
COPY_DONE:
"""


def test_a_copy_over_operands_in_flight() -> None:
    """TMA writes what a product that nothing has waited for still reads."""
    early = BASE.but(work=multiply(SMEM_A) + COMMIT + copy_of(1024), commit="")
    text = sole_finding(run(early, smem=len(SMEM_A.image) + 64), "race")
    assert "overwrites what a wgmma of CTA 0" in text
    late = BASE.but(after="  bar.sync 0;\n" + copy_of(1024))
    assert run(late, smem=len(SMEM_A.image) + 64).ok


@pytest.mark.parametrize(("span", "found"), [(0, set()), (None, set()), (128, {"descriptor"})])
def test_descriptors_must_have_the_swizzle_of_the_copy(
    span: int | None, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noted for all operands, as a tensor copy would have."""
    original = grid.start_cluster

    def start(started: Grid, index: int) -> None:
        original(started, index)
        for cta in started.resident[-1].ctas:
            cta.swizzles.note(SMEM, SMEM + len(SMEM_A.image), span)

    monkeypatch.setattr(grid, "start_cluster", start)
    copied = copy_of(len(SMEM_A.image)) + "  bar.sync 0;\n"
    kernel = BASE.but(copy=False, before=copied)
    assert kinds(run(kernel, smem=len(SMEM_A.image) + 64)) == found


def test_operands_outside_shared_memory() -> None:
    far = product(BF16, 16)
    far.b_desc += 1 << 10
    text = sole_finding(run(WgmmaKernel(far)), "out-of-bounds")
    assert "wgmma.mma_async reads shared bytes" in text


def test_a_descriptor_of_tcgen05_is_refused() -> None:
    bad = product(BF16, 16)
    bad.b_desc |= 1 << 46
    text = sole_finding(run(WgmmaKernel(bad)), "descriptor")
    assert "bits 46-48 must be zero" in text


# The warpgroup.


def test_a_part_of_the_warp() -> None:
    work = "  setp.lt.u32 %p7, %r1, 16;\n  @%p7 " + multiply(SMEM_A).splitlines()[-1].strip() + "\n"
    before = "\n".join(multiply(SMEM_A).splitlines()[:-1]) + "\n"
    assert "divergence" in kinds(run(BASE.but(work=before + work)))


def test_lanes_with_other_descriptors() -> None:
    text = multiply(SMEM_A)
    lines = text.splitlines()
    lines.insert(-1, "  cvt.u64.u32 %rd40, %r1;\n  add.u64 %rd21, %rd21, %rd40;")
    report = run(BASE.but(work="\n".join(lines) + "\n"))
    assert "the lanes give different descriptors" in sole_finding(report, "divergence")


def test_warps_with_other_descriptors() -> None:
    lines = multiply(SMEM_A).splitlines()
    lines.insert(-1, "  cvt.u64.u32 %rd40, %r2;\n  shl.b64 %rd40, %rd40, 4;"
                     "\n  add.u64 %rd21, %rd21, %rd40;")  # fmt: skip
    report = run(BASE.but(work="\n".join(lines) + "\n"), smem=1 << 16)
    assert "all four warps must execute the same" in sole_finding(report, "warpgroup")


def test_warps_that_execute_different_products() -> None:
    both = multiply(SMEM_A).strip().splitlines()
    work = "\n".join(both[:-1]) + ODD_WARP
    work += f"  @%p6 bra ODD;\n  {both[-1]}\n  bra JOIN;\nODD:\n  {both[-1]}\nJOIN:\n"
    assert "all four warps must execute the same" in sole_finding(
        run(BASE.but(work=work)), "warpgroup"
    )


def test_a_warp_that_does_not_execute_it() -> None:
    """The others wait for ever; the report says for whom."""
    lines = multiply(SMEM_A).strip().splitlines()
    work = ODD_WARP + "\n".join(lines[:-1]) + f"\n  @!%p6 {lines[-1]}\n"
    report = run(BASE.but(work=work, store=False, after="  bar.sync 1;\n"))
    text = sole_finding(report, "deadlock")
    assert "which warps 1, 3 have not executed" in text


def test_a_warp_that_has_exited() -> None:
    work = "  setp.eq.u32 %p6, %r2, 3;\n  @%p6 exit;\n" + multiply(SMEM_A)
    report = run(BASE.but(work=work, store=False))
    assert kinds(report) <= {"warpgroup", "deadlock"} and not report.ok


@pytest.mark.parametrize("threads", [96, 160])
def test_a_group_that_is_not_whole(threads: int) -> None:
    report = run(BASE.but(threads=threads, store=False, copy=False, proxy_fence=""))
    text = next(f.message for f in report.findings if f.kind == "warpgroup")
    assert "needs four whole warps from a multiple of four on" in text


def test_an_exit_with_products_under_way() -> None:
    report = run(BASE.but(wait="", store=False))
    assert kinds(report) == {"exit"} and "wgmma" in report.findings[0].message


# All single faults of a kernel, by the planter.

PLANTED = VALID["two groups, the older awaited"]


def test_the_planter_knows_the_instructions() -> None:
    """Of the fence, two commits and two waits; what is planted is found."""
    text = PLANTED.module()
    faults = [fault for fault in plant(text) if fault.instruction.startswith("wgmma")]
    assert Counter(fault.kind for fault in faults) == {
        "wgmma fence removed": 1, "wgmma commit removed": 2, "wgmma wait removed": 2,
        "one group more left": 2,
    }  # fmt: skip
    assert PLANTED.run_text(text)[1].ok
    for fault in faults:
        report = PLANTED.run_text(fault.text)[1]
        assert kinds(report) & {"missing-fence", "missing-wait", "exit"}, (fault.kind, fault.line)


# What does not exist.

REFUSED: dict[str, tuple[Callable[[str], str], str]] = {
    "sparse": (lambda t: t.replace("mma_async.sync", "mma_async.sp.sync"), "sparse"),
    "n12": (lambda t: t.replace("n16k16", "n12k16"), "n12 does not exist"),
    "k8": (lambda t: t.replace("n16k16", "n16k8"), "instructions of .bf16 have k16"),
    "f16 sums of bf16": (lambda t: t.replace("f32.bf16", "f16.bf16"), "do not exist"),
    "one register too few": (lambda t: t.replace(", %v7}", "}"), "7 registers for D, not 8"),
    "a scale of 2": (lambda t: t.replace(", 1, 1, 0, 0", ", 2, 1, 0, 0"), "not 1 or -1"),
    "satfinite": (lambda t: t.replace("n16k16", "n16k16.satfinite"), "for integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_exist_is_refused(name: str) -> None:
    change, words = REFUSED[name]
    work = change(multiply(SMEM_A))
    assert work != multiply(SMEM_A)
    with pytest.raises(UnsupportedInstruction, match=words):
        run(BASE.but(work=work))


def test_accumulator_names_are_those_of_the_rig() -> None:
    """The tests above name registers that the products use."""
    assert registers(8) in multiply(SMEM_A)
    assert np.array_equal(BASE.run()[0], SMEM_A.a @ SMEM_A.b.T)
    assert Swizzle.NONE is SMEM_A.layouts.b[0]
