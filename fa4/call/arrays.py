"""Arrays and numbers as callers pass them: NumPy, torch, or what has `__dlpack__` or `__array__`.

The reference computes on NumPy arrays; bf16 and FP8 use ml_dtypes. What goes in comes out: results
are torch tensors on the input's device when q was a torch tensor.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np

from fa4.dtypes import dtype_name

# torch types without a NumPy counterpart: reinterpreted through an integer of the same width.
_TORCH_BITS = {
    "bfloat16": ("uint16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}

_TORCH_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip


class Array(Protocol):
    """What callers hand over: NumPy arrays, torch tensors, and what else speaks DLPack."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """A capsule over the same memory."""


ArrayT = TypeVar("ArrayT", bound=Array)  # what goes in comes out


def is_torch(value: Any) -> bool:
    """Is this a torch tensor? Never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def element_type(tensor: Any) -> str:
    """ "bf16", "fp16", ... of a torch tensor or an array; TypeError for another type."""
    if not is_torch(tensor):
        return dtype_name(tensor.dtype)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH_TYPES:
        raise TypeError(f"dtype must be one of {', '.join(_TORCH_TYPES.values())}; got {name}")
    return _TORCH_TYPES[name]


def to_numpy(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array, without a copy where possible.

    Raises TypeError naming the argument if it is no array.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        return _from_torch(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(f"{name} cannot be read through DLPack: {error}") from error
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise TypeError(
        f"{name} must be a NumPy array, a torch tensor or have __dlpack__; "
        f"got {type(value).__name__}"
    )


def _from_torch(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _TORCH_BITS:
        return tensor.numpy()
    bits, dtype = _TORCH_BITS[kind]
    return tensor.contiguous().view(getattr(torch, bits)).numpy().view(dtype)


def like(template: Any, array: np.ndarray) -> Any:
    """`array` as a torch tensor on the template's device if the template is one, else as it is."""
    if not is_torch(template):
        return array
    import torch

    for kind, (bits, dtype) in _TORCH_BITS.items():
        if array.dtype == dtype:
            raw = torch.from_numpy(np.ascontiguousarray(array).view(bits))
            return raw.view(getattr(torch, kind)).to(template.device)
    return torch.from_numpy(np.ascontiguousarray(array)).to(template.device)


def as_bool(name: str, value: Any) -> bool:
    """True or False; TypeError naming the argument for anything else."""
    if value is True or value is False:
        return value is True
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False; got {value!r}")


def as_float(name: str, value: Any) -> float:
    """A number, of whatever type can be one; TypeError naming the argument otherwise."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number; got {value!r}") from None


def as_int(name: str, value: Any) -> int:
    """Python and NumPy integers and 0-d integer tensors, but not bools."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r}") from None
