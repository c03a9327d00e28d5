"""How Hopper's tensor core adds up the products of one instruction and the accumulator.

Measured on an H200, where hardware/wgmma_sums finds every output of every type to the bit:

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
from fa4.emulator.wgmma.forms import Form

Integers = npt.NDArray[np.int32]
_NOTHING = -(1 << 20)  # the exponent of zero


@dataclass(frozen=True)
class Layout:
    """A floating-point type: exponent bits, mantissa bits, bias; whether it has infinities."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinities: bool = True


LAYOUTS = {
    Format.F16: Layout(5, 10, 15),
    Format.BF16: Layout(8, 7, 127),
    Format.TF32: Layout(8, 10, 127),
    Format.E4M3: Layout(4, 3, 7, False),
    Format.E5M2: Layout(5, 2, 15),
    Format.F32: Layout(8, 23, 127),
}
# Bits kept below the largest exponent of the addends.
FRACTION_BITS = {
    Format.F16: 25,
    Format.BF16: 25,
    Format.TF32: 25,
    Format.E4M3: 13,
    Format.E5M2: 13,
}


def codes_of(element: Format, data: Bytes) -> npt.NDArray[np.int64]:
    """The codes of operand bytes, the last axis of which is K; tf32: the upper 19 bits."""
    if element is Format.TF32:
        return (data.view(np.uint32) >> np.uint32(13)).astype(np.int64)
    if element.container_bytes == 2:
        return data.view(np.uint16).astype(np.int64)
    return data.astype(np.int64)


class Parts(NamedTuple):
    """Numbers taken apart: significand 2^(exponent - mantissa_bits), and what is no number.

    special: 0 of finite values, else the infinity or NaN itself.
    """

    significand: Integers
    exponent: Integers
    special: npt.NDArray[np.float64]

    def values(self, mantissa_bits: int) -> npt.NDArray[np.float64]:
        """The numbers, which float64 holds exactly."""
        finite = np.ldexp(self.significand.astype(np.float64), self.exponent - mantissa_bits)
        return finite + self.special


def split(layout: Layout, codes: npt.NDArray[np.int64]) -> Parts:
    """Takes codes of a type apart."""
    mantissa = codes & ((1 << layout.mantissa_bits) - 1)
    top = (1 << layout.exponent_bits) - 1
    field = codes >> layout.mantissa_bits & top
    sign = 1 - 2 * (codes >> (layout.mantissa_bits + layout.exponent_bits) & 1)
    special = field == top
    if not layout.infinities:
        special &= mantissa == (1 << layout.mantissa_bits) - 1
    extreme = np.zeros(codes.shape)
    if special.any():
        infinite = special & (mantissa == 0) if layout.infinities else np.zeros_like(special)
        extreme[special] = np.nan
        extreme[infinite] = np.inf * sign[infinite]
    significand = np.where(field > 0, mantissa + (1 << layout.mantissa_bits), mantissa)
    significand = np.where(special, 0, significand)
    exponent = np.where(significand != 0, np.maximum(field, 1) - layout.bias, _NOTHING)
    return Parts((sign * significand).astype(np.int32), exponent.astype(np.int32), extreme)


@numba.njit(cache=True)
def _add(
    a: Any, a_exponent: Any, b: Any, b_exponent: Any, d: Any, d_exponent: Any,
    product_shift: int, d_shift: int, fraction_bits: int, out: Any,
) -> None:  # fmt: skip
    """out (m, n): sums as float64 that no rounding to float32 has touched yet.

    a (m, K), b (K, n) with exponents; d (m, n). The shifts align them to fraction_bits.
    """
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


def to_float32(values: npt.NDArray[np.float64], mantissa_bits: int) -> Words:
    """Words of float32: toward zero, with so many mantissa bits; beyond the largest, infinite."""
    with np.errstate(over="ignore", under="ignore"):
        nearest = values.astype(np.float32)
    words = nearest.view(np.uint32)
    words -= np.abs(nearest.astype(np.float64)) > np.abs(values)
    words[np.abs(values) >= 2.0**128] += 1
    words &= np.uint32(0xFFFFFFFF << (23 - mantissa_bits) & 0xFFFFFFFF)
    return words


def multiply(form: Form, a: Bytes, b: Bytes, d: Words | None) -> Words:
    """D (64, n) as bits: A (64, 32 bytes) times B (n, 32 bytes) plus d, None: no accumulator."""
    if form.is_integer:
        return _multiply_integers(form, a, b, d)
    layouts = [LAYOUTS[element] for element in (form.a, form.b, form.d)]
    codes = np.zeros((len(a), form.n), np.int64) if d is None else d.astype(np.int64)
    left = split(layouts[0], codes_of(form.a, a))
    right = split(layouts[1], codes_of(form.b, b))
    before = split(layouts[2], codes)
    if form.negate_a != form.negate_b:
        left = Parts(-left.significand, left.exponent, -left.special)
    bits = FRACTION_BITS[form.a]
    up = bits - layouts[0].mantissa_bits - layouts[1].mantissa_bits
    d_up = bits - layouts[2].mantissa_bits
    sums = np.empty(codes.shape)
    _add(
        left.significand, left.exponent,
        np.ascontiguousarray(right.significand.T), np.ascontiguousarray(right.exponent.T),
        before.significand, before.exponent, up, d_up, bits, sums,
    )  # fmt: skip
    words = _encode(form, sums)
    if any(part.special.any() for part in (left, right, before)):
        values = [
            part.values(layout.mantissa_bits)
            for part, layout in zip((left, right, before), layouts, strict=True)
        ]
        with np.errstate(invalid="ignore"):
            extreme = values[0] @ values[1].T + values[2]
        _place_extremes(form.d, extreme, words)
    return words


def _encode(form: Form, sums: npt.NDArray[np.float64]) -> Words:
    if form.d is Format.F16:
        with np.errstate(over="ignore"):
            words = sums.astype(np.float16).view(np.uint16).astype(np.uint32)
        words[words == 0x8000] = 0
    else:
        words = to_float32(sums, min(FRACTION_BITS[form.a], 23))
        words[words == 0x80000000] = 0
    return words


def _place_extremes(element: Format, sums: npt.NDArray[np.float64], words: Words) -> None:
    """Infinities and NaN, where the sum is none of the numbers."""
    nan = CANONICAL_NAN_F16 if element is Format.F16 else CANONICAL_NAN_F32
    infinity, sign_bit = (0x7C00, 15) if element is Format.F16 else (0x7F800000, 31)
    infinite = np.isinf(sums)
    words[infinite] = infinity | (sums[infinite] < 0).astype(np.uint32) << sign_bit
    words[np.isnan(sums)] = nan


def _multiply_integers(form: Form, a: Bytes, b: Bytes, d: Words | None) -> Words:
    types = {Format.S8: np.int8, Format.U8: np.uint8}
    left = a.view(types[form.a]).astype(np.float64)
    right = b.view(types[form.b]).astype(np.float64)
    exact = (left @ right.T).astype(np.int64)
    if d is not None:
        exact += np.ascontiguousarray(d).astype(np.uint32).view(np.int32)
    if form.saturate:
        exact = exact.clip(-(2**31), 2**31 - 1)
    return exact.astype(np.uint32)
