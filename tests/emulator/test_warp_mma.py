"""mma.sync against a matrix product in float64 of whole matrices, placed by the manual's formulas.

The numbers are such that no sum is rounded; how sums are is test_wgmma_sums.py's matter.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.kernels import run_ptx
from tests.emulator.warp_mma_kernels import draw, fragments, multiply

HALVES = [(k, s, ab, ab) for k in (8, 16) for s, ab in (("f32", "f16"), ("f16", "f16"))]
EIGHT_BIT = [
    (k, s, a, b)
    for k in (16, 32)
    for sums, pair in ((("f32", "f16"), ("e4m3", "e5m2")), (("s32",), ("s8", "u8")))
    for s in sums
    for a in pair
    for b in pair
]
FORMS = [
    *HALVES, (8, "f32", "bf16", "bf16"), (16, "f32", "bf16", "bf16"),
    (4, "f32", "tf32", "tf32"), (8, "f32", "tf32", "tf32"), *EIGHT_BIT,
]  # fmt: skip


def opcode_of(form: tuple[int, str, str, str], saturates: str = "") -> str:
    """mma.sync of a form: depth, sums, types of A and B."""
    depth, sums, a, b = form
    return f"mma.sync.aligned.m16n8k{depth}.row.col{saturates}.{sums}.{a}.{b}.{sums}"


@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("form", FORMS, ids=opcode_of)
def test_products(form: tuple[int, str, str, str], seed: int) -> None:
    """Every type and shape: sums that need no rounding are those of float64, in their places."""
    depth, sums, left, right = form
    random = np.random.default_rng(seed)
    a, b = draw(random, left, (16, depth)), draw(random, right, (depth, 8))
    c = draw(random, sums, (16, 8))
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    expected = np.array(fragments(a, b, exact.astype(c.dtype))[2]).reshape(32, 4)
    np.testing.assert_array_equal(multiply(opcode_of(form), a, b, c), expected)


def test_integers_wrap_or_saturate() -> None:
    """Beyond 32 bits."""
    a, b = np.full((16, 32), 127, np.int8), np.full((32, 8), 127, np.int8)
    c = np.full((16, 8), 2**31 - 1, np.int32)
    form = (32, "s32", "s8", "s8")
    assert (multiply(opcode_of(form, ".satfinite"), a, b, c) == 2**31 - 1).all()
    assert (multiply(opcode_of(form), a, b, c) == 32 * 127**2 - 2**31 - 1).all()


def test_tf32_drops_what_it_does_not_hold() -> None:
    """The lower 13 bits of an operand; random operands come as near as 25 bits of sums allow."""
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(n).astype(np.float32) for n in ((16, 8), (8, 8)))
    c = np.zeros((16, 8), np.float32)
    low = np.uint32(0x1FFF)
    found = multiply(opcode_of((8, "f32", "tf32", "tf32")), a, b, c)
    held = [(x.view(np.uint32) & ~low).view(np.float32).astype(np.float64) for x in (a, b)]
    exact = np.array(fragments(a, b, held[0] @ held[1])[2]).reshape(32, 4)
    largest = 2 * np.abs(held[0]).max() * np.abs(held[1]).max()
    assert np.abs(found - exact).max() < 9 * 2.0**-24 * largest
    noise = [(x.view(np.uint32) ^ low).view(np.float32) for x in (a, b)]
    assert (multiply(opcode_of((8, "f32", "tf32", "tf32")), *noise, c) == found).all()


@pytest.mark.parametrize(
    "form",
    [
        (16, "f32", "tf32", "tf32"),
        (8, "s32", "s8", "s8"),
        (32, "f32", "f16", "f16"),
        (16, "f16", "bf16", "bf16"),
        (16, "f32", "s8", "s8"),
        (32, "f32", "e4m3", "s8"),
        (16, "f32", "f16", "bf16"),
        (32, "f32", "e2m1", "e2m1"),
    ],
    ids=opcode_of,
)
def test_what_does_not_exist_is_refused(form: tuple[int, str, str, str]) -> None:
    """Before it runs, with its line."""
    from fa4.emulator.errors import UnsupportedInstruction

    with pytest.raises(UnsupportedInstruction, match="line"):
        run_ptx(
            f"{opcode_of(form)} {{%r1,%r2,%r3,%r4}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, "
            "{%r1,%r2,%r3,%r4};"
        )


def test_a_transposed_operand_is_another_instruction() -> None:
    from fa4.emulator.errors import UnsupportedInstruction

    with pytest.raises(UnsupportedInstruction, match="line"):
        run_ptx("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, "
                "{%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r1,%r2,%r3,%r4};")  # fmt: skip
