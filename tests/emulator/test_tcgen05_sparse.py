"""tcgen05.mma.sp against the product in float64 of A with the zeros that it leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.isa.tensor_mma import MmaForm, prepare
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.kernels import kinds
from tests.emulator.tcgen05_support import packed_descriptor
from tests.emulator.tensor_kernels import DATA, LANE_ADDRESS, TensorKernel, read_out, wait
from tests.emulator.tensor_operands import DTYPES, K, Operands, commit, mma, operands, place

SMEM_BYTES, D_COLUMN, METADATA = 128 * 1024, 64, 40
PAIRS = [(i, j) for i in range(4) for j in range(4) if i != j]
TYPES = [("f16", Format.F16), ("f16", Format.BF16), ("f8f6f4", Format.E4M3), ("i8", Format.S8)]
WIDE = (Swizzle.NONE, Swizzle.B64, Swizzle.B128)  # K of B is 64 bytes


def sparse_operands(
    kind: str, element: Format, m: int, n: int, group: int, swizzle: Swizzle, seed: int
) -> tuple[Operands, np.ndarray, np.ndarray]:
    """(the operands as they lie, A with its zeros, the codes (m, K / 4) of what is there)."""
    random = np.random.default_rng(seed)
    dense = operands(kind, element, m, n, group, swizzle, seed)
    depth, size = 2 * K[kind], element.container_bytes
    low = 0 if element is Format.U8 else -3
    b = random.integers(low, 4, (n, depth)).astype(np.float64)
    start = DATA + 32 * 1024
    b_desc = packed_descriptor(start, swizzle, n // group, depth, size, True)
    image = np.zeros((group, 64 * 1024), np.uint8)
    image[:, : dense.image.shape[1]] = dense.image
    for rank in range(group):
        place(image[rank], b_desc, np.split(b, group)[rank].astype(DTYPES[element]))
    pairs = np.array(PAIRS)[random.integers(0, len(PAIRS), (m, depth // 4))]
    whole = np.zeros((m, depth))
    for row in range(m):
        for four in range(depth // 4):
            for i in (0, 1):
                whole[row, 4 * four + pairs[row, four, i]] = dense.a[row, 2 * four + i]
    codes = pairs[:, :, 0] | pairs[:, :, 1] << 2
    problem = replace(dense, b=b, image=image, b_desc=b_desc.encode(), idesc=dense.idesc | 4)
    return problem, whole, codes


def metadata_words(codes: np.ndarray, seed: int, selector: int) -> np.ndarray:
    """(128, 2) words of tensor memory; the column that is not selected may hold anything."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, (128, 2), np.uint32)
    for lane in range(128):
        if codes.shape[1] == 16:  # 8-bit types: a row in each lane
            listed = [codes[lane, 8 * k : 8 * k + 8] for k in (0, 1)]
            columns = (0, 1)
        else:  # half of K of two rows in each lane
            block, rest = divmod(lane, 16)
            half, row = divmod(rest, 8)
            rows = (16 * block + row, 16 * block + row + 8)
            part = slice(4 * half, 4 * half + 4)
            listed = [np.concatenate([codes[r, part] for r in rows])]
            columns = (selector,)
        for column, values in zip(columns, listed, strict=True):
            words[lane, column] = sum(int(code) << 4 * i for i, code in enumerate(values))
    return words


def numbers(words: np.ndarray, kind: str) -> np.ndarray:
    return words.view(np.int32 if kind == "i8" else np.float32).astype(np.float64)


@pytest.mark.parametrize(("kind", "element"), TYPES)
@settings(max_examples=8)
@given(
    n=st.sampled_from([32, 64, 160]), group=st.integers(1, 2), swizzle=st.sampled_from(WIDE),
    seed=st.integers(0, 99), selector=st.integers(0, 1),
)  # fmt: skip
def test_the_definition(
    kind: str, element: Format, n: int, group: int, swizzle: Swizzle, seed: int, selector: int
) -> None:
    """Of one and two CTAs, for each of which the metadata of its rows lies in its memory."""
    selector = selector if element.container_bytes == 2 else 0
    problem, whole, codes = sparse_operands(kind, element, 128 * group, n, group, swizzle, seed)
    smems = [np.zeros(SMEM_BYTES, np.uint8) for _ in range(group)]
    tmems = [np.zeros((128, 512), np.uint32) for _ in range(group)]
    for rank, (smem, tmem) in enumerate(zip(smems, tmems, strict=True)):
        smem[DATA : DATA + problem.image.shape[1]] = problem.image[rank]
        own = codes[128 * rank : 128 * rank + 128]
        tmem[:, METADATA : METADATA + 2] = metadata_words(own, seed, selector)
    job, _, macs = prepare(
        MmaForm(kind, group, False, False, None, True),
        (D_COLUMN, problem.a_desc, problem.b_desc, METADATA),
        problem.idesc | selector, False, 0, (),
    )  # fmt: skip
    job.plan.execute(smems, tmems)
    found = np.concatenate([tmem[:, D_COLUMN : D_COLUMN + n].copy() for tmem in tmems])
    np.testing.assert_array_equal(numbers(found, kind), whole @ problem.b.T)
    assert macs == 128 * group * n * K[kind]


