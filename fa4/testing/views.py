"""How the arrays of a call lie in memory: parts of one buffer, other orders of axes, strides of 0.

Elements stay the same; only strides change, and what lies between the rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fa4.testing.case import Case
from fa4.testing.inputs import Inputs


def with_strides(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with the strides that the case asks for."""
    if case.strided:
        inputs = _padded_rows(case.strided, inputs)
    if case.strides == "fused":
        return _fused(inputs)
    if case.strides == "heads_first":
        arrays: dict[str, Any] = {
            name: _heads_first(getattr(inputs, name)) for name in ("q", "k", "v", "dout")
        }
        return replace(inputs, **arrays)
    if case.strides == "expanded_kv":
        return replace(inputs, k=_one_head(inputs.k), v=_one_head(inputs.v))
    if case.strides == "expanded_dout":
        one = np.ones(1, inputs.dout.dtype)
        steps = (0,) * inputs.dout.ndim
        return replace(inputs, dout=np.ndarray(inputs.dout.shape, one.dtype, one, 0, steps))
    if case.strides == "latent":
        return replace(inputs, v=inputs.k[..., : inputs.v.shape[-1]])
    return inputs


def _padded_rows(extra: int, inputs: Inputs) -> Inputs:
    """k and v of one buffer fused along the heads, q alone; rows longer than they need be."""
    *rows, heads, dim = inputs.k.shape
    width = max(dim, inputs.v.shape[-1]) + extra
    fused = np.full((*rows, 2 * heads, width), np.nan, inputs.k.dtype)
    fused[..., :heads, :dim] = inputs.k
    fused[..., heads:, : inputs.v.shape[-1]] = inputs.v
    padded = np.full((*inputs.q.shape[:-1], dim + extra), np.nan, inputs.q.dtype)
    padded[..., :dim] = inputs.q
    k, v = fused[..., :heads, :dim], fused[..., heads:, : inputs.v.shape[-1]]
    return replace(inputs, q=padded[..., :dim], k=k, v=v)


def _fused(inputs: Inputs) -> Inputs:
    """q, k, v of one buffer along the heads, as one linear layer gives them; q alone if it has
    other rows. Where head dims differ, the shorter rows are padded."""
    names = ["q", "k", "v"] if inputs.q.shape[:-2] == inputs.k.shape[:-2] else ["k", "v"]
    arrays = [getattr(inputs, name) for name in names]
    width = max(x.shape[-1] for x in arrays)
    heads = sum(x.shape[-2] for x in arrays)
    buffer = np.full((*arrays[0].shape[:-2], heads, width), np.nan, arrays[0].dtype)
    start = 0
    views: dict[str, Any] = {}
    for name, x in zip(names, arrays, strict=True):
        views[name] = buffer[..., start : start + x.shape[-2], : x.shape[-1]]
        views[name][...] = x
        start += x.shape[-2]
    return replace(inputs, **views)


def _heads_first(x: np.ndarray) -> np.ndarray:
    """(B, H, S, D) or (H, total, D) in memory."""
    return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def _one_head(x: np.ndarray) -> np.ndarray:
    """The first head for all, with a stride of 0."""
    first = x[..., :1, :].copy()
    steps = list(first.strides)
    steps[-2] = 0
    return np.ndarray(x.shape, x.dtype, first, 0, tuple(steps))
