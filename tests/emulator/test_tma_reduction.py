"""cp.reduce.async.bulk: integers against Python, float sums against fractions.

What no definition settles (NaNs, subnormals) is compared with results recorded on an H200.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import isfinite, isinf

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulatorError
from fa4.emulator.tma.reduction import DTYPES, SUPPORTED, reduce_bytes

FORMATS = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126), "f64": (53, -1022)}


def rounded(value: Fraction, precision: int, lowest: int) -> Fraction | float:
    """The nearest float of the format, ties to even; the exponent of its largest is -lowest + 1."""
    if not value:
        return value
    exponent = max(lowest, abs(value).numerator.bit_length() - value.denominator.bit_length() - 1)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - precision + 1)
    nearest = round(value / step) * step  # round() of a Fraction goes to even
    too_large = Fraction(2) ** (2 - lowest)
    return nearest if abs(nearest) < too_large else float("inf" if value > 0 else "-inf")


def bits(values: list[int], element: str) -> np.ndarray:
    """As (n, 16) bytes, the last row padded with zeros."""
    raw = np.array(values, f"u{np.dtype(DTYPES[element]).itemsize}").view(np.uint8)
    return np.resize(
        np.concatenate([raw, np.zeros(-raw.size % 16, np.uint8)]), (-(-raw.size // 16), 16)
    )


def reduced(op: str, element: str, old: list[int], new: list[int]) -> list[int]:
    result = reduce_bytes(op, element, bits(old, element), bits(new, element))
    size = np.dtype(DTYPES[element]).itemsize
    return result.reshape(-1).view(f"u{size}")[: len(old)].tolist()


@pytest.mark.parametrize("element", FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_float_add_rounds_the_exact_sum(element: str, data) -> None:
    width = 8 * np.dtype(DTYPES[element]).itemsize
    pattern = st.integers(0, (1 << width) - 1)
    old, near, shift = data.draw(st.tuples(pattern, pattern, st.integers(0, width)))
    new = old ^ (near >> shift) ^ data.draw(st.sampled_from([0, 1 << (width - 1)]))
    operands = np.array([old, new], f"u{width // 8}").view(DTYPES[element])
    numbers = [float(x) for x in operands]
    assume(all(map(isfinite, numbers)))
    exact = sum(map(Fraction, numbers), Fraction(0))
    got = np.array(reduced("add", element, [old], [new]), f"u{width // 8}").view(DTYPES[element])[0]
    expected = rounded(exact, *FORMATS[element])
    assert (float(got) if isinf(got) else Fraction(float(got))) == expected


INTEGERS = {"u32": (32, False), "s32": (32, True), "u64": (64, False), "s64": (64, True)}
INTEGERS |= {"b32": (32, False), "b64": (64, False)}
MEANING = {
    "add": lambda d, s: d + s,
    "min": min,
    "max": max,
    "inc": lambda d, s: 0 if d >= s else d + 1,
    "dec": lambda d, s: s if d == 0 or d > s else d - 1,
    "and": lambda d, s: d & s,
    "or": lambda d, s: d | s,
    "xor": lambda d, s: d ^ s,
}


@pytest.mark.parametrize(
    ("op", "element"), [(o, e) for o in MEANING for e in INTEGERS if e in SUPPORTED[o]]
)
def test_integer_reductions(op: str, element: str) -> None:
    width, signed = INTEGERS[element]
    values = [0, 1, 2, (1 << (width - 1)) - 1, 1 << (width - 1), (1 << width) - 1, 77, 78]
    pairs = list(itertools.product(values, values))

    def meant(x: int) -> int:
        return x - (1 << width) if signed and x >> (width - 1) else x

    expected = [MEANING[op](meant(d), meant(s)) % (1 << width) for d, s in pairs]
    assert reduced(op, element, *map(list, zip(*pairs, strict=True))) == expected


# (op, element, destination, source, result), recorded on an H200
RECORDED = [
    ("add", "f16", 0x0000, 0x7C01, 0x7FFF),
    ("add", "f16", 0x0001, 0x0001, 0x0002),
    ("add", "f16", 0x7C00, 0xFC00, 0x7FFF),
    ("add", "bf16", 0x8000, 0xFFFF, 0x7FFF),
    ("add", "bf16", 0x0001, 0x8001, 0x0000),
    ("add", "f32", 0x00000000, 0x007FFFFF, 0x007FFFFF),
    ("add", "f32", 0x00000000, 0xFFC00123, 0x7FFFFFFF),
    ("add", "f32_ftz", 0x00000000, 0x007FFFFF, 0x00000000),
    ("add", "f32_ftz", 0x80000000, 0x80000001, 0x80000000),
    ("add", "f32_ftz", 0x00800000, 0x00000000, 0x00800000),
    ("add", "f64", 0x7FF8000000000000, 0xFFF8000000000123, 0xFFF8000000000123),
    ("add", "f64", 0x7FF0000000000001, 0x3FF0000000000000, 0x7FF0000000000001),
    ("add", "f64", 0x7FF0000000000000, 0xFFF0000000000000, 0xFFF8000000000000),
    ("min", "f16", 0x7E00, 0x7C01, 0x7FFF),
    ("min", "f16", 0x7E00, 0x3C00, 0x3C00),
    ("max", "f16", 0xFC00, 0x7E00, 0xFC00),
    ("min", "bf16", 0x0000, 0x8000, 0x8000),
    ("max", "bf16", 0x8000, 0x0000, 0x0000),
    ("max", "bf16", 0x7FC0, 0xFFFF, 0x7FFF),
]


@pytest.mark.parametrize(("op", "element", "old", "new", "result"), RECORDED)
def test_recorded_reductions(op: str, element: str, old: int, new: int, result: int) -> None:
    assert [hex(x) for x in reduced(op, element, [old], [new])] == [hex(result)]


@pytest.mark.parametrize("element", ["f16", "bf16"])
@settings(max_examples=60)
@given(st.lists(st.integers(0, 0xFFFF), min_size=8, max_size=8), st.randoms())
def test_float_min_max_order_numbers(element: str, old: list[int], random) -> None:
    new = random.sample(old, 8)
    values = {x: float(np.array(x, np.uint16).view(DTYPES[element])) for x in old}
    for op, choose in (("min", min), ("max", max)):
        for d, s, got in zip(old, new, reduced(op, element, old, new), strict=True):
            numbers = [x for x in (d, s) if values[x] == values[x]]
            wanted = choose(numbers, key=lambda x: (values[x], -(x >> 15))) if numbers else 0x7FFF
            assert got == wanted


def test_reductions_leave_their_operands_and_take_views() -> None:
    old = np.arange(128, dtype=np.uint8).reshape(4, 32)[:, ::2]
    before = old.copy()
    result = reduce_bytes("add", "u32", old, np.zeros((4, 16), np.uint8))
    assert np.array_equal(result, before)
    assert not np.shares_memory(result, old)
    result[:] = 0
    assert np.array_equal(old, before)


@pytest.mark.parametrize(
    ("op", "element"),
    [
        ("add", "s64"),
        ("min", "f32"),
        ("inc", "s32"),
        ("xor", "f32"),
        ("mul", "u32"),
        ("add", "tf32"),
    ],
)
def test_reductions_that_do_not_exist(op: str, element: str) -> None:
    with pytest.raises(EmulatorError, match=rf"no \.{op} for \.{element}"):
        reduce_bytes(op, element, np.zeros((1, 16), np.uint8), np.zeros((1, 16), np.uint8))
