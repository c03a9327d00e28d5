"""Block-scaled tcgen05.mma against sums over elements, each with its factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.isa.tensor_mma import MmaForm, prepare
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError, TmemError
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.scaled import decode_scaled
from tests.emulator.kernels import run_ptx
from tests.emulator.tcgen05_support import (
    code_value,
    element_address,
    packed_descriptor,
    write_code,
)

SMEM_BYTES, B_START = 64 * 1024, 32 * 1024
D_COLUMN, SCALES_A, SCALES_B = 64, 400, 420
EIGHT_BITS = {Format.E4M3: 0, Format.E5M2: 1, Format.E2M3: 3, Format.E3M2: 4, Format.E2M1: 5}
# kind, modifier -> elements of K, elements of a factor, codes of its type
FORMS = {
    ("mxf8f6f4", "block32"): (32, 32, (1,)),
    ("mxf8f6f4", ""): (32, 32, (1,)),
    ("mxf4", "scale_vec::2X"): (64, 32, (1,)),
    ("mxf4nvf4", "scale_vec::4X"): (64, 16, (0, 1)),
    ("mxf4nvf4", "block32"): (64, 32, (0, 1)),
}


def descriptor(n: int, codes: tuple[int, int], ids: tuple[int, int], kind: int, m: int) -> int:
    """PTX ISA Tables 43 and 44."""
    place = n // 8 << 17 | m // 16 << 24 | kind << 23
    return place | codes[0] << 7 | codes[1] << 10 | ids[0] << 29 | ids[1] << 4


def factor(kind: int, code: int) -> float:
    """ue8m0, or ue4m3."""
    if kind:
        return 2.0 ** (code - 127) if code != 255 else math.nan
    return code_value(Format.E4M3, code & 0x7F)


def write_element(
    smem: np.ndarray, desc: Any, place: tuple[int, int], element: Format, code: int, packed: bool
) -> None:
    """An element of a K-major operand; packed: two to a byte, the first in the low half."""
    row, k = place
    if not packed:
        write_code(smem, element_address(desc, row, k, 1, True), element, code)
        return
    address = element_address(desc, row, k // 2, 1, True)
    smem[address] |= code << 4 * (k % 2)


@st.composite
def products(draw: st.DrawFn) -> tuple[Any, ...]:
    """(kind and modifier, formats, N, type of factors, data ids, CTAs, seed)"""
    form = draw(st.sampled_from(sorted(FORMS)))
    formats = st.sampled_from(list(EIGHT_BITS)) if form[0] == "mxf8f6f4" else st.just(Format.E2M1)
    k, vector, kinds = FORMS[form]
    blocks = k // vector
    ids = st.sampled_from(range(0, 4, blocks))
    group = draw(st.sampled_from((1, 2)))
    n = draw(st.sampled_from((8, 24, 40, 72))) * (2 if group == 2 else 1)
    return (form, (draw(formats), draw(formats)), n, draw(st.sampled_from(kinds)),
            (draw(ids), draw(ids)), group, draw(st.integers(0, 99)))  # fmt: skip


@settings(max_examples=25)
@given(products())
def test_the_definition(drawn: tuple[Any, ...]) -> None:
    """Some rows and all columns of D, one and two CTAs, any formats, factors and data ids."""
    (kind, vector), formats, n, scale_kind, ids, group, seed = drawn
    rng = np.random.default_rng(seed)
    k, block, _ = FORMS[kind, vector]
    packed = kind != "mxf8f6f4"
    m, rows_b = 128, n // group
    descs = [
        packed_descriptor(start, Swizzle.NONE, rows, k // 2 if packed else k, 1, True)
        for start, rows in ((0, m), (B_START, rows_b))
    ]
    smems = [np.zeros(SMEM_BYTES, np.uint8) for _ in range(group)]
    tmems = [rng.integers(0, 1 << 32, (128, 512), np.uint32) for _ in range(group)]
    exact = [np.zeros((count * group, k)) for count in (m, rows_b)]
    for which, (element, count) in enumerate(zip(formats, (m, rows_b), strict=True)):
        for rank, smem in enumerate(smems):
            for row in range(count):
                for at in range(k):
                    code = int(rng.integers(0, 1 << element.bits))
                    if not math.isfinite(code_value(element, code)):
                        code = 1
                    write_element(smem, descs[which], (row, at), element, code, packed)
                    exact[which][rank * count + row, at] = code_value(element, code)
    for which, (column, first) in enumerate(((SCALES_A, ids[0]), (SCALES_B, ids[1]))):
        count = m if which == 0 else n
        shared = rng.integers(118, 136, (count, k // block)) if scale_kind else rng.integers(
            1, 0x7E, (count, k // block))  # fmt: skip
        for rank, tmem in enumerate(tmems):
            own = shared if which or not rank else np.roll(shared, 1, 0)
            for row in range(count):
                for at in range(k // block):
                    for quarter in range(4):
                        words = tmem[32 * quarter + row % 32 : 32 * quarter + row % 32 + 1]
                        words[:, column + row // 32].view(np.uint8)[first + at] = own[row, at]
                    value = factor(scale_kind, int(own[row, at]))
                    place = row + m * rank if which == 0 else row
                    if which == 0 or rank == 0:
                        exact[which][place, at * block : (at + 1) * block] *= value
    codes = (1, 1) if packed else (EIGHT_BITS[formats[0]], EIGHT_BITS[formats[1]])
    job, _, macs = prepare(
        MmaForm(kind, group, False, False, vector),
        (D_COLUMN, *(d.encode() for d in descs), SCALES_A | ids[0] << 30, SCALES_B),
        descriptor(n, codes, ids, scale_kind, m * group), False, 0, (),
    )  # fmt: skip
    job.plan.execute(smems, tmems)
    wanted = exact[0] @ exact[1].T
    got = np.concatenate([t[:, D_COLUMN : D_COLUMN + n].copy().view(np.float32) for t in tmems])
    scale = np.abs(exact[0]) @ np.abs(exact[1]).T
    assert macs == m * group * n * k
    assert (np.abs(got - wanted) <= 2.0**-22 * scale + 1e-30).all()


def test_each_quarter_has_copies_of_its_own() -> None:
    """A factor that was not copied to a quarter spoils the rows there, and no others."""
    rng = np.random.default_rng(0)
    smem = rng.integers(0, 0x40, SMEM_BYTES).astype(np.uint8)
    descs = [packed_descriptor(start, Swizzle.NONE, rows, 32, 1, True).encode()
             for start, rows in ((0, 128), (B_START, 32))]  # fmt: skip
    results = []
    for missing in (None, 2):
        tmem = np.full((128, 512), 0x7F7F7F7F, np.uint32)
        if missing is not None:
            tmem[32 * missing : 32 * missing + 32, SCALES_B] = 0
        job, *_ = prepare(MmaForm("mxf8f6f4", 1, False, False, ""),
                          (D_COLUMN, *descs, SCALES_A, SCALES_B),
                          descriptor(32, (0, 0), (0, 0), 1, 128), False, 0, ())  # fmt: skip
        job.plan.execute([smem], [tmem])
        results.append(tmem[:, D_COLUMN : D_COLUMN + 32].copy())
    same = (results[0] == results[1]).all(axis=1)
    assert same[:64].all() and same[96:].all() and not same[64:96].any()


GOOD = descriptor(32, (0, 0), (0, 0), 1, 128)


@pytest.mark.parametrize(
    ("value", "kind", "vector", "why"),
    [
        (GOOD | 1 << 2, "mxf8f6f4", "", "sparse matrix A"),
        (GOOD | 2 << 7, "mxf8f6f4", "", "A type 2 does not exist"),
        (GOOD & ~(1 << 23), "mxf8f6f4", "", "factors are of type ue8m0"),
        (descriptor(32, (1, 1), (1, 0), 1, 128), "mxf4", "", "data ids"),
        (descriptor(32, (1, 0), (0, 0), 1, 128), "mxf4", "", "B type 0 does not exist"),
        (descriptor(32, (1, 1), (0, 0), 1, 128) | 1 << 31, "mxf4", "", "K = 96"),
        (descriptor(32, (5, 0), (0, 0), 1, 128) | 1 << 15, "mxf8f6f4", "", "K-major only"),
        (GOOD | 1 << 3, "mxf8f6f4", "", "reserved bits"),
    ],
)
def test_descriptors_that_do_not_exist(value: int, kind: str, vector: str, why: str) -> None:
    """Each says why."""
    with pytest.raises(DescriptorError, match=why):
        decode_scaled(value, kind, vector)


def test_shapes_and_places_that_do_not_exist() -> None:
    """M is 128 for each CTA; factors start at lane 0, within tensor memory."""
    desc = packed_descriptor(0, Swizzle.NONE, 128, 32, 1, True).encode()
    form = MmaForm("mxf8f6f4", 1, False, False, "")

    def plan(bits: int, scales: tuple[int, int]) -> None:
        prepare(form, (D_COLUMN, desc, desc, *scales), bits, False, 0, ())

    with pytest.raises(DescriptorError, match="M must be one of"):
        plan(descriptor(32, (0, 0), (0, 0), 1, 64), (SCALES_A, SCALES_B))
    with pytest.raises(DescriptorError, match="scale factors of A start at lane 32"):
        plan(GOOD, (32 << 16 | SCALES_A, SCALES_B))
    with pytest.raises(TmemError, match="scale factors of B"):
        plan(descriptor(64, (0, 0), (0, 0), 1, 128), (SCALES_A, 511))


def test_the_opcode_says_which_vector() -> None:
    """One that a kind does not have is refused when the kernel is loaded."""
    body = (
        "tcgen05.mma.cta_group::1.kind::{}.block_scale{} [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;"
    )
    for kind, vector in (("mxf8f6f4", ".scale_vec::4X"), ("mxf4nvf4", ""), ("f16", ".block32")):
        with pytest.raises(Exception, match="unsupported instruction"):
            run_ptx(body.format(kind, vector), [np.zeros(4, np.uint32)] * 2)
