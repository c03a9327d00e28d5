"""Floating-point arithmetic by definition: fractions, rounded once. Slow, and shares no code.

A number is a Fraction, or a float for what fractions cannot say: the zeros, infinities, NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from hypothesis import strategies as st

Number = Fraction | float
COUNT = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1}
# The sources of f64 operations in the order in which they are asked for a NaN to pass on.
NAN_ORDER = {"fma": (1, 2, 0), "div": (0, 1), "rcp": (0,), "sqrt": (0,)}
UNLIMITED = 5000  # more than any exponent that a test meets


@dataclass(frozen=True)
class Kind:
    """exponent and mantissa bits; nan: bits of the canonical NaN, if any; infinity: as IEEE 754."""

    exponent: int
    mantissa: int
    nan: int | None
    infinity: bool = True

    @property
    def width(self):
        return 1 + self.exponent + self.mantissa

    @property
    def sign(self):
        return 1 << (self.width - 1)

    @property
    def emin(self):
        return 2 - (1 << (self.exponent - 1))

    @property
    def largest(self):
        """Bits of the largest finite number."""
        if self.infinity:
            return (((1 << self.exponent) - 1) << self.mantissa) - 1
        return self.sign - 1 - (self.nan is not None)

    @property
    def emax(self):
        return (self.largest >> self.mantissa) - 1 + self.emin


F64 = Kind(11, 52, 0xFFF8 << 48)
F32 = Kind(8, 23, 0x7FFFFFFF)
F16 = Kind(5, 10, 0x7FFF)
BF16 = Kind(8, 7, 0x7FFF)
TF32 = Kind(8, 10, 0x3FFFF)
E5M2 = Kind(5, 2, 0x7F)
E4M3 = Kind(4, 3, 0x7F, infinity=False)
E3M2 = Kind(3, 2, None, infinity=False)
E2M3 = Kind(2, 3, None, infinity=False)
E2M1 = Kind(2, 1, None, infinity=False)


@cache
def power(exponent: int) -> Fraction:
    """2 to the exponent."""
    return Fraction(2) ** exponent


def decode(bits: int, kind: Kind) -> Number:
    """The number that the bits stand for."""
    negative, magnitude = bool(bits & kind.sign), bits & (kind.sign - 1)
    if magnitude > kind.largest:
        infinite = kind.infinity and magnitude == kind.largest + 1
        return math.nan if not infinite else -math.inf if negative else math.inf
    if not magnitude:
        return -0.0 if negative else 0.0
    field, fraction = magnitude >> kind.mantissa, magnitude & ((1 << kind.mantissa) - 1)
    significand = fraction | (1 << kind.mantissa if field else 0)
    value = significand * power(max(field, 1) - 1 + kind.emin - kind.mantissa)
    return -value if negative else value


def exponent_of(value: Fraction) -> int:
    """floor(log2(|value|))."""
    guess = abs(value.numerator).bit_length() - value.denominator.bit_length()
    return guess if abs(value) >= power(guess) else guess - 1


def round_fraction(value: Fraction, mantissa: int, emin: int, emax: int, mode: str) -> Number:
    """The nearest number with `mantissa` fraction bits in a mode rn, rna, rz, rm or rp.

    Beyond the largest number of exponent emax it is that number or an infinity, by the mode.
    """
    unit = power(max(exponent_of(value), emin) - mantissa)
    steps = value / unit
    half_away = math.floor(abs(steps) + Fraction(1, 2)) * (1 if value > 0 else -1)
    whole = {
        "rn": lambda: round(steps),
        "rna": lambda: half_away,
        "rz": lambda: math.trunc(steps),
        "rm": lambda: math.floor(steps),
        "rp": lambda: math.ceil(steps),
    }[mode]()
    if not whole:
        return -0.0 if value < 0 else 0.0
    result = whole * unit
    largest = (2 - Fraction(1, 1 << mantissa)) * power(emax)
    if abs(result) <= largest:
        return result
    inward = mode == "rz" or mode == ("rm" if value > 0 else "rp")
    if inward:
        return largest if value > 0 else -largest
    return math.inf if value > 0 else -math.inf


def encode(
    number: Number,
    kind: Kind,
    mode: str = "rn",
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    finite: bool = False,
) -> int:
    """The bits of a number rounded to a format, after PTX's .sat or .relu and before its .ftz.

    ftz: to zero if it is below the normal range even rounded with an unlimited exponent.
    """
    if isinstance(number, float) and math.isnan(number):
        if sat:
            return 0
        return kind.largest if kind.nan is None else kind.nan
    if sat:
        number = min(max(number, 0), 1)
    if relu:
        number = max(number, 0)
    if number in (0, 1) and (sat or relu):
        number = Fraction(number) if number else 0.0
    if isinstance(number, Fraction) and ftz:
        unlimited = round_fraction(number, kind.mantissa, -UNLIMITED, UNLIMITED, mode)
        if abs(unlimited) < power(kind.emin):
            number = -0.0 if number < 0 else 0.0
    if isinstance(number, Fraction):
        number = round_fraction(number, kind.mantissa, kind.emin, kind.emax, mode)
    sign = kind.sign if math.copysign(1, number) < 0 else 0
    magnitude = abs(number)
    if magnitude == math.inf or magnitude > decode(kind.largest, kind):
        return sign | (kind.largest if finite or not kind.infinity else kind.largest + 1)
    if not magnitude:
        return sign
    exponent = max(exponent_of(Fraction(magnitude)), kind.emin)
    significand = Fraction(magnitude) / power(exponent - kind.mantissa)
    assert significand.denominator == 1
    return sign | (((exponent - kind.emin) << kind.mantissa) + int(significand))


def flushed(number: Number, kind: Kind) -> Number:
    """Zero of the same sign for a subnormal number."""
    if isinstance(number, Fraction) and abs(number) < power(kind.emin):
        return -0.0 if number < 0 else 0.0
    return number


def _sign(number: Number) -> float:
    return (
        math.copysign(1.0, number) if isinstance(number, float) else (-1.0 if number < 0 else 1.0)
    )


def multiply(a: Number, b: Number) -> Number:
    """a * b, exact."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    if any(map(_is_nan, (a, b))):
        return math.nan
    if math.inf in (abs(a), abs(b)):
        return math.nan if 0 in (a, b) else _sign(a) * _sign(b) * math.inf
    return _sign(a) * _sign(b) * 0.0


