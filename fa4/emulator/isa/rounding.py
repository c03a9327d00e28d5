"""Exact results and their rounding to any floating-point format and mode, for 32 lanes.

Three steps serve every operation that the CPU does not round as PTX asks:

1. `exact` computes in double and keeps, beside the double, which way the true value lies from it.
2. `round_to_odd` folds that into the double's last bit. 53 bits rounded to odd can be rounded once
   more, to any format of at most 51 bits and in any mode, without a double-rounding error.
3. `encode` rounds the double to a format by integer operations, overflow and subnormals included.

float32 has a shorter way: `directed_f32` corrects the CPU's own conversion by one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.emulator.isa.formats import FloatFormat, flush, widen
from fa4.emulator.translate.lanes import Lanes

ROUNDINGS = ("rn", "rz", "rm", "rp")
DOUBLE_MANTISSA = 52
DOUBLE_BIAS = 1023
DOUBLE_INFINITY = 0x7FF << DOUBLE_MANTISSA


@dataclass(frozen=True)
class Exact:
    """A double, and one whose sign tells on which side of it the true value lies (0: on it)."""

    value: Lanes
    error: Lanes


def native(operation: str, operands: list[Lanes]) -> Lanes:
    """add, sub, mul, fma, div or sqrt in the operands' own type, rounded to nearest by the CPU."""
    first, builder = operands[0], operands[0].builder
    if operation in ("fma", "sqrt"):
        suffix = {"float": "v32f32", "double": "v32f64"}[first.type]
        return builder.call(f"llvm.{operation}.{suffix}", first.type, *operands)
    method = {"add": "__add__", "sub": "__sub__", "mul": "__mul__", "div": "fdiv"}[operation]
    result: Lanes = getattr(first, method)(operands[1])
    return result


def exact(operation: str, operands: list[Lanes], mode: str) -> Exact:
    """add, sub, mul, fma, div or sqrt of doubles that hold float, half or bfloat16 values.

    Such products are exact in double, and no intermediate result leaves double's range.
    """
    builder = operands[0].builder
    zero = builder.constant(0.0, "double")
    if operation == "mul":
        return Exact(operands[0] * operands[1], zero)
    if operation == "add":
        return _two_sum(operands[0], operands[1], mode)
    if operation == "sub":
        return _two_sum(operands[0], -operands[1], mode)
    if operation == "fma":
        return _two_sum(operands[0] * operands[1], operands[2], mode)
    value = native(operation, operands)
    divisor = operands[1] if operation == "div" else value
    residual = builder.call("llvm.fma.v32f64", "double", -value, divisor, operands[0])
    if operation == "div":
        sign = divisor.as_integer() & (1 << 63)
        residual = (residual.as_integer() ^ sign).as_float()
    return Exact(value, residual)


def _two_sum(left: Lanes, right: Lanes, mode: str) -> Exact:
    # A sum that cancels is -0 when rounding down: negating on both sides gives that sign.
    total = -(-left + -right) if mode == "rm" else left + right
    part = total - left
    return Exact(total, (left - (total - part)) + (right - part))


def round_to_odd(result: Exact) -> Lanes:
    """One double: the value where it is exact, else the neighbour of the truth with an odd bit."""
    bits, error = result.value.as_integer(), result.error
    builder = bits.builder
    inexact = error.compare("one", builder.constant(0.0, "double"))
    even = (bits & 1).compare("eq", 0)
    inward = (bits ^ error.as_integer()).compare("slt", 0)
    step = inward.select(builder.constant(-1, "i64"), builder.constant(1, "i64"))
    moved = (inexact & even).select(bits + step, bits)
    return moved.as_float()


def directed_f32(result: Exact, mode: str) -> Lanes:
    """The true value as float in any mode of ROUNDINGS.

    The CPU's nearest float is moved by one step where the mode wants its neighbour; that is right
    at zero, among subnormals and at infinity too.
    """
    if mode == "rn":
        return round_to_odd(result).convert("fptrunc", "float")
    nearest = result.value.convert("fptrunc", "float")
    builder = nearest.builder
    zero = builder.constant(0.0, "double")
    bits = nearest.as_integer()
    difference = result.value - widen(nearest)
    rest = difference.compare("oeq", zero).select(result.error, difference)
    below, above = rest.compare("olt", zero), rest.compare("ogt", zero)
    negative = bits.compare("slt", 0)
    inward, outward = builder.constant(-1, "i32"), builder.constant(1, "i32")
    stay = builder.constant(0, "i32")
    if mode == "rz":
        step = negative.select(above, below).select(inward, stay)
    elif mode == "rm":
        step = below.select(negative.select(outward, inward), stay)
    else:
        step = above.select(negative.select(inward, outward), stay)
    return (bits + step).as_float()


