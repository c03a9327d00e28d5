"""Honest back ends that offer little, and what is no back end: what the kit must tell apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.calls import Call, make_attention

honest = make_attention(Call)
not_callable = 3


def minimal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """An honest back end with three parameters."""
    return honest(q, k, v)


def without_parameters() -> int:
    """Nothing that attention could be called with."""
    return 3


def refuses(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """Takes any keyword, offers only causal, and only equal head counts."""
    if set(options) - {"causal"}:
        raise NotImplementedError(f"no {sorted(options)}")
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("no grouped heads")
    return honest(q, k, v, **options)


def only_fp32(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """Refuses other element types."""
    if q.dtype != np.float32:
        raise TypeError(f"float32 only; got {q.dtype}")
    return honest(q, k, v, causal=causal)


def type_error_if_causal(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False
) -> np.ndarray:
    """A fault that looks like a refusal: a TypeError that has nothing to do with the type."""
    if causal:
        raise TypeError("'NoneType' object is not subscriptable")
    return honest(q, k, v)
