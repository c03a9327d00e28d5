"""Number formats: exact rounding to them, and distances measured in their spacing.

Every kernel model rounds its tiles here, and every numerical test counts its errors here. The
formats are the element types of the kernels plus float64: IEEE fp64, fp32 and fp16, bfloat16, and
the OCP FP8 pair e4m3 (no infinity; 0x7F is NaN) and e5m2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

FloatArray = NDArray[Any]


@dataclass(frozen=True)
class _Format:
    """A binary floating-point format: `precision` counts the hidden bit; its normal numbers have
    exponents from `least_exponent` to `most_exponent` (value in [1, 2) times 2^exponent)."""

    dtype: np.dtype[Any]
    precision: int
    least_exponent: int
    most_exponent: int
    largest: float


# Sources: IEEE 754-2019 table 3.5 (fp64, fp32, fp16); bfloat16 is the upper half of fp32;
# OCP 8-bit Floating Point Specification 1.0, table 1 (e4m3, e5m2).
_FORMATS = {
    "fp64": _Format(np.dtype(np.float64), 53, -1022, 1023, (2 - 2.0**-52) * 2.0**1023),
    "fp32": _Format(np.dtype(np.float32), 24, -126, 127, (2 - 2.0**-23) * 2.0**127),
    "bf16": _Format(np.dtype(ml_dtypes.bfloat16), 8, -126, 127, (2 - 2.0**-7) * 2.0**127),
    "fp16": _Format(np.dtype(np.float16), 11, -14, 15, 65504.0),
    "e4m3": _Format(np.dtype(ml_dtypes.float8_e4m3fn), 4, -6, 8, 448.0),
    "e5m2": _Format(np.dtype(ml_dtypes.float8_e5m2), 3, -14, 15, 57344.0),
}
_NAMES = {form.dtype: name for name, form in _FORMATS.items()}

_FIELDS = 1 << 11  # values of fp64's exponent field

# What ulp_distance answers for a NaN against a number.
MAX_ULP_DISTANCE = int(np.iinfo(np.int64).max)


def _format(name: str) -> _Format:
    """The format called `name`; ValueError for a name that is not in the list."""
    form = _FORMATS.get(name)
    if form is None:
        raise ValueError(f"dtype must be one of {list(_FORMATS)}; got {name!r}")
    return form


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds format `name`; ValueError for an unknown name."""
    return _format(name).dtype


def dtype_name(dtype_or_array: DTypeLike | FloatArray) -> str:
    """The format name of an array, scalar or dtype; TypeError for any other dtype."""
    if isinstance(dtype_or_array, (np.ndarray, np.generic)):
        dtype = dtype_or_array.dtype
    elif dtype_or_array is None:  # np.dtype(None) would be float64
        raise TypeError(f"dtype must be one of {list(_FORMATS)}; got None")
    else:
        dtype = np.dtype(dtype_or_array)
    name = _NAMES.get(dtype)
    if name is None and not dtype.isnative:
        raise TypeError(f"dtype must be in native byte order; got {dtype.str}")
    if name is None:
        raise TypeError(f"dtype must be one of {list(_FORMATS)}; got {dtype.name}")
    return name


def largest_finite(name: str) -> float:
    """The largest finite value of format `name`."""
    return _format(name).largest


def unit_roundoff(name: str) -> float:
    """The largest relative error of rounding a normal number to format `name`: 2^-precision."""
    return math.ldexp(1.0, -_format(name).precision)


def round_to(x: ArrayLike, name: str, *, saturate: bool = False) -> FloatArray:
    """Round each element of `x` once to format `name`, to nearest with ties to even.

    `x` holds any of the six formats (a Python float counts as fp64); the result has the same
    shape and the dtype numpy_dtype(name). Subnormal results are kept. Overflow gives an infinity,
    or NaN in e4m3, which has none. With `saturate`, whatever lies beyond the largest finite value,
    infinities included, becomes that value with its sign, as in PTX cvt.rn.satfinite. NaN stays
    NaN. Raises TypeError for other dtypes of `x`, ValueError for an unknown name.
    """
    form = _format(name)
    source = np.asarray(x)
    from_double = dtype_name(source) == "fp64"
    # Overflow and NaN are results here, not accidents.
    with np.errstate(all="ignore"):
        if not from_double:
            # Exact: fp32 contains every narrower format, and fp64 contains fp32.
            source = source.astype(np.float64 if name == "fp64" else np.float32, copy=False)
        if saturate:
            bound = source.dtype.type(form.largest)
            source = np.asarray(np.clip(source, -bound, bound))
        if from_double and form.precision < 24:
            source = _round_to_odd(source)
        return source.astype(form.dtype)


