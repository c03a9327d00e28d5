"""mma.sp against the product in float64 of A with the zeros that it leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator import EmulationFailed
from fa4.emulator.errors import UnsupportedInstruction
from tests.emulator.kernels import run_ptx
from tests.emulator.warp_mma_kernels import draw, fragments, multiply

Form = tuple[int, str, str, str]
FORMS: list[Form] = [
    *((k, s, t, t) for k in (16, 32) for s, t in (("f32", "f16"), ("f16", "f16"), ("f32", "bf16"))),
    (8, "f32", "tf32", "tf32"), (16, "f32", "tf32", "tf32"),
    *((k, "s32", a, b) for k in (32, 64) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((64, "f32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
]  # fmt: skip
BITS = {"tf32": 32, "f16": 16, "bf16": 16}
PAIRS = [(i, j) for i in range(4) for j in range(4) if i != j]
HALF: Form = (32, "f32", "f16", "f16")


def opcode_of(form: Form, variant: str = "sp::ordered_metadata") -> str:
    """mma.sp of a form: depth, sums, types of A and B."""
    depth, sums, a, b = form
    return f"mma.{variant}.sync.aligned.m16n8k{depth}.row.col.{sums}.{a}.{b}.{sums}"


def lanes_of(form: Form) -> int:
    """Lanes of four that hold metadata: 16 rows of 4 bits for each four, in words of 32 bits."""
    fours = form[0] // (2 if form[2] == "tf32" else 4)
    return 16 * fours * 4 // 32 // 8


def draw_pairs(random: np.random.Generator, form: Form, ordered: bool = True) -> np.ndarray:
    """(16, fours, 2): which two of four there are."""
    depth, _, a, _ = form
    if a == "tf32":
        first = 2 * random.integers(0, 2, (16, depth // 2))
        return np.stack([first, first + 1], axis=2)
    pairs = np.array(PAIRS)[random.integers(0, len(PAIRS), (16, depth // 4))]
    return np.sort(pairs, axis=2) if ordered else pairs


def metadata_of(form: Form, pairs: np.ndarray, selector: int, other: int = 0) -> np.ndarray:
    """The metadata register of each lane. other: what those hold that are not selected."""
    words, count = np.full(32, other, np.uint32), lanes_of(form)
    codes = pairs[:, :, 0] | pairs[:, :, 1] << 2
    for group in range(8):
        for k in range(count):
            if form[2] in BITS:  # four codes of the upper row, four of the lower one
                row, at = codes[group, 4 * k : 4 * k + 4], codes[group + 8, 4 * k : 4 * k + 4]
                listed = [*row, *at]
            else:  # eight codes of one row
                listed = list(codes[group + 8 * (k % 2), 8 * (k // 2) : 8 * (k // 2) + 8])
            word = sum(int(code) << 4 * i for i, code in enumerate(listed))
            words[4 * group + selector * count + k] = word
    return words


def spread_out(form: Form, a: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """A (16, K) with the zeros, from the elements that are there."""
    depth = form[0]
    whole = np.zeros((16, depth), a.dtype)
    for row in range(16):
        for four in range(pairs.shape[1]):
            if form[2] == "tf32":
                whole[row, 2 * four + pairs[row, four, 0] // 2] = a[row, four]
            else:
                for i in (0, 1):
                    whole[row, 4 * four + pairs[row, four, i]] = a[row, 2 * four + i]
    return whole


def in_places(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """D as the lanes hold it."""
    return np.array(fragments(a, b, d)[2]).reshape(32, 4)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), ordered=st.booleans(), choice=st.integers(0, 3))
@pytest.mark.parametrize("form", FORMS, ids=opcode_of)
def test_products(form: Form, seed: int, ordered: bool, choice: int) -> None:
    """Every type and shape, with every selector; lanes that are not selected may hold anything."""
    depth, sums, left, right = form
    random = np.random.default_rng(seed)
    a, b = draw(random, left, (16, depth // 2)), draw(random, right, (depth, 8))
    c, pairs = draw(random, sums, (16, 8)), draw_pairs(random, form, ordered)
    selector = choice % (4 // lanes_of(form))
    metadata = metadata_of(form, pairs, selector, other=0xFFFFFFFF)
    opcode = opcode_of(form, "sp::ordered_metadata" if ordered else "sp")
    exact = spread_out(form, a, pairs).astype(np.float64) @ b.astype(np.float64) + c
    found = multiply(opcode, a, b, c, metadata, selector)
    np.testing.assert_array_equal(found, in_places(a, b, exact.astype(c.dtype)))


@pytest.mark.parametrize("form", [HALF, (16, "f32", "tf32", "tf32"), (64, "f32", "e5m2", "e5m2")])
def test_what_is_left_out_takes_no_part(form: Form) -> None:
    """Not even as zero times infinity."""
    random = np.random.default_rng(3)
    a, b = draw(random, form[2], (16, form[0] // 2)), draw(random, form[3], (form[0], 8))
    a = np.where(a == 0, np.asarray(1, a.dtype), a)
    c, pairs = np.zeros((16, 8), np.float32), draw_pairs(random, form)
    b[5, 2], b[9, 7] = np.inf, np.nan
    whole = spread_out(form, a, pairs)
    left = whole[:, :, None].astype(np.float64)
    terms = np.multiply(left, b.astype(np.float64), where=left != 0, out=np.zeros((16, *b.shape)))
    found = multiply(opcode_of(form), a, b, c, metadata_of(form, pairs, 0))
    expected = in_places(a, b, terms.sum(axis=1).astype(np.float32))
    assert np.isfinite(expected).any()
    assert not np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("form", "variant", "code", "words"),
    [
        (HALF, "sp", 0b0101, "two places that differ"),
        (HALF, "sp::ordered_metadata", 0b0001, "the lower one first"),
        ((64, "s32", "s8", "u8"), "sp::ordered_metadata", 0b1011, "the lower one first"),
        ((16, "f32", "tf32", "tf32"), "sp", 0b1000, "0b0100 or 0b1110"),
    ],
)
def test_undefined_metadata_is_a_finding(form: Form, variant: str, code: int, words: str) -> None:
    """One code among good ones, in the selected lane only, with its row and columns."""
    random = np.random.default_rng(5)
    a, b = draw(random, form[2], (16, form[0] // 2)), draw(random, form[3], (form[0], 8))
    c, pairs = draw(random, form[1], (16, 8)), draw_pairs(random, form)
    pairs[9, 2] = code & 3, code >> 2
    with pytest.raises(EmulationFailed, match=words) as failure:
        multiply(opcode_of(form, variant), a, b, c, metadata_of(form, pairs, 0))
    columns = 2 * (2 if form[2] == "tf32" else 4)
    assert f"0b{code:04b} for row 9, columns from {columns} on" in str(failure.value)
    if 4 // lanes_of(form) > 1:
        good = draw_pairs(random, form)
        mixed = np.where(
            np.arange(32) // lanes_of(form) % 2,
            metadata_of(form, good, 1), metadata_of(form, pairs, 0),
        )  # fmt: skip
        multiply(opcode_of(form, variant), a, b, c, mixed, 1)


@pytest.mark.parametrize(
    ("form", "selector", "words"),
    [
        (HALF, 2, "below 2"),
        (HALF, "%r9", "below 2"),
        ((64, "s32", "s8", "s8"), 1, "below 1"),
        ((16, "f32", "f16", "f16"), 4, "below 4"),
        ((32, "f32", "e4m3", "e4m3"), 0, "8-bit floats are .m16n8k64"),
        ((64, "f16", "e4m3", "e4m3"), 0, "with sums .f32, not .m16n8k64"),
        ((32, "f32", "tf32", "tf32"), 0, "the form .m16n8k32"),
        ((128, "s32", "s4", "s4"), 0, "the form .m16n8k128"),
    ],
)
def test_what_does_not_exist_is_refused(form: Form, selector: Any, words: str) -> None:
    """Before it runs, with its line."""
    size = {32: 4, 16: 2}.get(BITS.get(form[2], 8), 1)
    a = form[0] // 2 * size // 8
    sums = 2 if form[1] == "f16" else 4
    d, left, right, c = ("{" + ", ".join(["%r1"] * n) + "}" for n in (sums, a, a, sums))
    with pytest.raises(UnsupportedInstruction, match=rf"line.*\(.*{words}"):
        run_ptx(f"{opcode_of(form)} {d}, {left}, {right}, {c}, %r8, {selector};")


def test_half_of_the_work_is_counted() -> None:
    """What is left out is not multiplied."""
    text = f"{opcode_of(HALF)} {{%r1,%r2,%r3,%r4}}, {{%r1,%r2,%r3,%r4}}, {{%r1,%r2,%r3,%r4}}, "
    report = run_ptx("mov.b32 %r8, 0x44444444; " + text + "{%r1,%r2,%r3,%r4}, %r8, 0;")
    (work,) = report.work
    assert sum(work.macs.values()) == 16 * 8 * 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcgen05.mma.ws.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r4, %p1;", "sparse"),
        (
            opcode_of(HALF) + " {%r1,%r2,%r3,%r4}, {%r1}, {%r1}, {%r1};",
            "4 operands, not d, a, b, c, m",
        ),
    ],
)
def test_other_sparse_products_are_refused(text: str, words: str) -> None:
    """In words, not by the modifier that is not known."""
    with pytest.raises(UnsupportedInstruction, match=rf"line.*\(.*{words}"):
        run_ptx(text)
