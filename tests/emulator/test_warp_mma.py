"""mma.sync against a matrix product in float64 of whole matrices, placed by the manual's formulas.

The numbers are such that no sum is rounded; how sums are is test_wgmma_sums.py's matter.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.kernels import run_ptx

TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}
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


def fragments(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, of_32_bits: bool = False
) -> tuple[list[Any], ...]:
    """What every lane holds, element by element: the formulas that PTX ISA 9.7.14.5 has for each
    shape, by how many elements a register holds."""
    depth, size = a.shape[1], 4 if of_32_bits else a.dtype.itemsize
    of_a: list[Any] = []
    of_b: list[Any] = []
    of_c: list[Any] = []
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(depth // 2):
            if size == 4:  # m16n8k4, m16n8k8: a0..a3
                row, k = group + 8 * (i % 2), thread + 4 * (i >= 2)
            elif size == 2:  # m16n8k8, m16n8k16: a0..a7
                row = group + 8 * (i in (2, 3, 6, 7))
                k = thread * 2 + (i & 1) + 8 * (i >= 4)
            else:  # m16n8k16, m16n8k32: a0..a15
                row = group if i < 4 or 8 <= i < 12 else group + 8
                k = thread * 4 + (i & 3) + (16 if i >= 8 else 0)
            of_a.append(a[row, k])
        for i in range(depth // 4):
            if size == 4:
                k = thread + 4 * i
            elif size == 2:
                k = thread * 2 + (i & 1) + 8 * (i >= 2)
            else:
                k = thread * 4 + (i & 3) + (16 if i >= 4 else 0)
            of_b.append(b[k, group])
        of_c += [c[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)] for i in range(4)]
    return of_a, of_b, of_c


def multiply(opcode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The (32, 4) results of each lane that an mma.sync gives in the emulator."""
    words = [
        np.array(v, x.dtype).view(np.uint32).reshape(32, -1)
        for v, x in zip(fragments(a, b, c), (a, b, c), strict=True)
    ]
    packed = np.concatenate(words, axis=1)
    count = packed.shape[1]
    starts = np.cumsum([0] + [w.shape[1] for w in words])
    names = [[f"%r{10 + k}" for k in range(s, e)] for s, e in pairwise(starts)]
    loads = "".join(f"ld.global.b32 %r{10 + k}, [%rd3+{4 * k}];" for k in range(count))
    results = [f"%r{60 + k}" for k in range(len(names[2]))]
    stores = "".join(f"st.global.b32 [%rd5+{4 * k}], {r};" for k, r in enumerate(results))
    vectors = ", ".join("{" + ", ".join(group) + "}" for group in (results, *names))
    out = np.zeros((32, len(results)), np.uint32)
    run_ptx(
        f"""
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, {4 * count};
  add.s64 %rd3, %rd1, %rd4;
  mul.wide.u32 %rd4, %r1, {4 * len(results)};
  add.s64 %rd5, %rd2, %rd4;
  {loads}
  {opcode} {vectors};
  {stores}
""",
        [packed, out],
    )
    return out.view(c.dtype).reshape(32, 4)


def opcode_of(form: tuple[int, str, str, str], saturates: str = "") -> str:
    """mma.sync of a form: depth, sums, types of A and B."""
    depth, sums, a, b = form
    return f"mma.sync.aligned.m16n8k{depth}.row.col{saturates}.{sums}.{a}.{b}.{sums}"


def draw(random: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Quarters up to 2 (eighths would not fit 13 bits of sums), integers of the whole range."""
    kind = TYPES[name]
    if name in ("s8", "u8"):
        return random.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, shape).astype(kind)
    if name == "s32":
        return random.integers(-(2**30), 2**30, shape).astype(kind)
    return (random.integers(-8, 9, shape) / 4).astype(kind)


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