def _round_to_odd(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """fp64 to fp32, truncated, with the last bit set wherever that lost something.

    ml_dtypes converts fp64 through fp32, and rounding to nearest twice differs from doing it once
    where the first rounding lands on a tie of the second. A result rounded to odd never does, as
    fp32 carries at least two bits more than the narrow formats (Boldo and Melquiond, "Emulation of
    a FMA and Correctly Rounded Sums", 2008).
    """
    nearest = np.atleast_1d(x.astype(np.float32))
    wide = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(wide) > np.abs(x)
    bits |= wide != x  # NaN stays NaN
    return nearest.reshape(np.shape(x))


def ulp(x: ArrayLike, name: str) -> NDArray[np.float64]:
    """The spacing of format `name` at |x|, as float64, for any real `x` (it need not be rounded).

    A power of two takes the spacing above it. Below the normal range the spacing is the smallest
    subnormal, beyond the largest finite value that of the topmost binade. NaN where `x` is NaN or
    infinite.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is still just a NaN
        wide = np.ascontiguousarray(x).astype(np.float64, copy=False)
    fields = (wide.view(np.int64) >> 52) & (_FIELDS - 1)
    return np.asarray(_spacings(name)[fields]).reshape(np.shape(x))


@cache
def _spacings(name: str) -> NDArray[np.float64]:
    """`ulp` of numbers with each exponent field of fp64: 0 for subnormal ones, the last for NaN."""
    form = _format(name)
    exponent = np.clip(np.arange(_FIELDS) - 1023, form.least_exponent, form.most_exponent)
    spacing = np.ldexp(1.0, exponent - (form.precision - 1))
    spacing[-1] = np.nan
    return spacing


def ulp_distance(a: FloatArray, b: FloatArray) -> NDArray[np.int64]:
    """How many steps of their common format lie between `a` and `b`, elementwise (int64).

    Neighbouring representable values are 1 apart, +0 and -0 are 0 apart, and an infinity is one
    step beyond the largest finite value. Two NaNs are 0 apart; a NaN and a number, like fp64 values
    too far apart for the type, MAX_ULP_DISTANCE. Raises TypeError unless both have the same format.
    """
    a, b = np.asarray(a), np.asarray(b)
    if dtype_name(a) != dtype_name(b):
        raise TypeError(f"both arrays must have the same dtype; got {a.dtype} and {b.dtype}")
    (sign_a, steps_a), (sign_b, steps_b) = _steps_from_zero(a), _steps_from_zero(b)
    apart = np.maximum(steps_a, steps_b) - np.minimum(steps_a, steps_b)
    # In uint64 the sum cannot wrap: neither term reaches 2^63.
    distance = np.where(sign_a == sign_b, apart, steps_a + steps_b)
    distance = np.minimum(distance, np.uint64(MAX_ULP_DISTANCE)).astype(np.int64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        nan_a, nan_b = np.isnan(a), np.isnan(b)
    distance = np.where(nan_a | nan_b, np.int64(MAX_ULP_DISTANCE), distance)
    return np.where(nan_a & nan_b, np.int64(0), distance)


def _steps_from_zero(x: FloatArray) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """(sign bit, number of representable values between 0 and |x|): the fields of the encoding."""
    width = x.dtype.itemsize
    unsigned = np.dtype(f"u{width}")
    bits = np.ascontiguousarray(x).view(unsigned).reshape(x.shape).astype(np.uint64)
    top = np.uint64(1 << (8 * width - 1))
    return (bits & top) != 0, bits & (top - np.uint64(1))
