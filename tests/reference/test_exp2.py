"""The software exp2, its instructions and the split, bit for bit against independent answers."""

from __future__ import annotations

import decimal
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import TUNED_EXP2, Exp2Split, ForwardConfig
from fa4.dtypes import round_to, ulp_distance
from fa4.reference import exp2
from lab.records import read_record
from tests.reference import exp2_oracle

ALL_INPUTS = 1 << 32
# Odd, so multiplying by it permutes the 2^32 patterns; near 2^32 / golden ratio, so that every run
# of neighbours in the new order holds all exponents (Knuth, TAOCP 3, section 6.4).
SCATTER = 2654435769
CHUNK = 1 << 20
STRIDE = 257  # 2^24 samples of all patterns; prime, so no mantissa bit stays fixed

F32 = st.integers(0, ALL_INPUTS - 1).map(lambda bits: from_bits([bits])[0])
# Short mantissas and close exponents: sums that are ties, cancel or fall into the subnormals.
SHORT = st.builds(
    lambda mantissa, exponent: np.float32(math.ldexp(mantissa, exponent)),
    st.integers(-9, 9).map(lambda m: m * 0x180001 if m % 2 else m),
    st.sampled_from([-149, -140, -126, -100, -76, -75, -63, -49, -25, -24, -1, 0, 1, 40, 100]),
)
FINITE = st.one_of(SHORT, F32.filter(np.isfinite))

# float32 bit patterns -> result bits, worked out by hand from the instructions.
KNOWN_BITS = {
    0x00000000: 0x3F800000,  # 0 -> 1
    0x80000000: 0x3F800000,  # -0 -> 1
    0x3F800000: 0x40000000,  # 1 -> 2
    0xBF800000: 0x3F000000,  # -1 -> 0.5
    0x007FFFFF: 0x3F800000,  # largest subnormal -> 1
    0x807FFFFF: 0x3F800000,  # negative subnormal: flushed, so not floor -1
    0x80800000: 0x3F7FFA6B,  # -2^-126: f rounds to 1, result p(1) / 2
    0xB3000000: 0x3F7FFA6B,  # -2^-25: the same, by the tie
    0xC2FC0000: 0x00800000,  # -126 -> smallest normal
    0xC2FE0000: 0x00000000,  # -127 -> +0
    0xFF800000: 0x00000000,  # -inf -> +0
    0x42FE0000: 0x7F000000,  # 127 -> 2^127
    0x43000000: 0x7F800000,  # 128 -> +inf
    0x43010000: 0x80000000,  # 129: the exponent reaches the sign bit
    0x7F7FFFFF: 0x3F000000,  # largest finite: r keeps its low bits, f = 0
    0x7F800000: 0x7FFFFFFF,  # +inf: f = inf - inf
    0x7FC00000: 0x00000000,  # NaN: max.f32 takes -127
    0xFFFFFFFF: 0x00000000,
    0x7F800001: 0x00000000,  # signalling NaN
}

# Error of each degree over 2^22 points of [0, 1): the accuracy table of the FlashAttention-4 paper
# (arXiv 2603.05451), its missing entries recomputed. FP32 max and mean relative error, BF16 max
# relative error, share equal to the correctly rounded BF16; each to the digits given there.
ERROR_TABLE = {
    2: ("2.08e-03", None, None, 0.76),
    3: ("8.77e-05", "5.43e-05", "3.90e-03", 0.99),
    4: ("3.05e-06", "1.84e-06", "3.89e-03", 0.9997),
    5: ("1.44e-07", "5.48e-08", "3.89e-03", 1.0),
}


def from_bits(bits) -> np.ndarray:
    """float32 array with the given bit patterns."""
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def bits_of(x) -> np.ndarray:
    """uint32 encodings of float32 values."""
    return np.atleast_1d(np.asarray(x, dtype=np.float32)).view(np.uint32)


def oracle_mismatches(bits: np.ndarray, degree: int = 3) -> int:
    """How many of the inputs `bits` the reference and the oracle answer with different bits."""
    expected = np.empty_like(bits)
    coefficients = np.array(exp2.COEFFICIENTS[degree], dtype=np.float32)
    exp2_oracle.exp2_bits(bits, coefficients, expected)
    actual = exp2.exp2_polynomial(bits.view(np.float32), degree).view(np.uint32)
    return int(np.count_nonzero(actual != expected))


