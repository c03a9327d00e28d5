"""Numbers and switches as callers write them, of Python, NumPy or torch."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


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
