"""What a launch has done in all: products, exponentials, copied bytes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fa4.emulator.machine.launch_work import EXCHANGED, LOADED, STORED, LaunchWork
from fa4.emulator.machine.launch_work import _direction as direction
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tools.describe import describe_report
from tests.emulator.kernels import run_ptx
from tests.emulator.test_events import COPY
from tests.emulator.wgmma_kernels import Types, WgmmaKernel, multiply, product


def work(body: str, block: int = 32, **options: object) -> LaunchWork:
    source = np.zeros(64 + 256, np.uint8)
    start = -source.ctypes.data % 256
    arrays = [source[start : start + 64]]
    (found,) = run_ptx(body, arrays, smem=256, block=(block, 1, 1), **options).work
    return found


@pytest.mark.parametrize("threads", [128, 256])
def test_products_count_once_for_a_warpgroup(threads: int) -> None:
    """Two of m64n24k16 by each warpgroup, whatever becomes of the results."""
    types = Types(Format.F32, Format.BF16, Format.BF16)
    problem = product(types, 24)
    kernel = WgmmaKernel(problem, threads=threads, store=False)
    report = kernel.but(work=multiply(problem) + multiply(problem, 1)).run()[1]
    (found,) = report.work
    count = 2 * threads // 128
    assert dict(found.products) == {types.opcode(24): count}
    assert dict(found.macs) == {types.opcode(24): count * 64 * 24 * 16}
    assert not found.copied_bytes and not found.exponentials


def test_products_of_a_warp() -> None:
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    text = f"{opcode} {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%r7}}, {{%r1,%r2,%r3,%r4}};"
    found = work(text, block=96)
    assert found.products == {opcode: 3} and found.macs == {opcode: 3 * 16 * 8 * 8}


def test_exponentials() -> None:
    """Of all lanes of a warp; the packed form has two."""
    text = "ex2.approx.ftz.f32 %f1, %f2;\n  ex2.approx.f16x2 %r1, %r2;\n"
    assert work(text, block=64).exponentials == 2 * 32 * 3


def test_copies() -> None:
    found = work(COPY)
    assert found.copied_bytes == {LOADED: 64} and not found.products


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
            LOADED,
        ),
        ("cp.async.bulk.global.shared::cta.bulk_group", STORED),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", STORED),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", EXCHANGED),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", ""),
        ("st.async.weak.shared::cluster.b32", ""),
    ],
)
def test_directions(opcode: str, expected: str) -> None:
    assert direction(opcode) == expected


def test_it_is_part_of_the_report() -> None:
    report = run_ptx("ex2.approx.ftz.f32 %f1, %f2;")
    (described,) = json.loads(json.dumps(describe_report(report, "")))["work"]
    assert described["exponentials"] == 32 and described["kernel"] == "kernel"
    assert described.keys() == {field.name for field in dataclasses.fields(LaunchWork)}