def boundary_bits() -> np.ndarray:
    """The first and last 64 mantissas of every sign and exponent."""
    ends = np.concatenate([np.arange(64), np.arange(64) + (1 << 23) - 64])
    return (np.arange(512)[:, None] * (1 << 23) + ends).astype(np.uint32).ravel()


def sample_bits() -> np.ndarray:
    """About 70,000 patterns: all boundaries, and a scatter over everything."""
    scattered = np.arange(1 << 12, dtype=np.uint32) * np.uint32(SCATTER)
    return np.concatenate([boundary_bits(), scattered])


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32 | None:
    """a * b + c of finite values rounded once, None where the exact sum is zero."""
    product, addend = Fraction(float(a)) * Fraction(float(b)), Fraction(float(c))
    return exp2_oracle.exact_sum_f32(product, addend) if product + addend else None


def test_coefficients_are_the_published_float32_values():
    for degree, values in exp2.COEFFICIENTS.items():
        assert len(values) == degree
        assert all(float(np.float32(value)) == value for value in values)
    assert bits_of(exp2.COEFFICIENTS[3]).tolist() == [0x3F31F519, 0x3E6906A4, 0x3D9DF09D]
    assert bits_of(exp2.ROUNDING_MAGIC).tolist() == [0x4B400000]


@settings(max_examples=400)
@given(FINITE, FINITE, FINITE)
def test_fma_is_exact(a, b, c):
    expected = exact_fma(a, b, c)
    if expected is not None:
        assert bits_of(exp2.fma_f32(a, b, c)) == bits_of(expected), (a, b, c)


def tie_cases() -> list[np.ndarray]:
    """a, b, c with a * b within 2^-36 of half the spacing of c: ties only a fused sum can tell."""
    near_one = [(1.0, 1.0), (1 + 2.0**-23, 1 - 2.0**-23), (1 + 2.0**-12, 1 - 2.0**-12 + 2.0**-24)]
    mantissas = [1, 2, 5, (1 << 22) + 1, 1 << 23, (1 << 23) + 1, (1 << 24) - 2, (1 << 24) - 1]
    rows = [
        (math.ldexp(a, (exponent - 1) // 2), math.ldexp(sign * b, exponent // 2), head)
        for a, b in near_one
        for exponent in (-149, -148, -127, -126, -24, 0, 1, 103, 104)
        for mantissa in mantissas
        for sign in (1.0, -1.0)
        for head in (math.ldexp(mantissa, exponent), -math.ldexp(mantissa, exponent))
    ]
    return [np.array(column, dtype=np.float32) for column in zip(*rows, strict=True)]


def fma_in_two_roundings(a, b, c):
    """Planted fault: the product is rounded before the sum."""
    with np.errstate(all="ignore"):
        return (np.asarray(a) * b).astype(np.float32) + c


def fma_through_float64(a, b, c):
    """Planted fault: the sum is rounded to float64 before float32."""
    with np.errstate(all="ignore"):
        return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "exact"),
    [(exp2.fma_f32, True), (fma_in_two_roundings, False), (fma_through_float64, False)],
)
def test_fma_decides_ties_and_faulty_ones_do_not(function, exact):
    a, b, c = tie_cases()
    expected = np.array([exact_fma(*row) for row in zip(a, b, c, strict=True)], dtype=np.float32)
    wrong = np.count_nonzero(bits_of(function(a, b, c)) != bits_of(expected))
    assert wrong == 0 if exact else wrong >= 20


def test_fma_equals_the_fused_instruction_on_arbitrary_bits():
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, ALL_INPUTS, (3, 1 << 20), dtype=np.uint32)
    # Exponents near each other in half of the cases, so that the terms interact.
    patterns[:, ::2] = patterns[:, ::2] & np.uint32(0x83FFFFFF) | np.uint32(0x3C000000)
    special = from_bits([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC01234, 1, 0x3F800000, 0x7F7FFFFF])
    grid = np.stack(np.meshgrid(special, special, special)).reshape(3, -1)
    patterns[:, : grid.shape[1]] = grid.view(np.uint32)
    expected = np.empty(patterns.shape[1], dtype=np.uint32)
    exp2_oracle.fma_bits(*patterns, expected)
    assert np.array_equal(bits_of(exp2.fma_f32(*patterns.view(np.float32))), expected)


