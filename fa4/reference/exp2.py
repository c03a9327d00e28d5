"""2^x as the softmax warps compute it: a polynomial on the FMA units, or the MUFU unit.

A Blackwell SM has far more FMA than MUFU throughput, so FlashAttention-4 evaluates part of each
row's exponentials in software (Cody-Waite range reduction, then a polynomial; the FlashAttention-4
paper, arXiv 2603.05451). The functions here reproduce that instruction by instruction, bit for bit,
for every float32 input. All float arrays are float32; a NaN that arithmetic produces has the bits
NVIDIA GPUs give it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fa4.config import Exp2Split

Float32 = NDArray[np.float32]

# degree -> (c1, c2, ...) of p(f) = 1 + c1 f + c2 f^2 + ..., all exact in float32. Source: the
# flash_attn.cute package, which obtained them with Sollya's fpminimax (relative error, [0, 1]).
COEFFICIENTS: dict[int, tuple[float, ...]] = {
    1: (0.922497093677520751953125,),
    2: (0.6657850742340087890625, 0.330107033252716064453125),
    3: (
        0.695146143436431884765625,
        0.227564394474029541015625,
        0.077119089663028717041015625,
    ),
    4: (
        0.693042695522308349609375,
        0.2412912547588348388671875,
        0.052225358784198760986328125,
        0.013434938155114650726318359375,
    ),
    5: (
        0.693151414394378662109375,
        0.24016360938549041748046875,
        0.055802188813686370849609375,
        0.00901452265679836273193359375,
        0.00186810153536498546600341796875,
    ),
}

# 2^23 + 2^22: a float32 of this size has spacing 1, so adding it leaves floor(x) in the low bits.
ROUNDING_MAGIC = np.float32(12582912.0)
CLAMP = np.float32(-127.0)  # 2^-127 is where the exponent field of the result reaches 0
MANTISSA_BITS = np.uint32(23)
CANONICAL_NAN = np.uint32(0x7FFFFFFF)  # PTX ISA, "Floating Point Instructions": NaN results
LEAST_NORMAL = np.float32(2.0**-126)

# ex2.approx.ftz.f32 on an H200 against exp2_mufu over all 2^32 inputs (docs/notes, 2026-11-21,
# lab/hardware/h200_exp2.py): 95.6% equal, 1.9% one ulp high, 2.5% one ulp low, and 0.023% two ulp
# low, these for results just below a power of two.
MUFU_MAX_ULP = 2

# float64 has 29 mantissa bits more than float32; these read 100...0 exactly on float32's ties.
_EXTRA_BITS = np.uint64((1 << 29) - 1)
_TIE = np.uint64(1 << 28)
# Elements worked on at a time: the float64 temporaries of a chunk stay in a core's L2 cache.
_CHUNK = 1 << 15


def _float32(name: str, x: ArrayLike) -> Float32:
    """`x` as an array; TypeError unless its elements are float32 already."""
    array: NDArray[Any] = np.asarray(x)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32; got {array.dtype.name}")
    return array


def _canonical_nan(x: Float32) -> Float32:
    """Overwrite, in place, every NaN of `x` with the one NVIDIA GPUs produce."""
    nan = np.isnan(x)
    if nan.any():
        x.view(np.uint32)[nan] = CANONICAL_NAN
    return x


def _two_sum_error(
    a: NDArray[np.float64], b: NDArray[np.float64], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """a + b - total exactly, for total = RN(a + b) (Knuth's TwoSum); NaN if not finite."""
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def fma_f32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Float32:
    """a * b + c with one rounding to nearest even: PTX fma.rn.f32, for all float32 inputs.

    Arrays broadcast. Subnormals are kept; NaN results are canonical. TypeError unless float32.

    The float64 product of two float32 is exact and rounding the float64 sum again is harmless,
    except where that sum lies on a tie of float32 or its result is subnormal. Those few elements
    are rounded to odd in between, which makes the second rounding see which way to go.
    """
    a, b, c = _float32("a", a), _float32("b", b), _float32("c", c)
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.atleast_1d(np.add(product, c, dtype=np.float64))
        result = total.astype(np.float32)
        suspect = (total.view(np.uint64) & _EXTRA_BITS) == _TIE
        suspect |= np.abs(result) <= LEAST_NORMAL
        if suspect.any():
            product = np.broadcast_to(product, total.shape)[suspect]
            addend = np.broadcast_to(c, total.shape)[suspect].astype(np.float64)
            result[suspect] = _round_to_odd_sum(product, addend).astype(np.float32)
    return _canonical_nan(result).reshape(shape)


def _round_to_odd_sum(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b in float64: truncated, with the last bit set where that was inexact; a, b finite."""
    total = a + b
    error = _two_sum_error(a, b, total)
    bits = total.view(np.int64)
    even_and_inexact = (error != 0.0) & ((bits & 1) == 0)
    # One step in magnitude, towards the exact sum; an odd neighbour already says "inexact".
    step = np.where((error > 0.0) == (total > 0.0), 1, -1)
    bits += np.where(even_and_inexact, step, 0)
    return total


def add_rm_f32(a: ArrayLike, b: ArrayLike) -> Float32:
    """a + b rounded towards -inf, subnormals read and written as zero: PTX add.rm.ftz.f32.

    Arrays broadcast; NaN results are canonical. An exact zero is -0 unless both terms are +0, as
    IEEE 754 section 6.3 has it for this rounding. TypeError unless float32.
    """
    a, b = (_flush(_float32(name, x)) for name, x in (("a", a), ("b", b)))
    shape = np.broadcast_shapes(a.shape, b.shape)
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    with np.errstate(all="ignore"):
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        total = wide_a + wide_b
        result = total.astype(np.float32)
        error = _two_sum_error(wide_a, wide_b, total)
        above = (result > total) | ((result == total) & (error < 0.0))
        result = np.where(above, np.nextafter(result, np.float32(-np.inf)), result)
    zero = total == 0.0
    if zero.any():
        result[zero & (np.signbit(a) | np.signbit(b))] = -0.0
    return _canonical_nan(_flush(result)).reshape(shape)


def _flush(x: Float32) -> Float32:
    """A copy of `x` with subnormals replaced by zeros of their sign (the .ftz of PTX)."""
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0.0), x), x)


def exp2_polynomial(x: ArrayLike, degree: int = 3) -> Float32:
    """Software 2^x for a float32 array of any shape, bit for bit as the kernel computes it.

    For each element: x = max.f32(x, -127); r = add.rm.ftz.f32(x, 12582912); fl = r - 12582912;
    f = x - fl; p = Horner in f by fma.rn.f32; bits = (bits(r) << 23) + bits(p) modulo 2^32. Whether
    the subtractions and FMAs flush subnormals as well changes no result.

    Useful for x < 128. Below -126 the exponent field is 0, so the result is 2^-126 (p(f) - 1),
    which falls to +0 at -127 and stays there; NaN gives +0 too, because max.f32 drops it. For
    -2^-25 <= x < 0, f rounds to 1 and the result is p(1) / 2, except that subnormals give 1.

    Outside: 128 gives +inf and the rest of (128, 129) NaN patterns; from 129 on the exponent runs
    into the sign bit and then wraps around, which yields meaningless numbers, not infinities (129
    gives -0, the largest finite value 0.5); +inf gives the canonical NaN.

    Raises TypeError unless `x` is float32, ValueError for a degree without coefficients.
    """
    x = _float32("x", x)
    if degree not in COEFFICIENTS:
        raise ValueError(f"degree must be one of {list(COEFFICIENTS)}; got {degree!r}")
    flat = x.ravel()
    result = np.empty_like(flat)
    for start in range(0, flat.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        result[chunk] = _exp2_chunk(flat[chunk], COEFFICIENTS[degree])
    return result.reshape(x.shape)


def _exp2_chunk(x: Float32, coefficients: tuple[float, ...]) -> Float32:
    """exp2_polynomial of a non-empty, one-dimensional chunk."""
    with np.errstate(all="ignore"):
        # max.f32 drops every NaN; np.fmax would let signalling ones pass on some platforms.
        clamped = np.where(x > CLAMP, x, CLAMP)
        # Below 2^22 the sum with the magic number has spacing 1, so floor gives the same.
        in_range = clamped.max() < 2.0**22
        rounded, fraction = (_split_by_floor if in_range else _split_by_magic)(clamped)
    power = np.broadcast_to(np.float32(coefficients[-1]), x.shape)
    for coefficient in (*coefficients[-2::-1], 1.0):
        power = fma_f32(power, fraction, np.float32(coefficient))
    bits = (rounded.view(np.uint32) << MANTISSA_BITS) + power.view(np.uint32)
    return bits.view(np.float32)


def _split_by_magic(x: Float32) -> tuple[Float32, Float32]:
    """(r, f) as the kernel finds them: r = RD(x + magic) holds floor(x), f = x - floor(x)."""
    rounded = add_rm_f32(x, ROUNDING_MAGIC)
    return rounded, x - (rounded - ROUNDING_MAGIC)


def _split_by_floor(x: Float32) -> tuple[Float32, Float32]:
    """The same as _split_by_magic, cheaper, for -127 <= x < 2^22."""
    floor = np.floor(x)
    fraction = x - floor
    if fraction.max() == 1.0:  # some x in [-2^-25, 0), perhaps subnormal: .ftz makes it -0
        floor[(x > -LEAST_NORMAL) & (x < 0.0)] = -0.0
        fraction = x - floor
    return floor + ROUNDING_MAGIC, fraction


def exp2_mufu(x: ArrayLike) -> Float32:
    """2^x as MUFU computes it, within MUFU_MAX_ULP: a model of PTX ex2.approx.ftz.f32.

    The model rounds the power to nearest through float64, which is right for all but two of the
    2^32 inputs (0x3B429D37 and 0xBCF3A937: closer to a tie than float64 can tell). Subnormal inputs
    count as zero and give 1; results below 2^-126 are +0; 128 and beyond give +inf; NaN gives the
    canonical NaN. float32 of any shape, TypeError otherwise.
    """
    x = _float32("x", x)
    with np.errstate(all="ignore"):
        # The bound changes no result and spares masked scores, -inf, NumPy's slow special case.
        wide = np.exp2(np.maximum(x, np.float32(-200.0)), dtype=np.float64)
        power = np.atleast_1d(wide).astype(np.float32)
        power = np.where(power < LEAST_NORMAL, np.float32(0.0), power)
    return _canonical_nan(power).reshape(x.shape)


@lru_cache(maxsize=256)
def _emulated_indices(split: Exp2Split, tile_n: int) -> NDArray[np.intp]:
    """Columns of a tile whose exponentials are emulated, ascending."""
    return np.flatnonzero(split.emulated_columns(tile_n))


def count_emulated(split: Exp2Split, tile_n: int, columns: int) -> int:
    """How many of the first columns of a tile that is tile_n wide the polynomial computes."""
    return int(np.searchsorted(_emulated_indices(split, tile_n), columns))


def exp2_split(x: ArrayLike, split: Exp2Split, tile_n: int, first_column: int = 0) -> Float32:
    """2^x with each column of a KV tile on the unit that `split` assigns to it.

    `x` is float32 (..., columns); x[..., j] sits in column first_column + j of a tile that is
    tile_n wide, so a tile clipped by the sequence's end passes its columns alone. Raises TypeError
    unless float32, ValueError if the columns do not fit into the tile.
    """
    x = _float32("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension; got a scalar")
    last_column = first_column + x.shape[-1]
    if first_column < 0 or last_column > tile_n:
        raise ValueError(
            f"columns must lie within a tile of {tile_n}; got {first_column} to {last_column}"
        )
    emulated = _emulated_indices(split, tile_n)
    columns = emulated[(emulated >= first_column) & (emulated < last_column)] - first_column
    power = exp2_mufu(x)
    if columns.size:
        power[..., columns] = exp2_polynomial(x[..., columns], split.degree)
    return power