def add(a: Number, b: Number, down: bool = False) -> Number:
    """a + b, exact; down: rounding towards minus infinity, where a cancelling sum is -0."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b or (-0.0 if down else 0.0)
    if any(map(_is_nan, (a, b))):
        return math.nan
    for one, other in ((a, b), (b, a)):
        if abs(one) == math.inf:
            return math.nan if other == -one else one
    if not a and not b:
        return a if _sign(a) == _sign(b) else (-0.0 if down else 0.0)
    return a or b


def divide(a: Number, b: Number) -> Number:
    """a / b, exact."""
    if any(map(_is_nan, (a, b))):
        return math.nan
    sign = _sign(a) * _sign(b)
    if abs(a) == math.inf or not b:
        return math.nan if abs(a) == abs(b) or (not a and not b) else sign * math.inf
    if abs(b) == math.inf or not a:
        return sign * 0.0
    return Fraction(a) / Fraction(b)


def square_root(a: Number) -> Number:
    """The root of a number: 200 exact bits, the last one set if the root goes on."""
    if not isinstance(a, Fraction):
        return a if not a or a == math.inf else math.nan
    if a < 0:
        return math.nan
    shift = 200 - exponent_of(a) // 2
    scaled = a * power(2 * shift)
    root = math.isqrt(math.floor(scaled))
    return Fraction(root | (root * root != scaled)) / power(shift)


def _is_nan(a: Number) -> bool:
    return isinstance(a, float) and math.isnan(a)


def operate(operation: str, numbers: list[Number], down: bool = False) -> Number:
    """add, sub, mul, fma, div, rcp or sqrt, exact."""
    if operation == "add":
        return add(*numbers, down)
    if operation == "sub":
        return add(numbers[0], -numbers[1], down)
    if operation == "mul":
        return multiply(*numbers)
    if operation == "fma":
        return add(multiply(*numbers[:2]), numbers[2], down)
    if operation == "rcp":
        return divide(Fraction(1), numbers[0])
    return divide(*numbers) if operation == "div" else square_root(*numbers)


def specials(kind: Kind) -> list[int]:
    """Bits of zeros, the ends of the subnormals and normals, one and its neighbours, NaNs."""
    one = -kind.emin + 1 << kind.mantissa
    normal = 1 << kind.mantissa
    positive = [0, 1, 2, normal - 1, normal, normal + 1, one - 1, one, one + 1, one + normal // 2]
    positive += [kind.largest - 1, kind.largest, kind.sign - 1]
    if kind.infinity:
        positive += [kind.largest + 1, kind.largest + 2, kind.largest + 1 + normal // 2]
    return [bits | sign for bits in positive for sign in (0, kind.sign)]


def bits_of(kind: Kind) -> st.SearchStrategy[int]:
    """Encoded numbers: special ones, any bits, and few-bit mantissas near one (often half-way)."""
    one = -kind.emin + 1
    low, high = max(one - 30, 0), min(one + 30, (1 << kind.exponent) - 2)
    near_one = st.builds(
        lambda sign, exponent, head, shift, tail: (
            sign * kind.sign
            | exponent << kind.mantissa
            | (((head << shift) | tail) & ((1 << kind.mantissa) - 1))
        ),
        st.booleans(),
        st.integers(low, high),
        st.integers(0, 15),
        st.integers(0, kind.mantissa),
        st.integers(0, 1),
    )
    anything = st.integers(0, 2 * kind.sign - 1)
    return st.one_of(st.sampled_from(specials(kind)), anything, near_one, near_one)


@st.composite
def sources(draw: st.DrawFn, kinds: tuple[Kind, ...], target: Kind) -> tuple[int, ...]:
    """Sources of one instruction; the last one often nearly cancels the others' sum or product."""
    row = [draw(bits_of(kind)) for kind in kinds]
    if len(kinds) > 1 and draw(st.booleans()):
        numbers = [decode(bits, kind) for bits, kind in zip(row[:-1], kinds[:-1], strict=True)]
        rest = numbers[0] if len(numbers) == 1 else multiply(*numbers)
        near = encode(-rest, kinds[-1], draw(st.sampled_from(["rn", "rz", "rp"])))
        if target is kinds[-1]:
            near += draw(st.integers(-1, 1))
        row[-1] = near % (2 * kinds[-1].sign)
    return tuple(row)


