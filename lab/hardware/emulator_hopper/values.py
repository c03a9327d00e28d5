"""Operand values: the same on every machine and NumPy, half of them where instructions go wrong.

Arrays hold bit patterns (uint8 to uint64). Randomness is SplitMix64, which depends on no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
COUNT = 1 << 16  # values of one form, unless a program says otherwise

# Shift amounts and field lengths around the widths, besides the ends of every type's range.
_SMALL = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 255, 256, 257)
_PATTERNS = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 0x5555555555555555)


def random_words(count: int, seed: int) -> Array:
    """SplitMix64: (count,) uint64."""
    state = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    z = state * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def below(count: int, limit: int, seed: int) -> Array:
    """(count,) int64 in [0, limit)."""
    return (random_words(count, seed) % np.uint64(limit)).astype(np.int64)


def chosen(values: Sequence[int], count: int, seed: int) -> Array:
    """(count,) uint64, each one of `values`."""
    return np.array(values, np.uint64)[below(count, len(values), seed)]


@cache
def integers(width: int, seed: int, count: int = COUNT) -> Array:
    """Half the values at the ends of ranges, a quarter any, a quarter of any magnitude."""
    top = 1 << (width - 1)
    ends = (2 * top - 1, 2 * top - 2, top, top - 1, top + 1)
    corners = sorted({v % (2 * top) for v in (*_SMALL, *ends, *_PATTERNS)})
    anything = random_words(count, 4 * seed)
    small = anything >> (random_words(count, 4 * seed + 1) % np.uint64(64))
    kind = below(count, 4, 4 * seed + 2)
    values = np.where(kind == 2, anything, small)
    values = np.where(kind < 2, chosen(corners, count, 4 * seed + 3), values)
    return (values & np.uint64(2 * top - 1)).astype(UNSIGNED[width])


@dataclass(frozen=True)
class Format:
    """A floating-point format with infinities."""

    name: str
    exponent: int
    mantissa: int

    @property
    def width(self) -> int:
        """Bits of a number."""
        return 1 + self.exponent + self.mantissa

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.width - 1)

    @property
    def bias(self) -> int:
        """The exponent field of one."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def specials(self) -> list[int]:
        """Zeros, ends of the subnormals and normals, one and its neighbours, infinities, NaNs."""
        one, normal = self.bias << self.mantissa, 1 << self.mantissa
        infinity = self.sign - normal
        positive = [0, 1, 2, normal - 1, normal, normal + 1, one - 1, one, one + 1, one + normal]
        positive += [one + normal // 2, one - normal, infinity - 2, infinity - 1, infinity]
        positive += [infinity + 1, infinity + normal // 2, self.sign - 1]
        return [bits | sign for bits in positive for sign in (0, self.sign)]


F16, BF16 = Format("f16", 5, 10), Format("bf16", 8, 7)
F32, F64 = Format("f32", 8, 23), Format("f64", 11, 52)
FORMATS = {form.name: form for form in (F16, BF16, F32, F64)}
WIDE = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def to_double(bits: Array, form: Format) -> Array:
    """The numbers that bit patterns stand for."""
    if form is BF16:
        bits, form = bits.astype(np.uint32) << np.uint32(16), F32
    with np.errstate(all="ignore"):
        return bits.astype(UNSIGNED[form.width]).view(WIDE[form.name]).astype(np.float64)


def from_double(values: Array, form: Format) -> Array:
    """Bit patterns (uint64) near the numbers; rounding does not matter here."""
    with np.errstate(all="ignore"):
        if form is BF16:
            return values.astype(np.float32).view(np.uint32).astype(np.uint64) >> np.uint64(16)
        return values.astype(WIDE[form.name]).view(UNSIGNED[form.width]).astype(np.uint64)


def _fields(form: Format, exponent: Array, mantissa: Array, seed: int) -> Array:
    """Numbers from biased exponents (clipped to the normal ones) and mantissas, any sign."""
    field = np.clip(exponent, 0, (1 << form.exponent) - 2).astype(np.uint64)
    kept = mantissa & np.uint64((1 << form.mantissa) - 1)
    signs = (random_words(len(kept), seed) & np.uint64(1)) << np.uint64(form.width - 1)
    return signs | field << np.uint64(form.mantissa) | kept


def _few_bits(form: Format, count: int, seed: int) -> Array:
    """Mantissas with a short head and a last bit: exact results, ties, and next to ties."""
    head = random_words(count, seed) & np.uint64(15)
    shift = below(count, form.mantissa + 1, seed + 1).astype(np.uint64)
    return head << shift | (random_words(count, seed + 2) & np.uint64(1))


@cache
def floats(form: Format, sources: int, seed: int, count: int = COUNT) -> tuple[Array, ...]:
    """Sources of one instruction, `count` each: special values in all of them or in one; any bits;
    few bits near one; products at the ends of the range; sums that nearly cancel."""
    kind = below(count, 8, seed << 8)
    columns: list[Array] = []
    for k in range(sources):
        at = (seed << 8) + 16 * (k + 1)
        special = chosen(form.specials, count, at)
        anything = random_words(count, at + 1) & np.uint64(2 * form.sign - 1)
        near = form.bias + below(count, 61, at + 2) - 30
        few = _fields(form, near, _few_bits(form, count, at + 3), at + 6)
        column = np.where(kind == 0, special, anything)
        column = np.where((kind == 1) & (below(count, 2, at + 7) == 0), special, column)
        column = np.where((kind == 3) | (kind == 4), few, column)
        if k == 1:
            column = np.where(kind >= 6, _edge_factor(form, columns[0], kind, at + 8), column)
        if k and k == sources - 1:
            near_sum = _cancelling(form, columns if sources > 2 else columns[:1], at + 12)
            column = np.where((kind == 4) | (kind == 5), near_sum, column)
        columns.append(column)
    return tuple(column.astype(UNSIGNED[form.width]) for column in columns)


def _edge_factor(form: Format, first: Array, kind: Array, seed: int) -> Array:
    """Factors that bring the product near the smallest (kind 6) or the largest numbers."""
    count = len(first)
    exponent = (first >> np.uint64(form.mantissa)).astype(np.int64) & ((1 << form.exponent) - 1)
    wobble = below(count, form.mantissa + 4, seed)
    low = 1 + form.bias - exponent - wobble + 2
    high = 3 * form.bias - exponent - (wobble & 3) + 2
    mantissa = random_words(count, seed + 1)
    return _fields(form, np.where(kind == 6, low, high), mantissa, seed + 2)


def _cancelling(form: Format, factors: list[Array], seed: int) -> Array:
    """Minus the product of the factors, up to two units in the last place off."""
    with np.errstate(all="ignore"):
        product = -to_double(factors[0].astype(UNSIGNED[form.width]), form)
        for factor in factors[1:]:
            product = product * to_double(factor.astype(UNSIGNED[form.width]), form)
    off = below(len(product), 5, seed).astype(np.uint64) - np.uint64(2)
    return (from_double(product, form) + off) & np.uint64(2 * form.sign - 1)


def packed(low: Array, high: Array) -> Array:
    """Two 16-bit values in one register."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


@cache
def sources(kind: str, number: int, seed: int = 1) -> tuple[Array, ...]:
    """`number` arrays of a PTX type: integers or bits ("b32"), floats, or pairs ("f16x2")."""
    if kind.endswith("x2"):
        halves = [floats(FORMATS[kind[:-2]], number, s) for s in (seed, seed + 1)]
        return tuple(packed(low, high) for low, high in zip(*halves, strict=True))
    if kind in FORMATS:
        return floats(FORMATS[kind], number, seed)
    return tuple(integers(int(kind[1:]), 10 * seed + k) for k in range(number))


@cache
def convertible(form: Format, seed: int = 3) -> Array:
    """Numbers to convert: a half as `floats`, a quarter around the ends of integer types and
    halfway between integers, a quarter with all exponents of integers."""
    values = floats(form, 1, seed)[0].astype(np.uint64)
    count = len(values)
    power = np.ldexp(1.0, below(count, 68, seed + 900) - 1)
    offset = (below(count, 13, seed + 901) - 6) / 4
    sign = np.where(below(count, 2, seed + 902) == 0, 1.0, -1.0)
    boundary = from_double(sign * (power + offset), form)
    wobble = below(count, 3, seed + 903).astype(np.uint64) - np.uint64(1)
    boundary = (boundary + wobble) & np.uint64(2 * form.sign - 1)
    exponent = form.bias + below(count, 70, seed + 904) - 3
    spread = _fields(form, exponent, random_words(count, seed + 905), seed + 906)
    kind = below(count, 4, seed + 907)
    values = np.where(kind == 2, boundary, np.where(kind == 3, spread, values))
    return values.astype(UNSIGNED[form.width])
