"""cvt and cvt.pack against integers, fractions and ml_dtypes (PTX ISA 9.7.9.21 and 9.7.9.22)."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator import exact
from tests.emulator.exact import BF16, F16, F32, F64, TF32, decode, encode, flushed
from tests.emulator.opcode_runner import build, check, evaluate

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
MODES = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
NARROW = {
    "e4m3": (exact.E4M3, ml_dtypes.float8_e4m3fn, 8),
    "e5m2": (exact.E5M2, ml_dtypes.float8_e5m2, 8),
    "e2m3": (exact.E2M3, ml_dtypes.float6_e2m3fn, 8),
    "e3m2": (exact.E3M2, ml_dtypes.float6_e3m2fn, 8),
    "e2m1": (exact.E2M1, ml_dtypes.float4_e2m1fn, 4),
}
ALL_BITS = np.arange(1 << 16, dtype=np.uint32)


def limits(kind):
    """(smallest, largest) of an integer type."""
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def read(bits, kind):
    """A bit pattern as the value of an integer type."""
    width = int(kind[1:])
    bits %= 1 << width
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def clamp(value, kind):
    low, high = limits(kind)
    return min(max(value, low), high)


def integer_bits():
    """64-bit patterns around the ends of every type and around what a double or float holds."""
    ends = sorted({1 << b for b in (0, 7, 8, 11, 15, 16, 24, 25, 31, 32, 53, 54, 63)})
    near = st.builds(lambda a, b: (a + b) % (1 << 64), st.sampled_from(ends), st.integers(-2, 2))
    wide = st.builds(lambda a, b: a >> b, st.integers(0, (1 << 64) - 1), st.integers(0, 63))
    negative = near.map(lambda a: -a % (1 << 64))
    return st.lists(st.one_of(near, negative, wide), min_size=LANES, max_size=LANES)


@settings(max_examples=4)
@given(values=integer_bits())
def test_integer_to_integer(values):
    for to, source in itertools.product(INTEGERS, INTEGERS):
        width = 1 << int(to[1:])
        rows = [(bits % (1 << int(source[1:])),) for bits in values]
        numbers = [read(bits, source) for (bits,) in rows]
        check(f"cvt.{to}.{source}", (to, source), rows, [n % width for n in numbers])
        (low, high), (least, most) = limits(to), limits(source)
        if least < low or most > high:
            want = [clamp(n, to) % width for n in numbers]
            check(f"cvt.sat.{to}.{source}", (to, source), rows, want)


@settings(max_examples=4)
@given(values=integer_bits())
def test_a_wider_register_is_sign_or_zero_extended(values):
    rows = [(bits % (1 << 32),) for bits in values]
    for to, mask in itertools.product(("u8", "s8", "u16", "s16"), ((1 << 32) - 1,)):
        want = [read(bits, to) & mask for (bits,) in rows]
        check(f"cvt.{to}.u32", ("b32", "b32"), rows, want)


@settings(max_examples=2)
@given(values=integer_bits())
def test_integer_to_float(values):
    for to, source, mode in itertools.product(FLOATS, INTEGERS, MODES):
        bits = int(source[1:])
        if (to == "bf16" and bits == 8) or (to == "f64" and bits == 64 and mode != "rn"):
            continue
        rows = [(value % (1 << bits),) for value in values]
        numbers = [Fraction(read(value, source)) or 0.0 for (value,) in rows]
        want = [encode(number, FLOATS[to], mode) for number in numbers]
        check(f"cvt.{mode}.{to}.{source}", (to, source), rows, want)
        if to != "bf16":
            want = [encode(number, FLOATS[to], mode, sat=True) for number in numbers]
            check(f"cvt.{mode}.sat.{to}.{source}", (to, source), rows, want)


def to_integer(number, function, to, source):
    """The manual's rule: clamped; NaN is 0, or the top bit if one of the types has 64 bits."""
    if isinstance(number, float) and math.isnan(number):
        return 1 << (int(to[1:]) - 1) if "64" in source or "64" in to else 0
    low, high = limits(to)
    if number in (math.inf, -math.inf):
        return high if number > 0 else low
    return clamp(function(Fraction(number)), to)


def integral_floats(kind):
    """Encoded numbers, many of them near the ends of integer types or half-way between integers."""
    ends = [Fraction(1 << b) for b in (0, 1, 7, 8, 15, 16, 24, 31, 32, 53, 63, 64)]
    halves = [Fraction(n, 4) for n in range(1, 14)]
    fixed = [encode(s * v, kind, m) for v in ends + halves for s in (1, -1) for m in ("rn", "rz")]
    below = [bits - 1 for bits in fixed]
    return st.one_of(st.sampled_from(fixed + below), exact.bits_of(kind))


