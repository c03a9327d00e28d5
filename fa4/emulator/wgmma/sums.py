"""How Hopper's tensor core adds up the products of one instruction and the accumulator.

Measured on an H200, where lab/hardware/wgmma_sums finds every output of every type to the bit:

- Products are exact. Their exponent is the sum of their factors' (so that the significand is from
  1 up to below 4), and subnormal factors and accumulators have that of the smallest normal number.
- All K products and the accumulator, in no order, are cut off toward zero at a fixed number of bits
  below the largest exponent among those that are not zero, and then added exactly: 25 bits; 13 for
  8-bit operands.
- f32 results are cut off toward zero, with 8-bit operands at 13 bits of mantissa; f16 results are
  rounded to nearest even. What exceeds the type becomes infinite.
- A zero is always +0, a NaN always the canonical one; otherwise infinities are as in IEEE 754.
- Integers are exact, and wrap around or saturate at the end.

wgmma and mma.sync agree for 16-bit types and tf32; whether operand A is in registers, and which N,
makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from fa4.emulator.tcgen05.formats import CANONICAL_NAN_F16, CANONICAL_NAN_F32, Format
from fa4.emulator.tcgen05.tmem import Bytes, Words
from fa4.emulator.wgmma.forms import ProductForm

Integers = npt.NDArray[np.int32]
_NOTHING = -(1 << 20)  # the exponent of zero


@dataclass(frozen=True)
class FloatLayout:
    """A floating-point type: exponent bits, mantissa bits, bias; whether it has infinities."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinities: bool = True


LAYOUTS = {
    Format.F16: FloatLayout(5, 10, 15),
    Format.BF16: FloatLayout(8, 7, 127),
    Format.TF32: FloatLayout(8, 10, 127),
    Format.E4M3: FloatLayout(4, 3, 7, False),
    Format.E5M2: FloatLayout(5, 2, 15),
    Format.F32: FloatLayout(8, 23, 127),
}
# Bits kept below the largest exponent of the addends.
FRACTION_BITS = {
    Format.F16: 25,
    Format.BF16: 25,
    Format.TF32: 25,
    Format.E4M3: 13,
    Format.E5M2: 13,
}


class Parts(NamedTuple):
    """Numbers taken apart: significand 2^(exponent - mantissa_bits), 0 for what is no number."""

    significand: Integers
    exponent: Integers
    has_special: bool


def codes_of(element: Format, data: Bytes) -> Words:
    """The codes of operand bytes, the last axis of which is K; tf32: the upper 19 bits."""
    if element is Format.TF32:
        return data.view(np.uint32) >> np.uint32(13)
    return data.view(np.uint16 if element.container_bytes == 2 else np.uint8).astype(np.uint32)


@numba.njit(cache=True)
def _take_apart(
    codes: Any, exponent_bits: int, mantissa_bits: int, infinities: bool,
    significand: Any, exponent: Any,
) -> bool:  # fmt: skip
    """Fills the parts of codes, all of one dimension. Returns whether one is no number."""
    ones, top = (1 << mantissa_bits) - 1, (1 << exponent_bits) - 1
    bias, found = top >> 1, 0
    for i in range(codes.size):
        code: Any = np.int32(codes[i] & np.uint32(0x7FFFFFFF))
        mantissa: Any = code & ones
        field: Any = code >> mantissa_bits & top
        special = field == top and (infinities or mantissa == ones)
        value: Any = 0 if special else mantissa | (min(field, 1) << mantissa_bits)
        found += special
        exponent[i] = max(field, 1) - bias if value else _NOTHING
        sign: Any = np.int32(codes[i] >> np.uint32(exponent_bits + mantissa_bits) & np.uint32(1))
        significand[i] = (value ^ -sign) + sign
    return found > 0


