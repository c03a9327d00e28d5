"""Independent answers to compare the reference with: exact rounding, and a second software exp2.

The exp2 shares nothing with fa4.reference.exp2: one scalar at a time, a fused multiply-add from
LLVM, and a round-down addition made of float32 operations and a step in the integer encoding. The
compiled functions take and return bit patterns (uint32) and release the GIL, so that threads can
share the work.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

MAGIC = np.float32(12582912.0)
MINUS_127 = np.float32(-127.0)
SMALLEST_NORMAL = np.float32(2.0**-126)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NAN_BITS = np.uint32(0x7FFFFFFF)
SHIFT = np.uint32(23)


def round_exactly(value, precision, least_exponent, rounding=round):
    """Fraction `value` as a multiple of the spacing of a binary format, itself a Fraction.

    The format has `precision` significant bits and normal numbers from 2^least_exponent up; no
    largest number is enforced. `rounding` maps a Fraction to an int: round (to nearest, ties to
    even) or math.floor.
    """
    if not value:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, least_exponent) - precision + 1)
    return rounding(value / spacing) * spacing


def exact_sum_f32(product, addend, rounding=round):
    """product + addend (Fractions), not zero, rounded once to float32; `rounding` as above."""
    rounded = round_exactly(product + addend, 24, -126, rounding)
    largest = (2 - Fraction(2) ** -23) * Fraction(2) ** 127
    if rounded > largest:
        return np.float32(math.inf if rounding is round else largest)
    if rounded < -largest:
        return np.float32(-math.inf)
    if not rounded:
        return np.float32(math.copysign(0.0, product + addend))
    return np.float32(float(rounded))


@intrinsic
def fma(typing_context, a, b, c):
    """llvm.fma.f32: fused on every target, by instruction or by the C library's fmaf."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def build(context, builder, sig, args):
        return builder.fma(*args)

    return signature, build


@intrinsic
def float_from_bits(typing_context, bits):
    """The float32 with the encoding `bits` (uint32)."""

    def build(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def bits_of_float(typing_context, value):
    """The encoding (uint32) of a float32."""

    def build(context, builder, sig, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@njit(nogil=True)
def fma_bits(a, b, c, out):
    """out[i] = bits of fma(a[i], b[i], c[i]), NaN made canonical; uint32 arrays of one length."""
    for i in range(a.size):
        value = fma(float_from_bits(a[i]), float_from_bits(b[i]), float_from_bits(c[i]))
        out[i] = bits_of_float(value) if value == value else NAN_BITS


@njit(nogil=True)
def add_magic_rounding_down(x):
    """x + 12582912 towards -inf with .ftz, for x in [-127, +inf]: the sum is always positive."""
    if abs(x) < SMALLEST_NORMAL:
        return MAGIC
    total = x + MAGIC
    # Knuth's TwoSum in float32: exact, for neither term nor sum can overflow or be subnormal.
    x_part = total - MAGIC
    error = (x - x_part) + (MAGIC - (total - x_part))
    if error < ZERO:
        return float_from_bits(np.uint32(bits_of_float(total) - np.uint32(1)))
    return total


@njit(nogil=True)
def exp2_bits(x_bits, coefficients, out):
    """out[i] = bits of the software exp2 of the float32 with bits x_bits[i].

    coefficients: float32 (degree,), c1 first; x_bits and out: uint32 arrays of one length.
    """
    for i in range(x_bits.size):
        x = float_from_bits(x_bits[i])
        if not x > MINUS_127:  # NaN too
            x = MINUS_127
        rounded = add_magic_rounding_down(x)
        fraction = x - (rounded - MAGIC)
        power = coefficients[coefficients.size - 1]
        for k in range(coefficients.size - 2, -1, -1):
            power = fma(power, fraction, coefficients[k])
        power = fma(power, fraction, ONE)
        power_bits = bits_of_float(power) if power == power else NAN_BITS
        out[i] = np.uint32((bits_of_float(rounded) << SHIFT) + power_bits)