@pytest.mark.parametrize("source", FLOATS)
@settings(max_examples=4)
@given(data=st.data())
def test_float_to_integer(source, data):
    kind = FLOATS[source]
    values = data.draw(st.lists(integral_floats(kind), min_size=LANES, max_size=LANES))
    rows = [(bits,) for bits in values]
    for to, (mode, function) in itertools.product(INTEGERS, INTEGRAL.items()):
        if source == "bf16" and to in ("u8", "s8"):
            continue
        for ftz in (False, True)[: 1 + (source == "f32")]:
            numbers = [decode(bits, kind) for bits in values]
            numbers = [flushed(n, kind) if ftz else n for n in numbers]
            want = [to_integer(n, function, to, source) % (1 << int(to[1:])) for n in numbers]
            check(f"cvt.{mode}{'.ftz' * ftz}.{to}.{source}", (to, source), rows, want)


# destination, source, rounding modes, other modifiers
CONVERSIONS = [
    ("f32", "f16", ("",), ("", ".ftz", ".sat", ".ftz.sat")),
    ("f64", "f32", ("",), ("", ".ftz", ".sat")),
    ("f64", "f16", ("",), ("", ".sat")),
    ("f64", "bf16", ("", ".rz"), ("",)),
    ("f32", "f64", MODES, ("", ".ftz", ".sat", ".ftz.sat")),
    ("f16", "f64", MODES, ("", ".sat")),
    ("bf16", "f64", MODES, ("",)),
    ("f16", "f32", MODES, ("", ".ftz", ".sat", ".ftz.sat")),
    ("f16", "f32", ("rn", "rz"), (".relu", ".satfinite", ".relu.satfinite")),
    ("bf16", "f32", MODES, ("", ".ftz")),
    ("bf16", "f32", ("rn", "rz"), (".relu", ".satfinite", ".relu.satfinite")),
    ("f16", "bf16", MODES, ("",)),
    ("bf16", "f16", MODES, ("",)),
    ("f32", "f32", ("",), (".ftz", ".sat", ".ftz.sat")),
]


@pytest.mark.parametrize(("to", "source", "modes", "suffixes"), CONVERSIONS)
@settings(max_examples=4)
@given(data=st.data())
def test_float_to_float(to, source, modes, suffixes, data):
    kind, target = FLOATS[source], FLOATS[to]
    halfway = st.builds(
        lambda bits, step: (encode(decode(bits, target), kind) + step) % (2 * kind.sign),
        exact.bits_of(target),
        st.sampled_from([0, 1, 0x1000, 0x0FFF, 0x8000, 0x8001, 0x10000000, 0x8000000000]),
    )
    values = data.draw(
        st.lists(st.one_of(exact.bits_of(kind), halfway), min_size=LANES, max_size=LANES)
    )
    for mode, suffix in itertools.product(modes, suffixes):
        ftz = "ftz" in suffix
        numbers = [decode(bits, kind) for bits in values]
        if ftz and source == "f32" and to != "f16":
            numbers = [flushed(number, kind) for number in numbers]
        flags = {"sat": ".sat" in suffix.replace(".satfinite", ""), "relu": "relu" in suffix}
        want = [
            encode(
                n,
                target,
                mode.strip(".") or "rn",
                ftz and to == "f32",
                **flags,
                finite="satfinite" in suffix,
            )
            for n in numbers
        ]
        if "f64" in (to, source) and not flags["sat"]:
            given = [kind.nan if ftz and source == "f32" else bits for bits in values]
            want = [
                exact.quiet(g, kind, target) if exact.is_nan(bits, kind) else w
                for bits, g, w in zip(values, given, want, strict=True)
            ]
        rounding = f".{mode}" if mode and not mode.startswith(".") else mode
        rows = [(bits,) for bits in values]
        check(f"cvt{rounding}{suffix}.{to}.{source}", (to, source), rows, want)


@pytest.mark.parametrize("name", FLOATS)
@settings(max_examples=4)
@given(data=st.data())
def test_rounding_to_an_integral_value(name, data):
    kind = FLOATS[name]
    values = data.draw(st.lists(integral_floats(kind), min_size=LANES, max_size=LANES))
    for mode, function in INTEGRAL.items():
        want = []
        for bits in values:
            number = decode(bits, kind)
            if isinstance(number, Fraction):
                number = Fraction(function(number)) or math.copysign(0.0, number)
            passes = kind is F64 and exact.is_nan(bits, kind)
            want.append(exact.quiet(bits, kind, kind) if passes else encode(number, kind))
        check(f"cvt.{mode}.{name}.{name}", (name, name), [(bits,) for bits in values], want)