def rows_of(kinds: tuple[Kind, ...], target: Kind) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Sources of one instruction for each of 32 lanes."""
    return st.lists(sources(kinds, target), min_size=32, max_size=32)


def is_nan(bits: int, kind: Kind) -> bool:
    """Whether bits encode a NaN, in a format with infinities."""
    return bits & (kind.sign - 1) > kind.largest + 1


def quiet(bits: int, kind: Kind, target: Kind) -> int:
    """A NaN in another format as an H200 passes it on in f64 operations and conversions: with its
    sign and the top of its payload, and quiet."""
    payload, shift = bits % (1 << kind.mantissa), target.mantissa - kind.mantissa
    payload = payload << shift if shift > 0 else payload >> -shift
    sign = target.sign if bits & kind.sign else 0
    return sign | target.largest + 1 | 1 << target.mantissa - 1 | payload


def expected(
    operation: str,
    rows: list[tuple[int, ...]],
    kinds: tuple[Kind, ...],
    target: Kind,
    mode: str = "rn",
    ftz: bool = False,
    **flags: bool,
) -> list[int]:
    """The result's bits for each row of source bits. flags: sat, relu."""
    results = []
    for row in rows:
        numbers = [decode(bits, kind) for bits, kind in zip(row, kinds, strict=True)]
        if ftz:
            numbers = [flushed(n, kind) for n, kind in zip(numbers, kinds, strict=True)]
        order = NAN_ORDER.get(operation, (1, 0)) if target is F64 else ()
        nans = [row[k] for k in order if is_nan(row[k], F64)]
        if nans:
            results.append(quiet(nans[0], F64, F64))
            continue
        number = operate(operation, numbers, down=mode == "rm")
        results.append(encode(number, target, mode, ftz, **flags))
    return results


def ordered(bits: int, kind: Kind) -> int | None:
    """A key that orders encoded numbers, -0 before +0; None for NaN."""
    magnitude = bits & (kind.sign - 1)
    if magnitude > kind.largest + 1:
        return None
    return -magnitude - 1 if bits & kind.sign else magnitude


def extreme(
    name: str, row: tuple[int, ...], kind: Kind, nan: str = "", ftz: str = "", mark: str = ""
) -> int | None:
    """min or max by the manual's definition. nan, ftz, mark: the modifiers, "" where absent."""
    values = [bits & kind.sign if ftz and not bits & kind.largest + 1 else bits for bits in row]
    sign = (values[0] ^ values[1]) & kind.sign if "xorsign" in mark else 0
    if mark:
        values = [bits & (kind.sign - 1) for bits in values]
    keys = {bits: ordered(bits, kind) for bits in values}
    numbers = [bits for bits in values if keys[bits] is not None]
    if not numbers and kind is F64:
        return quiet(row[-1], F64, F64)
    if not numbers or (nan and len(numbers) < len(values)):
        return kind.nan
    return (min if name == "min" else max)(numbers, key=keys.__getitem__) | sign