def split(layout: FloatLayout, codes: Words) -> Parts:
    """Takes codes of a type apart."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    significand, exponent = np.empty(flat.size, np.int32), np.empty(flat.size, np.int32)
    special = _take_apart(
        flat, layout.exponent_bits, layout.mantissa_bits, layout.infinities, significand, exponent
    )
    return Parts(significand.reshape(codes.shape), exponent.reshape(codes.shape), special)


def _values(layout: FloatLayout, codes: Words, parts: Parts) -> npt.NDArray[np.float64]:
    """The numbers, infinities and NaNs that codes stand for, which float64 holds exactly."""
    values = np.ldexp(parts.significand.astype(np.float64), parts.exponent - layout.mantissa_bits)
    ones, top = (1 << layout.mantissa_bits) - 1, (1 << layout.exponent_bits) - 1
    mantissa, special = codes & ones, codes >> layout.mantissa_bits & top == top
    if not layout.infinities:
        values[special & (mantissa == ones)] = np.nan
        return values
    values[special] = np.nan
    negative = codes >> (layout.mantissa_bits + layout.exponent_bits) & 1
    infinite = special & (mantissa == 0)
    values[infinite] = np.where(negative[infinite], -np.inf, np.inf)
    return values


@numba.njit(cache=True)
def _add(left: Any, right: Any, before: Any, bits: Any, out: Any) -> None:
    """out (m, n): sums as float64 that no rounding to float32 has touched yet.

    left (m, K), right (K, n), before (m, n): significands and exponents. bits: how far products and
    accumulators are shifted up, and how many bits then stand below the largest exponent.
    """
    a, a_exponent = left
    b, b_exponent = right
    d, d_exponent = before
    product_shift, d_shift, fraction_bits = bits
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    most = np.empty(columns, np.int32)
    total = np.empty(columns, np.int64)
    d_left, d_right = max(d_shift, 0), max(-d_shift, 0)
    for m in range(rows):
        for n in range(columns):
            most[n] = d_exponent[m, n]
        for k in range(depth):
            exponent = a_exponent[m, k]
            for n in range(columns):
                most[n] = max(most[n], exponent + b_exponent[k, n])
        for n in range(columns):
            shift = min(most[n] - d_exponent[m, n] + d_right, 62)
            value = np.int64(d[m, n])
            sign = value >> 63
            kept = (((value ^ sign) - sign) << d_left) >> shift
            total[n] = (kept ^ sign) - sign
        for k in range(depth):
            exponent, left = a_exponent[m, k], np.int64(a[m, k])
            for n in range(columns):
                shift = min(most[n] - exponent - b_exponent[k, n], 62)
                value = left * b[k, n]
                sign = value >> 63
                kept = (((value ^ sign) - sign) << product_shift) >> shift
                total[n] += (kept ^ sign) - sign
        for n in range(columns):
            if total[n] == 0:
                out[m, n] = 0.0
            else:
                out[m, n] = np.float64(total[n]) * 2.0 ** (most[n] - fraction_bits)


@numba.njit(cache=True)
def _cut_off(sums: Any, kept: int, words: Any) -> None:
    """float32 words of the bits of float64 sums (int64), toward zero. kept: mask of their bits."""
    for i in range(sums.size):
        bits = sums[i]
        exponent = (bits >> 52 & 0x7FF) - 1023 + 127
        mantissa = bits & ((1 << 52) - 1)
        word = exponent << 23 | mantissa >> 29
        if exponent >= 255:
            word = 0x7F800000
        elif exponent <= 0:
            word = (mantissa | 1 << 52) >> min(30 - exponent, 62)
        word &= kept
        if word:
            word |= (bits >> 32) & 0x80000000
        words[i] = word


def multiply(form: ProductForm, a: Bytes, b: Bytes, d: Words | None) -> Words:
    """D (m, n) as bits: A (m, bytes of K) times B (n, bytes of K) plus d, None: no accumulator."""
    if form.is_integer:
        return _multiply_integers(form, a, b, d)
    layouts = [LAYOUTS[element] for element in (form.a, form.b, form.d)]
    before = np.zeros((len(a), form.n), np.uint32) if d is None else d
    codes = [codes_of(form.a, a), codes_of(form.b, b), before]
    left, right, old = parts = [split(*each) for each in zip(layouts, codes, strict=True)]
    flip = -1 if form.negate_a != form.negate_b else 1
    fraction, sums = FRACTION_BITS[form.a], np.empty(before.shape)
    mantissas = [layout.mantissa_bits for layout in layouts]
    _add(
        (left.significand * np.int32(flip), left.exponent),
        (np.ascontiguousarray(right.significand.T), np.ascontiguousarray(right.exponent.T)),
        (old.significand, old.exponent),
        (fraction - mantissas[0] - mantissas[1], fraction - mantissas[2], fraction),
        sums,
    )
    words = _encode(form, sums)
    if any(part.has_special for part in parts):
        values = [_values(*each) for each in zip(layouts, codes, parts, strict=True)]
        with np.errstate(invalid="ignore"):
            _place_extremes(form.d, flip * values[0] @ values[1].T + values[2], words)
    return words


def _encode(form: ProductForm, sums: npt.NDArray[np.float64]) -> Words:
    if form.d is Format.F16:
        with np.errstate(over="ignore"):
            halves = sums.astype(np.float16).view(np.uint16).astype(np.uint32)
        halves[halves == 0x8000] = 0
        return halves
    words = np.empty(sums.size, np.uint32)
    dropped = 23 - min(FRACTION_BITS[form.a], 23)
    _cut_off(sums.reshape(-1).view(np.int64), -1 << dropped & 0x7FFFFFFF, words)
    return words.reshape(sums.shape)


def _place_extremes(element: Format, sums: npt.NDArray[np.float64], words: Words) -> None:
    """Infinities and NaN, where the sum is none of the numbers."""
    nan = CANONICAL_NAN_F16 if element is Format.F16 else CANONICAL_NAN_F32
    infinity, sign_bit = (0x7C00, 15) if element is Format.F16 else (0x7F800000, 31)
    infinite = np.isinf(sums)
    words[infinite] = infinity | (sums[infinite] < 0).astype(np.uint32) << sign_bit
    words[np.isnan(sums)] = nan


def _multiply_integers(form: ProductForm, a: Bytes, b: Bytes, d: Words | None) -> Words:
    types = {Format.S8: np.int8, Format.U8: np.uint8}
    left = a.view(types[form.a]).astype(np.float64)
    right = b.view(types[form.b]).astype(np.float64)
    exact = (left @ right.T).astype(np.int64)
    if d is not None:
        exact += np.ascontiguousarray(d).astype(np.uint32).view(np.int32)
    if form.saturate:
        exact = exact.clip(-(2**31), 2**31 - 1)
    return exact.astype(np.uint32)