def test_every_half_as_float():
    with np.errstate(invalid="ignore"):
        want = ALL_BITS.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    nan = (ALL_BITS & 0x7FFF) > 0x7C00
    got = evaluate("cvt.f32.f16", ("f32", "f16"), ALL_BITS)
    np.testing.assert_array_equal(got, np.where(nan, 0x7FFFFFFF, want))
    # A bfloat16 is the upper half of a float, and a NaN keeps its bits (those that are quiet).
    quiet = ALL_BITS | np.where((ALL_BITS & 0x7FFF) > 0x7F80, 0x40, 0)
    got = evaluate("cvt.f32.bf16", ("f32", "bf16"), ALL_BITS) | np.where(
        quiet != ALL_BITS, 1 << 22, 0
    )
    np.testing.assert_array_equal(got, quiet << 16)


def floats_near(dtype_bits, generator):
    """float32 patterns: every kind of 16-bit prefix with the tails that decide a rounding."""
    head = generator.integers(0, 1 << 16, 1 << 14, dtype=np.uint32) << 16
    tails = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    near_one = head & 0x87FFFFFF | 0x38000000
    return np.where(dtype_bits & 1, head, near_one) | generator.choice(tails, head.size)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_pairs_of_halves_agree_with_ml_dtypes(name):
    generator = np.random.default_rng(11)
    a, b = (floats_near(generator.integers(0, 2, 1 << 14), generator) for _ in range(2))
    got = evaluate(f"cvt.rn.{name}x2.f32", (f"{name}x2", "f32", "f32"), a, b)
    dtype = np.float16 if name == "f16" else ml_dtypes.bfloat16
    for part, source in ((got >> 16, a), (got & 0xFFFF, b)):
        with np.errstate(all="ignore"):
            want = source.view(np.float32).astype(dtype)
        bits = np.where(np.isnan(want), 0x7FFF, want.view(np.uint16))
        np.testing.assert_array_equal(part, bits)


@pytest.mark.parametrize("name", ["f16", "bf16"])
@settings(max_examples=4)
@given(data=st.data())
def test_pairs_of_halves_in_every_mode(name, data):
    kind = FLOATS[name]
    row = st.tuples(exact.bits_of(F32), exact.bits_of(F32))
    rows = data.draw(st.lists(row, min_size=LANES, max_size=LANES))
    for mode, relu, finite in itertools.product(("rn", "rz"), (False, True), (False, True)):
        upper, lower = (
            [encode(decode(row[k], F32), kind, mode, relu=relu, finite=finite) for row in rows]
            for k in (0, 1)
        )
        opcode = f"cvt.{mode}{'.relu' * relu}{'.satfinite' * finite}.{name}x2.f32"
        want = [a << 16 | b for a, b in zip(upper, lower, strict=True)]
        check(opcode, (f"{name}x2", "f32", "f32"), rows, want)


@pytest.mark.parametrize(("name", "bits"), [("f16", 13), ("bf16", 16)])
@settings(max_examples=4)
@given(data=st.data())
def test_stochastic_rounding_adds_random_bits_to_the_discarded_ones(name, bits, data):
    kind = FLOATS[name]
    bias = 127 - (1 - kind.emin)
    normal = st.builds(
        lambda sign, exponent, fraction: sign << 31 | exponent << 23 | fraction,
        st.integers(0, 1),
        st.integers(bias + 1, bias + 2 - 2 * kind.emin - 1),
        st.integers(0, (1 << 23) - 1),
    )
    rows = data.draw(
        st.lists(st.tuples(normal, normal, st.integers(0, 2**32 - 1)), min_size=32, max_size=32)
    )
    want = []
    for a, b, random in rows:
        parts = []
        for word, chance in ((a, random >> 16), (b, random & 0xFFFF)):
            carried = (word & 0x7FFFFFFF) + (chance & ((1 << bits) - 1)) >> bits << bits
            parts.append(encode(decode(carried, F32), kind) | (word >> 31) << 15)
        want.append(parts[0] << 16 | parts[1])
    check(f"cvt.rs.{name}x2.f32", (f"{name}x2", "f32", "f32", "b32"), rows, want)


