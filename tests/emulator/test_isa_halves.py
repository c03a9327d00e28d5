"""f16, bf16 and their pairs against exact arithmetic and ml_dtypes (PTX ISA 9.7.4)."""

from __future__ import annotations

import itertools
import operator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator import exact
from tests.emulator.exact import BF16, COUNT, F16, expected, extreme, rows_of
from tests.emulator.opcode_runner import build, check, evaluate

KINDS = {"f16": F16, "bf16": BF16}
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
OPERATIONS = ("add", "sub", "mul", "fma")
ALL_BITS = np.arange(1 << 16, dtype=np.uint32)


def flags_of(operation, name):
    """The legal sets of .ftz, .sat and .relu."""
    ftz = sat = (False, True) if name == "f16" else (False,)
    relu = (False, True) if operation == "fma" else (False,)
    return [flags for flags in itertools.product(ftz, sat, relu) if not (flags[1] and flags[2])]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=8)
@given(data=st.data())
def test_arithmetic(name, operation, data):
    kinds = (KINDS[name],) * COUNT[operation]
    rows = data.draw(rows_of(kinds, KINDS[name]))
    for ftz, sat, relu in flags_of(operation, name):
        opcode = f"{operation}.rn{'.ftz' * ftz}{'.sat' * sat}{'.relu' * relu}.{name}"
        want = expected(operation, rows, kinds, KINDS[name], "rn", ftz, sat=sat, relu=relu)
        check(opcode, (name,) * (len(kinds) + 1), rows, want)


def pairs(low, high):
    """Rows of 16-bit sources as rows of packed ones."""
    return [
        tuple(a | b << 16 for a, b in zip(*both, strict=True))
        for both in zip(low, high, strict=True)
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_a_packed_operation_is_two(name, operation, data):
    kinds = (KINDS[name],) * COUNT[operation]
    low, high = (data.draw(rows_of(kinds, KINDS[name])) for _ in range(2))
    for ftz, sat, relu in flags_of(operation, name):
        opcode = f"{operation}.rn{'.ftz' * ftz}{'.sat' * sat}{'.relu' * relu}.{name}x2"
        halves = [
            expected(operation, part, kinds, KINDS[name], "rn", ftz, sat=sat, relu=relu)
            for part in (low, high)
        ]
        want = [a | b << 16 for a, b in zip(*halves, strict=True)]
        check(opcode, (f"{name}x2",) * (len(kinds) + 1), pairs(low, high), want)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("function", ["add", "sub", "mul"])
def test_arithmetic_agrees_with_ml_dtypes(name, function):
    generator = np.random.default_rng(7)
    left, right = generator.integers(0, 1 << 16, (2, 1 << 15), dtype=np.uint16)
    a, b = left.view(DTYPES[name]), right.view(DTYPES[name])
    with np.errstate(all="ignore"):
        want = getattr(operator, function)(a, b)
    got = evaluate(f"{function}.rn.{name}", (name,) * 3, left, right)
    nan = np.isnan(want)
    np.testing.assert_array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert set(got[nan].tolist()) == {0x7FFF}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("function", ["min", "max"])
@settings(max_examples=6)
@given(data=st.data())
def test_min_and_max(name, function, data):
    kind = KINDS[name]
    row = st.tuples(exact.bits_of(kind), exact.bits_of(kind))
    low, high = (data.draw(st.lists(row, min_size=LANES, max_size=LANES)) for _ in range(2))
    flushing = ("", ".ftz") if name == "f16" else ("",)
    for ftz, nan, mark in itertools.product(flushing, ("", ".NaN"), ("", ".xorsign.abs")):
        halves = [
            [extreme(function, row, kind, nan, ftz, mark) for row in part] for part in (low, high)
        ]
        opcode = f"{function}{ftz}{nan}{mark}.{name}"
        check(opcode, (name,) * 3, low, halves[0])
        want = [a | b << 16 for a, b in zip(*halves, strict=True)]
        check(f"{opcode}x2", (f"{name}x2",) * 3, pairs(low, high), want)


@pytest.mark.parametrize("name", KINDS)
def test_neg_and_abs_of_every_number(name):
    kind = KINDS[name]
    magnitude = ALL_BITS & 0x7FFF
    nan = magnitude > kind.largest + 1
    negated = np.where(nan, 0x7FFF, ALL_BITS ^ 0x8000)
    np.testing.assert_array_equal(evaluate(f"neg.{name}", (name,) * 2, ALL_BITS), negated)
    positive = np.where(nan, 0x7FFF, magnitude)
    np.testing.assert_array_equal(evaluate(f"abs.{name}", (name,) * 2, ALL_BITS), positive)
    packed = evaluate(f"neg.{name}x2", (f"{name}x2",) * 2, ALL_BITS << 16)
    np.testing.assert_array_equal(packed, negated << 16 | 0x8000)
    if name == "f16":
        tiny = magnitude < 0x400
        flushed = np.where(tiny, 0, positive)
        np.testing.assert_array_equal(evaluate("abs.ftz.f16", ("f16",) * 2, ALL_BITS), flushed)


# Measured on an H200: opcode, type, sources, result.
MEASURED = [
    ("mul.ftz.f16", "f16", (0x0400, 0x3BFF), 0x0000),
    ("mul.ftz.f16x2", "f16x2", (0xD7C00400, 0xA4003BFF), 0x3FC00000),
    ("fma.rn.ftz.f16", "f16", (0x0400, 0x87F2, 0x0400), 0x0400),
    ("fma.rn.ftz.f16x2", "f16x2", (0x04AC0F0C, 0x040083FF, 0x84000707), 0x84000707),
    ("neg.bf16x2", "bf16x2", (0x7FC0FCAA,), 0x7FFF7CAA),
]


@pytest.mark.parametrize(("opcode", "kind", "row", "want"), MEASURED)
def test_results_measured_on_a_gpu(opcode, kind, row, want):
    check(opcode, (kind,) * (len(row) + 1), [row] * LANES, [want] * LANES)


@pytest.mark.parametrize(
    ("opcode", "kind", "sources", "reason"),
    [
        ("add.rz.f16", "f16", 2, ".rz"),
        ("add.ftz.bf16", "bf16", 2, ".ftz"),
        ("mul.sat.bf16x2", "bf16x2", 2, ".sat"),
        ("mul.relu.f16", "f16", 2, ".relu"),
        ("fma.rn.oob.f16", "f16", 3, ".oob"),
        ("fma.rn.sat.relu.f16", "f16", 3, ".sat and .relu"),
        ("max.ftz.bf16", "bf16", 2, ".ftz"),
        ("max.abs.f16", "f16", 2, ".xorsign"),
        ("max.f16", "f16", 3, "3 sources"),
    ],
)
def test_what_the_manual_does_not_allow_is_named(opcode, kind, sources, reason):
    with pytest.raises(Unsupported, match=reason):
        build(opcode, (kind,) * (sources + 1))
