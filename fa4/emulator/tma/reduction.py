"""Element-wise reductions of cp.reduce.async.bulk and its tensor form (PTX ISA 9.7.9.25.4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fa4.emulator.errors import EmulatorError

Elements = NDArray[Any]

DTYPES: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f32_ftz": np.float32,
    "f64": np.float64,
}

_ORDERED = frozenset({"u32", "s32", "u64", "s64", "f16", "bf16"})
_BITWISE = frozenset({"u32", "s32", "u64", "b32", "b64"})

# The combinations of the manual's tables for a destination in global memory, which include those
# for shared memory; bit operations on maps of integers. An H200 runs these and traps on the others.
SUPPORTED: dict[str, frozenset[str]] = {
    "add": frozenset({"u32", "s32", "u64", "f16", "bf16", "f32", "f32_ftz", "f64"}),
    "min": _ORDERED,
    "max": _ORDERED,
    "inc": frozenset({"u32"}),
    "dec": frozenset({"u32"}),
    "and": _BITWISE,
    "or": _BITWISE,
    "xor": _BITWISE,
}


def reduce_bytes(
    op: str, element: str, destination: NDArray[np.uint8], source: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The bytes of the destination after `destination = destination op source`, a new array.

    op: a key of SUPPORTED. element: a PTX type or a TensorMap's element. destination, source:
    (n, unit_bytes), unit_bytes a multiple of the element. Each row is another place in memory: the
    caller gathers the rows, scatters the result, and must not name one place in two rows, or one
    of the two contributions would be lost. Raises EmulatorError for other combinations.
    """
    if element not in SUPPORTED.get(op, ()):
        raise EmulatorError(f"cp.reduce.async.bulk has no .{op} for .{element} elements")
    dtype = np.dtype(DTYPES[element])
    old = np.ascontiguousarray(destination).view(dtype)
    new = np.ascontiguousarray(source).view(dtype)
    with np.errstate(all="ignore"):
        if element == "f32_ftz":
            result = _flush(_float_add(_flush(old), _flush(new)))
        elif dtype.kind in "iu":
            result = _INTEGER_OPERATIONS[op](old, new)
        else:
            result = _FLOAT_OPERATIONS[op](old, new)
    return result.astype(dtype, copy=False).view(np.uint8)


def _increment(old: Elements, limit: Elements) -> Elements:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: Elements, limit: Elements) -> Elements:
    return np.where((old == 0) | (old > limit), limit, old - 1)


def _float_add(old: Elements, new: Elements) -> Elements:
    """Rounds to nearest even, keeps subnormals. f64 passes NaNs on, the source's first.

    The manual says that add.f32 flushes subnormals; an H200 flushes them only in f32_ftz maps.
    """
    total = old + new
    if old.dtype == np.float64:
        total = np.where(np.isnan(total), -np.nan, total)
        total = np.where(np.isnan(old), old, total)
        return np.where(np.isnan(new), new, total)
    return _canonical(total)


def _flush(values: Elements) -> Elements:
    """Subnormals as zero of the same sign."""
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(values) < tiny, np.copysign(np.float32(0), values), values)


def _canonical(values: Elements) -> Elements:
    """Every NaN becomes the one NaN that 16-bit and 32-bit reductions write: 0x7fff..."""
    nan = np.array(-1, f"i{values.dtype.itemsize}").view(f"u{values.dtype.itemsize}") >> 1
    return np.where(np.isnan(values), nan.view(values.dtype), values)


def _minimum(old: Elements, new: Elements) -> Elements:
    return _pick(old, new, _order(old) <= _order(new))


def _maximum(old: Elements, new: Elements) -> Elements:
    return _pick(old, new, _order(old) >= _order(new))


def _order(values: Elements) -> Elements:
    """16-bit floats as integers in the same order, -0 below +0."""
    bits = values.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


def _pick(old: Elements, new: Elements, first: Elements) -> Elements:
    """A number wins over a NaN."""
    return _canonical(np.where(np.isnan(new) | (first & ~np.isnan(old)), old, new))


_INTEGER_OPERATIONS: dict[str, Callable[[Elements, Elements], Elements]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": _increment,
    "dec": _decrement,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_FLOAT_OPERATIONS = {"add": _float_add, "min": _minimum, "max": _maximum}