@settings(max_examples=8)
@given(values=st.lists(exact.bits_of(F32), min_size=LANES, max_size=LANES))
def test_tf32(values):
    rows = [(bits,) for bits in values]
    cases = [(m, r, f) for m in ("rn", "rz") for r in (False, True) for f in (False, True)]
    for mode, relu, finite in [*cases, ("rna", False, False), ("rna", False, True)]:
        want = [
            encode(decode(bits, F32), TF32, mode, relu=relu, finite=finite) << 13 for bits in values
        ]
        if mode == "rna":
            want = [
                (bits & ~0x1FFF) - 0x2000 * finite if exact.is_nan(bits, F32) else w
                for bits, w in zip(values, want, strict=True)
            ]
        opcode = f"cvt.{mode}{'.relu' * relu}{'.satfinite' * finite}.tf32.f32"
        check(opcode, ("b32", "f32"), rows, want)


@pytest.mark.parametrize("name", NARROW)
def test_every_pair_of_narrow_numbers_as_halves(name):
    kind, dtype, bits = NARROW[name]
    packed = np.arange(1 << 2 * bits, dtype=np.uint32)
    codes = np.arange(2 * kind.sign, dtype=np.uint8).view(dtype).astype(np.float16)
    table = np.where(np.isnan(codes), np.uint16(0x7FFF), codes.view(np.uint16)).astype(np.uint32)
    table = np.resize(table, 1 << bits)  # the padding bits of 6-bit formats do not matter
    want = table[packed >> bits] << 16 | table[packed & ((1 << bits) - 1)]
    types = ("f16x2", "b8" if bits == 4 else "b16")
    np.testing.assert_array_equal(evaluate(f"cvt.rn.f16x2.{name}x2", types, packed), want)
    relu = evaluate(f"cvt.rn.relu.f16x2.{name}x2", types, packed)
    positive = np.where((want & 0x8000) > 0, 0, want & 0xFFFF)
    np.testing.assert_array_equal(relu & 0xFFFF, positive)


def narrowed(values, name):
    """ml_dtypes' conversion of float32, made to saturate; NaN becomes the canonical one."""
    kind, dtype, _ = NARROW[name]
    largest = float(decode(kind.largest, kind))
    clipped = np.clip(values, -largest, largest)
    codes = clipped.astype(dtype).view(np.uint8).astype(np.uint32)
    nan = kind.largest if kind.nan is None else kind.nan
    return np.where(np.isnan(values), nan, codes & (2 * kind.sign - 1))


@pytest.mark.parametrize("name", NARROW)
def test_floats_to_narrow_pairs(name):
    generator = np.random.default_rng(3)
    _, _, bits = NARROW[name]
    a, b = (floats_near(generator.integers(0, 2, 1 << 14), generator) for _ in range(2))
    types = ("b8" if bits == 4 else "b16", "f32", "f32")
    with np.errstate(all="ignore"):
        upper, lower = (narrowed(source.view(np.float32), name) for source in (a, b))
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32", types, a, b)
    np.testing.assert_array_equal(got, upper << bits | lower)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_every_half_to_narrow(name):
    _, _, bits = NARROW[name]
    with np.errstate(all="ignore"):
        want = narrowed(ALL_BITS.astype(np.uint16).view(np.float16).astype(np.float32), name)
    types = ("b8" if bits == 4 else "b16", "f16x2")
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f16x2", types, ALL_BITS << 16 | 0x3C00)
    one = encode(Fraction(1), NARROW[name][0])
    np.testing.assert_array_equal(got, want << bits | one)
    relu = evaluate(f"cvt.rn.satfinite.relu.{name}x2.f16x2", types, ALL_BITS)
    positive = np.where((ALL_BITS & 0x8000 > 0) & (ALL_BITS & 0x7FFF <= 0x7C00), 0, want)
    np.testing.assert_array_equal(relu & ((1 << bits) - 1), positive)


def scale(bits, up, finite):
    """The ue8m0 code of a float: the exponent of a power of two next to its magnitude."""
    number = decode(bits & 0x7FFFFFFF, F32)
    if isinstance(number, float) and math.isnan(number):
        return 0xFF
    if number == math.inf:
        return 0xFE if finite else 0xFF
    if not number:
        return 0
    exponent = exact.exponent_of(number)
    if up and number > Fraction(2) ** exponent:
        exponent += 1
    return min(max(exponent + 127, 0), 0xFE if finite else 0xFF)


