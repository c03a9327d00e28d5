"""Rounding and ULP distances of fa4.dtypes, against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import config, dtypes
from tests.reference.exp2_oracle import round_exactly

# name -> (significant bits, least exponent of a normal number, largest finite value)
FORMATS = {
    "fp64": (53, -1022, float.fromhex("0x1.fffffffffffffp+1023")),
    "fp32": (24, -126, float.fromhex("0x1.fffffep+127")),
    "bf16": (8, -126, float.fromhex("0x1.fep+127")),
    "fp16": (11, -14, 65504.0),
    "e4m3": (4, -6, 448.0),
    "e5m2": (3, -14, 57344.0),
}
NARROW = ["bf16", "fp16", "e4m3", "e5m2"]
LEAST_SUBNORMAL_F64 = 2.0**-1074


def expected_rounding(value: float, name: str, saturate: bool = False) -> float:
    """`value` rounded once to a format, by exact arithmetic."""
    precision, least_exponent, largest = FORMATS[name]
    if math.isnan(value):
        return value
    rounded = value
    if math.isfinite(value):
        exact = round_exactly(Fraction(value), precision, least_exponent)
        if abs(exact) <= Fraction(largest):
            return math.copysign(float(exact), value)
        rounded = math.copysign(math.inf, value)
    if saturate:
        return math.copysign(largest, rounded)
    return math.nan if name == "e4m3" else rounded


def same_value(a: float, b: float) -> bool:
    """Equal with equal sign of zero, or both NaN."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def all_values(name: str) -> np.ndarray:
    """Every non-negative finite value of a narrow format, ascending, as float64."""
    dtype = dtypes.numpy_dtype(name)
    bits = np.arange(1 << (8 * dtype.itemsize - 1), dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


@st.composite
def near_ties(draw, name: str) -> float:
    """A float64 on, or a hair beside, the middle between two neighbours of a format."""
    precision, least_exponent, largest = FORMATS[name]
    top = math.frexp(largest)[1]
    exponent = draw(st.integers(max(least_exponent - precision - 2, -900), top))
    middle = math.ldexp(2 * draw(st.integers(0, 1 << precision)) + 1, exponent - precision)
    hair = draw(st.sampled_from([0.0, 2.0**-52, -(2.0**-52), 2.0**-30, -(2.0**-30)]))
    return draw(st.sampled_from([1.0, -1.0])) * middle * (1.0 + hair)


@pytest.mark.parametrize("name", list(FORMATS))
def test_names_limits_and_config_agree(name):
    precision, _, largest = FORMATS[name]
    dtype = dtypes.numpy_dtype(name)
    assert dtypes.dtype_name(dtype) == dtypes.dtype_name(np.zeros(3, dtype)) == name
    assert dtypes.dtype_name(dtype.type) == dtypes.dtype_name(dtype.type(1)) == name
    assert dtypes.largest_finite(name) == largest == float(ml_dtypes.finfo(dtype).max)
    assert dtypes.unit_roundoff(name) == 2.0**-precision
    assert config.DTYPE_BITS[name] == 8 * dtype.itemsize
    assert config.DTYPE_MAX_LOG2[name] == math.log2(largest)


@pytest.mark.parametrize("bad", [np.int32, np.zeros(2, np.complex64), "O", None])
def test_foreign_dtypes_are_refused_by_name(bad):
    with pytest.raises(TypeError, match=r"dtype must be one of \['fp64', .*; got \w+"):
        dtypes.dtype_name(bad)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of .*; got 'fp8'"):
        dtypes.round_to(1.0, "fp8")
    with pytest.raises(TypeError, match="got int64"):
        dtypes.round_to(np.arange(3, dtype=np.int64), "bf16")
    with pytest.raises(TypeError, match="same dtype; got float32 and float16"):
        dtypes.ulp_distance(np.float32(1), np.float16(1))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("saturate", [False, True])
@settings(max_examples=150)
@given(data=st.data())
def test_round_to_is_exact_from_both_widths(name, saturate, data):
    wide = data.draw(st.one_of(st.floats(width=64), near_ties(name)))
    single = data.draw(st.floats(width=32))
    for source in (np.float64(wide), np.float32(single)):
        rounded = dtypes.round_to(source, name, saturate=saturate)
        assert rounded.dtype == dtypes.numpy_dtype(name)
        assert rounded.shape == ()
        expected = expected_rounding(float(source), name, saturate)
        assert same_value(float(rounded), expected), (float(source).hex(), float(rounded))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_tie_of_a_narrow_format(name, sign):
    values = all_values(name)
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2  # exact in float64
    even = np.where(np.arange(low.size) % 2 == 0, low, high)
    cases = [(middle, even), (np.nextafter(middle, 0), low), (np.nextafter(middle, np.inf), high)]
    for source, expected in cases:
        rounded = dtypes.round_to(sign * source, name).astype(np.float64)
        assert np.array_equal(rounded, sign * expected)
        assert np.array_equal(np.signbit(rounded), np.full(low.shape, sign < 0))


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2"])
def test_the_tie_check_sees_double_rounding(name):
    values = all_values(name)
    below_tie = np.nextafter((values[1:-1] + values[2:]) / 2, 0)
    twice = below_tie.astype(np.float32).astype(dtypes.numpy_dtype(name)).astype(np.float64)
    assert np.count_nonzero(twice != values[1:-1]) >= values.size // 3


@pytest.mark.parametrize("name", NARROW)
def test_representable_values_stay(name):
    dtype = dtypes.numpy_dtype(name)
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    values = bits.view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        number = ~np.isnan(values)
        sources = (values, values.astype(np.float32), values.astype(np.float64))
    for source in sources:
        again = dtypes.round_to(source, name)
        assert np.array_equal(again.view(bits.dtype)[number], bits[number])
        assert not dtypes.ulp_distance(again, values).any()


def test_overflow_known_answers():
    x = np.array([464.0, 464.0000001, 1e300, -np.inf, np.nan])
    default = dtypes.round_to(x, "e4m3").astype(np.float64)
    assert np.array_equal(default, [448.0, np.nan, np.nan, np.nan, np.nan], equal_nan=True)
    clamped = dtypes.round_to(x, "e4m3", saturate=True).astype(np.float64)
    assert np.array_equal(clamped, [448.0, 448.0, 448.0, -448.0, np.nan], equal_nan=True)
    assert dtypes.round_to(np.float32(np.inf), "fp64", saturate=True) == FORMATS["fp64"][2]
    assert np.isinf(dtypes.round_to(np.float32(65520.0), "fp16"))  # a tie, and 65504 is odd
    assert np.isinf(dtypes.round_to(np.float32(61440.0), "e5m2"))
    assert dtypes.round_to(np.float32(61439.99), "e5m2") == 57344.0


def test_round_to_copies_and_keeps_shape_and_order():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    same = dtypes.round_to(x, "fp32")
    assert not np.shares_memory(same, x)
    assert np.array_equal(dtypes.round_to(x.transpose(2, 0, 1), "bf16"), x.transpose(2, 0, 1))
    assert dtypes.round_to(x[:0].astype(np.float64), "bf16").shape == (0, 3, 4)


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16"])
@settings(max_examples=150)
@given(data=st.data())
def test_ulp_is_numpy_spacing(name, data):
    x = data.draw(st.floats(width=8 * dtypes.numpy_dtype(name).itemsize))
    if abs(x) >= FORMATS[name][2]:
        x = math.nan  # above the largest value NumPy sees infinity, fa4 the topmost binade
    with np.errstate(all="ignore"):
        expected = float(np.spacing(np.abs(dtypes.numpy_dtype(name).type(x))))
    assert same_value(float(dtypes.ulp(x, name)), expected)


@pytest.mark.parametrize("name", NARROW)
def test_ulp_is_the_gap_above_each_value(name):
    values = all_values(name)
    gaps = np.diff(values)
    assert np.array_equal(dtypes.ulp(values[:-1], name), gaps)
    assert np.array_equal(dtypes.ulp(-values[:-1] - 0.4 * gaps, name), gaps)
    assert dtypes.ulp(1e300, name) == gaps[-1]
    assert np.isnan(dtypes.ulp([np.inf, np.nan], name)).all()
    assert dtypes.ulp(0.0, "fp64") == LEAST_SUBNORMAL_F64


@pytest.mark.parametrize("name", NARROW)
def test_ulp_distance_counts_values(name):
    dtype = dtypes.numpy_dtype(name)
    values = all_values(name)
    ordered = np.concatenate([-values[:0:-1], values]).astype(dtype)
    index = np.arange(ordered.size)
    for reference in (0, values.size - 1, values.size + 2, ordered.size - 1):
        distance = dtypes.ulp_distance(ordered, ordered[reference])
        assert np.array_equal(distance, np.abs(index - reference))


def test_ulp_distance_of_special_values():
    zero, nan, infinity = np.float32(0), np.float32(np.nan), np.float32(np.inf)
    assert dtypes.ulp_distance(zero, -zero) == 0
    assert dtypes.ulp_distance(nan, -nan) == 0
    assert dtypes.ulp_distance(nan, infinity) == dtypes.MAX_ULP_DISTANCE
    assert dtypes.ulp_distance(np.float32(FORMATS["fp32"][2]), infinity) == 1
    assert dtypes.ulp_distance(np.float64(-1e308), np.float64(1e308)) == dtypes.MAX_ULP_DISTANCE
    assert dtypes.ulp_distance(np.float64(-5e-324), np.float64(5e-324)) == 2
    assert dtypes.ulp_distance(np.zeros((2, 1), np.float16), np.zeros(3, np.float16)).shape == (
        2,
        3,
    )