def test_what_is_left_out_takes_no_part() -> None:
    """Not even as zero times infinity."""
    problem, whole, codes = sparse_operands("f16", Format.BF16, 128, 32, 1, Swizzle.B64, 5)
    problem.b[3, 5], problem.b[9, 20] = np.inf, np.nan
    raw = problem.b.astype(DTYPES[Format.BF16])
    desc = packed_descriptor(DATA + 32 * 1024, Swizzle.B64, 32, 32, 2, True)
    place(problem.image[0], desc, raw)
    smem, tmem = np.zeros(SMEM_BYTES, np.uint8), np.zeros((128, 512), np.uint32)
    smem[DATA : DATA + problem.image.shape[1]] = problem.image[0]
    tmem[:, METADATA : METADATA + 2] = metadata_words(codes, 5, 0)
    form = MmaForm("f16", 1, False, False, None, True)
    addresses = (D_COLUMN, problem.a_desc, problem.b_desc, METADATA)
    job, *_ = prepare(form, addresses, problem.idesc, False, 0, ())
    job.plan.execute([smem], [tmem])
    stored = np.zeros_like(whole, bool)
    for i in (0, 2):
        stored[np.arange(128)[:, None], 4 * np.arange(8) + (codes >> i & 3)] = True
    terms = np.zeros((128, 32, 32))
    with np.errstate(invalid="ignore"):
        np.multiply(whole[:, None], problem.b, out=terms, where=stored[:, None])
        expected = terms.sum(axis=2)
    found = tmem[:, D_COLUMN : D_COLUMN + 32].copy().view(np.float32)
    assert np.isfinite(expected).any() and not np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)


def kernel_of(problem: Operands, work: str = "") -> TensorKernel:
    """Metadata comes from registers, by tcgen05.st."""
    before = ""
    before += "  mul.wide.u32 %rd51, %r1, 8; add.u64 %rd51, %rd51, %rd3;\n"
    before += "  ld.global.v2.b32 {%v0, %v1}, [%rd51];\n" + LANE_ADDRESS
    before += f"  tcgen05.st.sync.aligned.32x32b.x2.b32 [%r22+{METADATA}], {{%v0, %v1}};\n"
    before += "  tcgen05.wait::st.sync.aligned;\n  bar.sync 0;\n"
    product = mma(problem, "f16", form="mma.sp").replace("%rd21, %r25", "%rd21, [%r27], %r25")
    work = f"  add.u32 %r27, %r21, {METADATA};\n" + (work or product) + commit()
    image = problem.image.shape[1]
    return TensorKernel(before=before, work=work, after=wait() + read_out("%rd2", 32)).but(
        image_bytes=image
    )


@pytest.mark.parametrize("schedule", ["fifo", "random", "adversarial"])
def test_in_a_kernel(schedule: str) -> None:
    problem, whole, codes = sparse_operands("f16", Format.F16, 128, 32, 1, Swizzle.B64, 7)
    out = np.zeros((128, 32), np.uint32)
    arrays = [problem.image.copy(), out, metadata_words(codes, 7, 0)]
    report = kernel_of(problem).run(arrays, schedule=schedule, seed=1)
    assert report.ok, str(report)
    np.testing.assert_array_equal(numbers(out, "f16"), whole @ problem.b.T)


def test_undefined_metadata_and_metadata_under_way_are_findings() -> None:
    problem, _, codes = sparse_operands("f16", Format.F16, 128, 32, 1, Swizzle.B64, 7)
    out, words = np.zeros((128, 32), np.uint32), metadata_words(codes, 7, 0)
    kernel = kernel_of(problem)
    unordered = kernel.but(before=kernel.before.replace("tcgen05.wait::st.sync.aligned;", ""))
    report = unordered.run([problem.image.copy(), out, words])
    assert "race" in kinds(report)
    words[3, 0] = words[3, 0] & ~np.uint32(0xF00) | 0x500
    report = kernel.run([problem.image.copy(), out, words])
    assert kinds(report) == {"fault"}
    assert "metadata 0b0101 for row 3, columns from 8 on" in str(report)


SPARSE = MmaForm("f16", 1, False, False, None, True)


@pytest.mark.parametrize(
    ("form", "m", "metadata", "bits", "why"),
    [
        (SPARSE, 128, METADATA + 1, 4, "an even column"),
        (SPARSE, 128, METADATA | 16 << 16, 4, "lane 16"),
        (SPARSE, 128, METADATA, 4 | 2, "sparsity selector 2"),
        (SPARSE, 64, METADATA, 4, "64 rows in a CTA"),
        (SPARSE, 128, METADATA, 0, "bit 2, sparsity, is 0, and the instruction has .sp"),
        (replace(SPARSE, sparse=False), 128, METADATA, 4, "is 1, and the instruction has no .sp"),
    ],
)
def test_operands_that_are_refused(
    form: MmaForm, m: int, metadata: int, bits: int, why: str
) -> None:
    problem = operands("f16", Format.F16, m, 32)
    addresses: Any = (D_COLUMN, problem.a_desc, problem.b_desc, metadata)
    with pytest.raises(DescriptorError, match=why):
        prepare(form, addresses, problem.idesc | bits, False, 0, ())


@pytest.mark.parametrize(
    "opcode",
    [
        "tcgen05.mma.sp.cta_group::1.kind::tf32 [%r21], %rd20, %rd21, [%r27], %r25, %p5;",
        "tcgen05.mma.ws.sp.cta_group::1.kind::f16 [%r21], %rd20, %rd21, [%r27], %r25, %p5;",
        "tcgen05.mma.sp.cta_group::1.kind::mxf8f6f4.block_scale [%r21], %rd20, %rd21, [%r27], "
        "%r25, [%r21], [%r21], %p5;",
    ],
)
def test_forms_that_are_refused(opcode: str) -> None:
    problem = operands("f16", Format.F16, 128, 32)
    with pytest.raises(UnsupportedInstruction, match="sparse A"):
        kernel_of(problem, opcode).run([problem.image.copy(), np.zeros((128, 32), np.uint32)])