@settings(max_examples=10)
@given(rows=st.lists(st.tuples(*[exact.bits_of(F32)] * 2), min_size=LANES, max_size=LANES))
def test_scale_factors(rows):
    for mode, finite in itertools.product(("rz", "rp"), (False, True)):
        want = [
            scale(a, mode == "rp", finite) << 8 | scale(b, mode == "rp", finite) for a, b in rows
        ]
        suffix = f"{mode}{'.satfinite' * finite}.ue8m0x2"
        check(f"cvt.{suffix}.f32", ("b16", "f32", "f32"), rows, want)
        halves = [(a & 0xFFFF0000, b & 0xFFFF0000) for a, b in rows]
        want = [
            scale(a, mode == "rp", finite) << 8 | scale(b, mode == "rp", finite) for a, b in halves
        ]
        packed = [(a | b >> 16,) for a, b in halves]
        check(f"cvt.{suffix}.bf16x2", ("b16", "bf16x2"), packed, want)


def test_every_scale_factor_as_bfloat16():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16).view(np.uint16)
    want = np.where(codes == 0xFF, 0x7FFF, want).astype(np.uint32)
    got = evaluate("cvt.rn.bf16x2.ue8m0x2", ("bf16x2", "b16"), ALL_BITS)
    np.testing.assert_array_equal(got, want[ALL_BITS >> 8] << 16 | want[ALL_BITS & 255])


@settings(max_examples=10)
@given(
    rows=st.lists(
        st.tuples(*[st.integers(-(1 << 31), (1 << 31) - 1)] * 3), min_size=32, max_size=32
    ),
    shift=st.integers(0, 31),
)
def test_pack(rows, shift):
    bits = [tuple((value >> shift) % (1 << 32) for value in row) for row in rows]
    for to in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        width = int(to[1:])
        want = []
        for a, b, c in bits:
            parts = [clamp(read(value, "s32"), to) % (1 << width) for value in (a, b)]
            filler = c << 2 * width if width < 16 else 0
            want.append((filler | parts[0] << width | parts[1]) % (1 << 32))
        if width == 16:
            check(f"cvt.pack.sat.{to}.s32", ("b32",) * 3, [row[:2] for row in bits], want)
        else:
            check(f"cvt.pack.sat.{to}.s32.b32", ("b32",) * 4, bits, want)


# Measured on an H200: opcode, types, sources, result.
MEASURED = [
    ("cvt.rn.ftz.f32.f64", ("f32", "f64"), (0x380FFFFFE0000000,), 0x00000000),
    ("cvt.rn.tf32.f32", ("b32", "f32"), (0x7FC00000,), 0x7FFFE000),
    ("cvt.f32.bf16", ("f32", "bf16"), (0x7FC0,), 0x7FC00000),
    ("cvt.rzi.s32.f32", ("s32", "f32"), (0x7FC00000,), 0x00000000),
    ("cvt.rzi.s32.f64", ("s32", "f64"), (0x7FF8000000000000,), 0x80000000),
    ("cvt.rzi.u64.f32", ("u64", "f32"), (0x7FC00000,), 0x8000000000000000),
]


@pytest.mark.parametrize(("opcode", "types", "row", "want"), MEASURED)
def test_results_measured_on_a_gpu(opcode, types, row, want):
    check(opcode, types, [row] * LANES, [want] * LANES)


@pytest.mark.parametrize(
    ("opcode", "types", "reason"),
    [
        ("cvt.f32.s32", ("f32", "s32"), "no rounding"),
        ("cvt.rn.s32.f32", ("s32", "f32"), ".rn"),
        ("cvt.s32.f32", ("s32", "f32"), "no integer rounding"),
        ("cvt.sat.u32.u16", ("u32", "u16"), ".sat"),
        ("cvt.rn.f64.f32", ("f64", "f32"), ".rn"),
        ("cvt.rm.relu.f16.f32", ("f16", "f32"), ".rm"),
        ("cvt.rz.f64.u64", ("f64", "u64"), "64-bit integers"),
        ("cvt.rn.e4m3x2.f32", ("b16", "f32", "f32"), "satfinite"),
        ("cvt.rn.satfinite.e2m3x2.f16x2", ("b16", "f16x2"), "e2m3x2.f16x2"),
        ("cvt.rna.relu.tf32.f32", ("b32", "f32"), ".relu"),
        ("cvt.rn.ue8m0x2.f32", ("b16", "f32", "f32"), ".rn"),
        ("cvt.pack.u16.s32", ("b32", "b32", "b32"), "cvt.pack"),
    ],
)
def test_what_the_manual_does_not_allow_is_named(opcode, types, reason):
    with pytest.raises(Unsupported, match=reason):
        build(opcode, types)


def test_four_narrow_numbers_are_not_modelled():
    with pytest.raises(Unsupported, match="random"):
        build("cvt.rs.satfinite.e4m3x4.f32", ("b32", *["f32"] * 4, "b32"), vector=4)