def exact_add_rm(a: np.float32, b: np.float32) -> np.float32:
    """a + b of finite values rounded down, subnormals flushed at both ends."""
    a, b = (np.copysign(np.float32(0), x) if abs(x) < 2.0**-126 else x for x in (a, b))
    if float(a) == -float(b):
        return np.float32(-0.0 if np.signbit(a) or np.signbit(b) else 0.0)
    total = exp2_oracle.exact_sum_f32(Fraction(float(a)), Fraction(float(b)), math.floor)
    return np.copysign(np.float32(0), total) if abs(total) < 2.0**-126 else total


@settings(max_examples=400)
@given(FINITE, FINITE)
def test_add_rm_is_exact(a, b):
    assert bits_of(exp2.add_rm_f32(a, b)) == bits_of(exact_add_rm(a, b)), (a, b)


def test_add_rm_known_answers():
    infinity, largest = np.float32(np.inf), from_bits(0x7F7FFFFF)
    tiny, one, zero = np.float32(1e-30), np.float32(1), np.float32(0)
    cases = [
        (one, -tiny, 0x3F7FFFFF),
        (one, tiny, 0x3F800000),
        (largest, largest, 0x7F7FFFFF),
        (-largest, -tiny, 0xFF800000),
        (one, -one, 0x80000000),
        (zero, zero, 0x00000000),
        (zero, -zero, 0x80000000),
        (infinity, largest, 0x7F800000),
        (infinity, -infinity, 0x7FFFFFFF),
        (from_bits(0xFFC00001), one, 0x7FFFFFFF),
        (one, from_bits(0x807FFFFF), 0x3F800000),
        (from_bits(0x00800001), from_bits(0x80800000), 0x00000000),
    ]
    a, b, expected = zip(*cases, strict=True)
    assert bits_of(exp2.add_rm_f32(np.array(a), np.array(b))).tolist() == list(expected)


@pytest.mark.parametrize("function", [exp2.fma_f32, exp2.add_rm_f32])
def test_arithmetic_broadcasts_and_refuses_other_types(function):
    arguments = [np.ones((2, 1), np.float32), np.ones(3, np.float32), np.float32(1)]
    count = 3 if function is exp2.fma_f32 else 2
    assert function(*arguments[:count]).shape == (2, 3)
    assert function(*[np.float32(1)] * count) == 2.0
    with pytest.raises(TypeError, match="a must be float32; got float64"):
        function(1.0, *arguments[1:count])


def test_polynomial_known_bits():
    actual = bits_of(exp2.exp2_polynomial(from_bits(list(KNOWN_BITS))))
    assert dict(zip(KNOWN_BITS, actual.tolist(), strict=True)) == KNOWN_BITS
    # Alone, each input takes the cheap or the general range reduction by its own size.
    for given_bits, expected in KNOWN_BITS.items():
        assert bits_of(exp2.exp2_polynomial(from_bits(given_bits))) == expected, hex(given_bits)


def test_polynomial_outside_its_domain():
    between = exp2.exp2_polynomial(np.float32([128.25, 128.99]))
    assert np.isnan(between).all()
    low = np.linspace(-127, -126, 1001, dtype=np.float32)
    fraction = exp2.exp2_polynomial(low + np.float32(127))
    assert np.array_equal(exp2.exp2_polynomial(low), np.float32(2.0**-126) * (fraction - 1))
    assert not exp2.exp2_polynomial(np.float32([-127.5, -1e30, -np.inf, np.nan])).any()


@pytest.mark.parametrize("degree", list(exp2.COEFFICIENTS))
def test_polynomial_equals_the_oracle_on_a_sample(degree):
    assert oracle_mismatches(sample_bits(), degree) == 0
    assert oracle_mismatches(boundary_bits(), degree) == 0


@pytest.mark.parametrize("step", [STRIDE, STRIDE * SCATTER % ALL_INPUTS])
def test_polynomial_equals_the_oracle_on_2_to_the_24_inputs(step):
    index = np.arange(1 << 24, dtype=np.uint32)
    assert oracle_mismatches(index * np.uint32(step)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, SCATTER], ids=["ascending", "scattered"])
