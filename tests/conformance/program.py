"""A foreign kernel with its inputs, ready to run, and the judge of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Arrays = Mapping[str, np.ndarray]


class Verdict(NamedTuple):
    """max_error: the largest absolute error of all outputs. share: the worst error as a fraction
    of what is allowed; at most 1 if everything is right."""

    max_error: float
    share: float


class Program(NamedTuple):
    """run: called inside `emulate()` with its session; compiles when called first, and returns the
    outputs by name. judge: compares them with NumPy."""

    run: Callable[[Any], Arrays]
    judge: Callable[[Arrays], Verdict]


def compare(found: Arrays, exact: Arrays, plain: Arrays) -> Verdict:
    """Twice the error of the plain computation is allowed.

    exact: in float64. plain: the same computed and rounded as simply as the formats allow. Where
    that is exact too, so must be what was found. NaN is never right.
    """
    worst = Verdict(0.0, 0.0)
    assert found.keys() == exact.keys() == plain.keys()
    for name, wanted in exact.items():
        value = found[name].astype(np.float64)
        assert value.shape == wanted.shape, (name, value.shape, wanted.shape)
        error = float(np.abs(value - wanted).max())
        allowed = 2 * float(np.abs(plain[name].astype(np.float64) - wanted).max())
        share = 0.0 if error == 0 else (error / allowed if allowed else np.inf)
        if not np.isfinite(error):
            share = np.inf
        worst = Verdict(max(worst.max_error, error), max(worst.share, share))
    return worst


def exactly(expected: Arrays) -> Callable[[Arrays], Verdict]:
    """The judge of outputs that must be exact."""
    return lambda found: compare(found, expected, expected)


# NumPy types by the name that CuTe-DSL and torch's types have in common.
NUMPY_TYPES: dict[str, Any] = {
    "Float32": np.float32,
    "Float16": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Float8E4M3FN": ml_dtypes.float8_e4m3fn,
    "Float8E5M2": ml_dtypes.float8_e5m2,
}


def tensor_of(array: np.ndarray) -> Any:
    """A torch tensor with a copy of the array, the dimensions in the same order in memory."""
    import torch

    from fa4.call.arrays import like

    order = list(range(array.ndim))
    if not array.flags.c_contiguous:
        order.sort(key=lambda axis: -array.strides[axis])
    packed = np.array(array.transpose(order), order="C")
    # Cloned for torch's alignment of 64 bytes, which is more than NumPy's.
    return like(torch.empty(0), packed).clone().permute(*np.argsort(order).tolist())


def array_of(tensor: Any) -> np.ndarray:
    """A copy of a tensor's values in float32."""
    return np.array(tensor.detach().float().numpy())


def integers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Integers from -2 to 2: exact in every format, and so are sums of their products."""
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return values.astype(np.float32).astype(NUMPY_TYPES[dtype])


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY_TYPES[dtype])
