"""f32, f64, f32x2 and mixed precision against exact arithmetic (PTX ISA 9.7.3 and 9.7.5)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.isa import floats
from fa4.emulator.translate.lanes import _subroutines
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator import exact
from tests.emulator.exact import (
    BF16,
    COUNT,
    F16,
    F32,
    F64,
    decode,
    encode,
    expected,
    extreme,
    rows_of,
)
from tests.emulator.opcode_runner import build, check, evaluate

MODES = ("rn", "rz", "rm", "rp")
SCALAR = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}


@pytest.mark.parametrize("operation", COUNT)
@settings(max_examples=6)
@given(data=st.data())
def test_f32_in_every_mode(operation, data):
    kinds = (F32,) * COUNT[operation]
    rows = data.draw(rows_of(kinds, F32))
    saturating = operation in ("add", "sub", "mul", "fma")
    for mode, ftz, sat in itertools.product(MODES, (False, True), (False, True)[: 1 + saturating]):
        opcode = f"{operation}.{mode}{'.ftz' * ftz}{'.sat' * sat}.f32"
        want = expected(operation, rows, kinds, F32, mode, ftz, sat=sat)
        check(opcode, ("f32",) * (len(kinds) + 1), rows, want)


@pytest.mark.parametrize("operation", COUNT)
@settings(max_examples=6)
@given(data=st.data())
def test_f64(operation, data):
    kinds = (F64,) * COUNT[operation]
    rows = data.draw(rows_of(kinds, F64))
    check(
        f"{operation}.rn.f64",
        ("f64",) * (len(kinds) + 1),
        rows,
        expected(operation, rows, kinds, F64),
    )


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@settings(max_examples=4)
@given(data=st.data())
def test_f32x2_is_two_f32(operation, data):
    kinds = (F32,) * COUNT[operation]
    low, high = data.draw(rows_of(kinds, F32)), data.draw(rows_of(kinds, F32))
    rows = [
        tuple(a | b << 32 for a, b in zip(*pair, strict=True))
        for pair in zip(low, high, strict=True)
    ]
    for mode, ftz in itertools.product(MODES, (False, True)):
        halves = [expected(operation, part, kinds, F32, mode, ftz) for part in (low, high)]
        want = [a | b << 32 for a, b in zip(*halves, strict=True)]
        opcode = f"{operation}.{mode}{'.ftz' * ftz}.f32x2"
        check(opcode, ("f32x2",) * (len(kinds) + 1), rows, want)


@pytest.mark.parametrize("operation", ["add", "sub", "fma"])
@pytest.mark.parametrize("half", ["f16", "bf16"])
@settings(max_examples=4)
@given(data=st.data())
def test_mixed_precision_converts_the_first_operands(operation, half, data):
    kinds = (SCALAR[half],) * (COUNT[operation] - 1) + (F32,)
    rows = data.draw(rows_of(kinds, F32))
    types = ("f32", *[half] * (len(kinds) - 1), "f32")
    for mode, sat in itertools.product(MODES, (False, True)):
        want = expected(operation, rows, kinds, F32, mode, sat=sat)
        check(f"{operation}.{mode}{'.sat' * sat}.f32.{half}", types, rows, want)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("sources", [2, 3])
@settings(max_examples=8)
@given(data=st.data())
def test_min_and_max_of_f32(name, sources, data):
    row = st.lists(exact.bits_of(F32), min_size=sources, max_size=sources).map(tuple)
    rows = data.draw(st.lists(row, min_size=LANES, max_size=LANES))
    marked = (".abs",) if sources == 3 else (".xorsign.abs",)
    for ftz, nan, mark in itertools.product(("", ".ftz"), ("", ".NaN"), ("", *marked)):
        want = [extreme(name, row, F32, nan, ftz, mark) for row in rows]
        check(f"{name}{ftz}{nan}{mark}.f32", ("f32",) * (sources + 1), rows, want)


@settings(max_examples=8)
@given(rows=rows_of((F64, F64), F64))
def test_min_and_max_of_f64(rows):
    for name in ("min", "max"):
        want = [extreme(name, row, F64) for row in rows]
        check(f"{name}.f64", ("f64",) * 3, rows, want)


PROPERTIES = {
    "finite": lambda m, k: m <= k.largest,
    "infinite": lambda m, k: m == k.largest + 1,
    "number": lambda m, k: m <= k.largest + 1,
    "notanumber": lambda m, k: m > k.largest + 1,
    "normal": lambda m, k: m == 0 or 1 << k.mantissa <= m <= k.largest,
    "subnormal": lambda m, k: 0 < m < 1 << k.mantissa,
}


@pytest.mark.parametrize("name", ["f32", "f64"])
@settings(max_examples=8)
@given(data=st.data())
def test_signs_and_properties(name, data):
    kind = SCALAR[name]
    pairs = st.lists(st.tuples(exact.bits_of(kind), exact.bits_of(kind)), min_size=32, max_size=32)
    rows = data.draw(pairs)
    magnitudes = [row[0] & (kind.sign - 1) for row in rows]
    nan = [magnitude > kind.largest + 1 for magnitude in magnitudes]
    ones = [row[:1] for row in rows]
    nans = [exact.quiet(row[0], F64, F64) if kind is F64 else kind.nan for row in rows]
    negated = [q if n else row[0] ^ kind.sign for row, n, q in zip(rows, nan, nans, strict=True)]
    check(f"neg.{name}", (name, name), ones, negated)
    positive = [q if n else m for m, n, q in zip(magnitudes, nan, nans, strict=True)]
    check(f"abs.{name}", (name, name), ones, positive)
    signed = [a & kind.sign | b & (kind.sign - 1) for a, b in rows]
    check(f"copysign.{name}", (name,) * 3, rows, signed)
    for prop, holds in PROPERTIES.items():
        want = [int(holds(magnitude, kind)) for magnitude in magnitudes]
        check(f"testp.{prop}.{name}", ("pred", name), ones, want)


# Measured on an H200: opcode, sources, result.
MEASURED = [
    ("mul.ftz.f32", (0x00800000, 0x3F7FFFFF), 0x00000000),
    ("mul.f32", (0x00800000, 0x3F7FFFFF), 0x00800000),
    ("fma.rn.ftz.f32", (0x80800000, 0x80FDE0DE, 0x80800000), 0x80800000),
    ("fma.rp.ftz.f32", (0x00F1ECF8, 0x8137B3EC, 0x00800000), 0x00800000),
    ("fma.rn.ftz.f32", (0x7A17281D, 0x3FC00000, 0xAA38DE08), 0x7A62BC2B),
    ("sqrt.rz.f32", (0x7F7FFFFF,), 0x5F7FFFFF),
    ("rcp.rp.f32", (0x7E800001,), 0x00800000),
    ("div.rm.f32", (0x80000001, 0x7E800001), 0x80000001),
    ("neg.f32", (0x7FC00000,), 0x7FFFFFFF),
    ("max.f32", (0x7F800001, 0xC0000000), 0xC0000000),
    ("add.sat.f32", (0x7FC00000, 0x3F800000), 0x00000000),
]


@pytest.mark.parametrize(("opcode", "row", "want"), MEASURED)
def test_results_measured_on_a_gpu(opcode, row, want):
    check(opcode, ("f32",) * (len(row) + 1), [row] * LANES, [want] * LANES)


def test_fma_keeps_the_product_that_mul_rounds():
    a = b = 0x3F800001
    product = int(evaluate("mul.f32", ("f32",) * 3, *[np.full(LANES, a)] * 2)[0])
    factors = [np.full(LANES, v) for v in (a, b, product ^ 1 << 31)]
    fused = evaluate("fma.rn.f32", ("f32",) * 4, *factors)
    assert set(fused.tolist()) == {encode(decode(a, F32) ** 2 - decode(product, F32), F32)} != {0}


def test_without_rounding_to_odd_the_comparison_fails(monkeypatch):
    row, opcode = (0x7A17281D, 0x3FC00000, 0xAA38DE08), "fma.rn.ftz.f32"
    want = expected("fma", [row], (F32,) * 3, F32)[0]
    monkeypatch.setattr("fa4.emulator.isa.rounding.round_to_odd", lambda result: result.value)
    monkeypatch.setattr(floats, "round_to_odd", lambda result: result.value)
    saved = dict(_subroutines)
    _subroutines.clear()
    try:
        broken = build(opcode, ("f32",) * 4)
    finally:
        _subroutines.clear()
        _subroutines.update(saved)
    arrays = [np.full(LANES, bits) for bits in row]
    assert evaluate(opcode, ("f32",) * 4, *arrays)[0] == want
    assert evaluate(opcode, ("f32",) * 4, *arrays, function=broken)[0] != want


@pytest.mark.parametrize(
    ("opcode", "types", "reason"),
    [
        ("add.ru.f32", ("f32",) * 3, ".ru"),
        ("add.sat.f32x2", ("f32x2",) * 3, ".sat"),
        ("add.rz.f64", ("f64",) * 3, ".rz for f64"),
        ("fma.f32", ("f32",) * 4, "no rounding"),
        ("mul.f32.bf16", ("f32", "bf16", "f32"), ".bf16"),
        ("fma.rn.ftz.f32.bf16", ("f32", "bf16", "bf16", "f32"), ".ftz"),
        ("max.xorsign.f32", ("f32",) * 3, ".xorsign.abs"),
        ("max.NaN.f64", ("f64",) * 3, ".NaN"),
        ("sqrt.rn.sat.f32", ("f32",) * 2, ".sat"),
        ("neg.ftz.f64", ("f64",) * 2, ".ftz"),
    ],
)
def test_what_the_manual_does_not_allow_is_named(opcode, types, reason):
    with pytest.raises(Unsupported, match=reason):
        build(opcode, types)