def encode(
    value: Lanes,
    form: FloatFormat,
    mode: str = "rn",
    finite: bool = False,
    random: tuple[Lanes, int] | None = None,
) -> Lanes:
    """Rounds doubles to `form`: an integer vector of its width.

    mode: one of ROUNDINGS, "rna" (nearest, ties away from zero) or "rs" (stochastic: `random`
    holds an i64 vector and how many of its bits are added to the top of the discarded part).
    finite: the largest number instead of infinity (.satfinite). NaN becomes the canonical one, or
    the largest number in a format without NaN.
    """

    def body(number: Lanes, chance: Lanes | None = None) -> Lanes:
        count = random[1] if random else 0
        return _encode(number, form, mode, finite, None if chance is None else (chance, count))

    arguments = [value, random[0]] if random else [value]
    name = f"encode.{mode}{'.satfinite' if finite else ''}.{form.name}"
    return value.builder.subroutine(name, body, *arguments)


def _encode(
    value: Lanes, form: FloatFormat, mode: str, finite: bool, random: tuple[Lanes, int] | None
) -> Lanes:
    builder = value.builder
    bits = value.as_integer()
    magnitude, negative = bits & ((1 << 63) - 1), bits.compare("slt", 0)
    # The distance of the exponent from the smallest normal one; below that, bits are lost.
    above = (magnitude >> DOUBLE_MANTISSA) - (DOUBLE_BIAS + 1 - form.bias)
    zero = builder.constant(0, "i64")
    normal = builder.call("llvm.smax.v32i64", "i64", above, zero)
    lost = normal - above + (DOUBLE_MANTISSA - form.mantissa_bits)
    # From 54 dropped bits on, every number is less than half a unit.
    drop = builder.call("llvm.smin.v32i64", "i64", lost, builder.constant(54, "i64"))
    hidden = (magnitude & (2**DOUBLE_MANTISSA - 1)) | (1 << DOUBLE_MANTISSA)
    significand = magnitude.compare("eq", 0).select(zero, hidden)
    carry = _carry(significand, drop, negative, mode, random)
    code = (normal << form.mantissa_bits) + ((significand + carry) >> drop)
    over = code.compare("ugt", form.largest)
    code = over.select(_overflow(magnitude, negative, form, mode, finite), code)
    nan = magnitude.compare("ugt", DOUBLE_INFINITY)
    instead = form.largest if form.nan is None else form.nan
    code = negative.select(code | form.sign, code)
    code = nan.select(builder.constant(instead, "i64"), code)
    return code.resize(form.width)


def _carry(
    significand: Lanes, drop: Lanes, negative: Lanes, mode: str, random: tuple[Lanes, int] | None
) -> Lanes:
    """What is added below the last kept bit before truncation: it makes the rounding mode."""
    builder = significand.builder
    zero = builder.constant(0, "i64")
    unit = builder.constant(1, "i64") << drop
    if mode == "rz":
        return zero
    if mode == "rna":
        return unit >> 1
    if mode == "rn":
        return (unit >> 1) - 1 + ((significand >> drop) & 1)
    if mode == "rs":
        if random is None:
            raise ValueError("stochastic rounding without random bits")
        return random[0] << (drop - random[1])
    away = negative if mode == "rm" else ~negative
    return away.select(unit - 1, zero)


def _overflow(
    magnitude: Lanes, negative: Lanes, form: FloatFormat, mode: str, finite: bool
) -> Lanes:
    """The code of numbers beyond the largest: it, or infinity."""
    builder = magnitude.builder
    largest = builder.constant(form.largest, "i64")
    if finite or not form.infinity:
        return largest
    infinity = builder.constant(form.infinity_bits, "i64")
    if mode in ("rn", "rna", "rs"):
        return infinity
    keeps = magnitude.compare("eq", DOUBLE_INFINITY)
    if mode != "rz":
        keeps = keeps | (negative if mode == "rm" else ~negative)
    return keeps.select(infinity, largest)


def flush_result(bits: Lanes, odd: Lanes, form: FloatFormat, mode: str) -> Lanes:
    """Flushes encoded results that are subnormal, and those that only became normal by rounding.

    odd: the exact results as doubles rounded to odd. Measured on an H200: a result counts as tiny
    if rounding it with an unlimited exponent stays below the normal range.
    """
    builder = bits.builder
    # Just below the smallest normal number, numbers with an unlimited exponent are this far apart.
    gap = 2.0 ** -(form.mantissa_bits + 1)
    nearest = mode == "rn"
    limit = 2.0 ** (1 - form.bias) * (1 - (gap / 2 if nearest else gap))
    magnitude = builder.call("llvm.fabs.v32f64", "double", odd)
    relation = "olt" if nearest else "ole"
    tiny = magnitude.compare(relation, builder.constant(limit, "double"))
    return tiny.select(bits & form.sign, flush(bits, form))