def test_polynomial_equals_the_oracle_on_every_input(step):
    # Ascending chunks take the cheap range reduction, scattered ones the general one.
    def mismatches(chunk: int) -> int:
        index = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint32)
        return oracle_mismatches(index * np.uint32(step))

    oracle_mismatches(boundary_bits())  # compile before the threads start
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(mismatches, range(ALL_INPUTS // CHUNK))) == 0


def plant(monkeypatch, fault: str) -> None:
    """Break one instruction of the software exp2."""
    if fault == "unfused":
        monkeypatch.setattr(exp2, "fma_f32", fma_in_two_roundings)
    elif fault == "round to nearest":
        monkeypatch.setattr(exp2, "add_rm_f32", np.add)
    elif fault == "no flush":
        monkeypatch.setattr(exp2, "_flush", lambda x: x)
    elif fault == "no clamp":
        monkeypatch.setattr(exp2, "CLAMP", np.float32(-np.inf))
    elif fault == "host NaN":
        monkeypatch.setattr(exp2, "_canonical_nan", lambda x: x)
    else:
        c1, c2, c3 = exp2.COEFFICIENTS[3]
        near = float(np.nextafter(np.float32(c3), np.float32(1)))
        monkeypatch.setattr(exp2, "COEFFICIENTS", {3: (c1, c2, near)})


@pytest.mark.parametrize(
    "fault", ["unfused", "round to nearest", "no flush", "no clamp", "host NaN", "coefficient"]
)
def test_the_oracle_sees_every_planted_fault(monkeypatch, fault):
    bits = sample_bits()
    expected = np.empty_like(bits)
    coefficients = np.array(exp2.COEFFICIENTS[3], dtype=np.float32)
    exp2_oracle.exp2_bits(bits, coefficients, expected)
    plant(monkeypatch, fault)
    with np.errstate(all="ignore"):
        actual = exp2.exp2_polynomial(bits.view(np.float32)).view(np.uint32)
    assert np.count_nonzero(actual != expected) >= 1


@pytest.mark.parametrize("degree", list(ERROR_TABLE))
def test_error_table(degree):
    x = np.arange(1 << 22, dtype=np.float32) / np.float32(1 << 22)
    power = exp2.exp2_polynomial(x, degree)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(power / exact - 1)
    rounded = round_to(power, "bf16")
    apart = ulp_distance(rounded, round_to(exact, "bf16"))
    bf16_error = np.abs(rounded.astype(np.float64) / exact - 1).max()

    most, mean, bf16_most, equal = ERROR_TABLE[degree]
    assert f"{error.max():.2e}" == most
    assert mean is None or f"{error.mean():.2e}" == mean
    assert bf16_most is None or f"{bf16_error:.2e}" == bf16_most
    assert np.mean(apart == 0) == pytest.approx(equal, abs=0.005 if degree == 2 else 5e-5)
    assert apart.max() <= 1


def exact_power(x: np.float32) -> np.float32:
    """2^x correctly rounded to float32, by 60-digit decimal arithmetic."""
    with decimal.localcontext() as context:
        context.prec = 60
        power = Fraction(decimal.Decimal(2) ** decimal.Decimal(float(x)))
    return exp2_oracle.exact_sum_f32(power, Fraction(0))


@settings(max_examples=200)
@given(st.floats(-126, 127.5, width=32))
def test_mufu_model_is_correctly_rounded(x):
    x = np.float32(x)
    assert bits_of(exp2.exp2_mufu(x)) == bits_of(exact_power(x))


def test_mufu_model_beside_ties_that_float64_cannot_tell():
    hard = from_bits([0x3B429D37, 0xBCF3A937])
    for x in hard:
        assert ulp_distance(exp2.exp2_mufu(x), exact_power(x)) <= 1


def test_mufu_model_special_values():
    ones = [0.0, -0.0, 1e-45, -1e-45, from_bits(0x007FFFFF), from_bits(0x807FFFFF)]
    assert np.array_equal(exp2.exp2_mufu(np.float32(ones)), np.ones(6, np.float32))
    zeros = np.float32([-np.inf, -1e30, -150, -126.00001])
    assert not bits_of(exp2.exp2_mufu(zeros)).any()
    assert exp2.exp2_mufu(np.float32(-126)) == 2.0**-126
    assert np.isinf(exp2.exp2_mufu(np.float32([128, 1e30, np.inf]))).all()
    assert bits_of(exp2.exp2_mufu(from_bits([0xFFC00000, 0x7F800001]))).tolist() == [0x7FFFFFFF] * 2


@pytest.mark.parametrize(
    ("split", "percent"),
    [
        (TUNED_EXP2[(128, False)], 18.75),
        (TUNED_EXP2[(128, True)], 12.5),
        (TUNED_EXP2[(192, False)], 18.75),
        (TUNED_EXP2[(192, True)], 6.25),
        (TUNED_EXP2[(256, False)], 28.125),
        (TUNED_EXP2[(256, True)], 28.125),
        (ForwardConfig.tuned("e4m3", 128, True).exp2, 25.0),
        (Exp2Split(), 0.0),
    ],
)
def test_shares_of_the_tuning_table(split, percent):
    # Where polynomial and MUFU model differ, the values themselves show which unit was used.
    x = np.float32([-0.3, -0.6, -2.7])
    assert np.all(exp2.exp2_polynomial(x) != exp2.exp2_mufu(x))
    rows = np.repeat(x[:, None], 128, axis=1)
    emulated = exp2.exp2_split(rows, split, 128) == exp2.exp2_polynomial(rows)
    assert 100 * emulated.mean(axis=1) == pytest.approx([percent] * 3)


@settings(max_examples=60)
@given(
    st.builds(
        Exp2Split,
        frequency=st.just(0) | st.integers(8, 32),
        residue=st.integers(0, 8),
        start_fragment=st.integers(0, 3),
        degree=st.integers(1, 5),
    ),
    st.integers(1, 200),
    st.data(),
)
def test_split_takes_each_column_to_its_unit(split, tile_n, data):
    first = data.draw(st.integers(0, tile_n - 1))
    width = data.draw(st.integers(0, tile_n - first))
    leading = data.draw(st.sampled_from([(), (3,), (2, 0), (2, 3)]))
    rng = np.random.default_rng(tile_n)
    x = -10 * rng.random((*leading, width), dtype=np.float32)
    flags = np.array(split.emulated_columns(tile_n))[first : first + width]
    expected = np.where(flags, exp2.exp2_polynomial(x, split.degree), exp2.exp2_mufu(x))
    actual = exp2.exp2_split(x, split, tile_n, first)
    assert actual.shape == x.shape
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_split_position_matters_and_is_checked():
    split = TUNED_EXP2[(128, False)]
    x = np.full(96, -0.3, dtype=np.float32)
    assert not np.array_equal(exp2.exp2_split(x, split, 128), exp2.exp2_split(x, split, 128, 2))
    with pytest.raises(ValueError, match="within a tile of 128; got 33 to 129"):
        exp2.exp2_split(x, split, 128, 33)
    with pytest.raises(ValueError, match="got -1 to 95"):
        exp2.exp2_split(x, split, 128, -1)
    with pytest.raises(ValueError, match="at least one dimension"):
        exp2.exp2_split(x[0], split, 128)


@pytest.mark.parametrize("function", [exp2.exp2_polynomial, exp2.exp2_mufu])
def test_shapes_and_types(function):
    x = -np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert np.array_equal(function(x), 2.0**x)
    assert np.array_equal(function(x.T), 2.0**x.T)
    assert function(x[:, :0]).shape == (2, 0, 4)
    assert function(np.float32(3)).shape == ()
    with pytest.raises(TypeError, match="x must be float32; got float16"):
        function(x.astype(np.float16))


def test_unknown_degree_is_refused():
    with pytest.raises(ValueError, match=r"degree must be one of \[1, 2, 3, 4, 5\]; got 6"):
        exp2.exp2_polynomial(np.float32(0), 6)


def test_the_bound_is_what_the_hardware_showed() -> None:
    """The largest distance over all inputs on an H200, on record (lab/hardware/h200_exp2.py)."""
    checks = read_record("h200_exp2")["checks"]
    found = next(x for x in checks if x["check"].startswith("exp2_mufu"))["ulp_histogram"]
    assert max(abs(int(distance)) for distance in found) == exp2.MUFU_MAX_ULP
