"""Arrays that lie in memory as callers leave them, beyond what a `Case` says.

Each takes the inputs of a case and gives them back with the same values in other memory. (The one
that makes `dout` a single number, as `out.sum()` does in autograd, changes values too.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs

SLACK_ROWS = 3
PADDED_BY = 8  # elements: rows stay at multiples of 16 bytes


def _with_heads_outside(x: np.ndarray) -> np.ndarray:
    """A view like x (..., S, H, D) of a buffer (..., H, S, D)."""
    return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)


def transpose_dout(inputs: Inputs) -> Inputs:
    """dO is a view of (batch, heads, seqlen, head_dim), as autograd hands it on."""
    return replace(inputs, dout=_with_heads_outside(inputs.dout))


def expand_dout(inputs: Inputs) -> Inputs:
    """dO is one number seen everywhere, all strides 0: the gradient of `out.sum()`."""
    one = np.ones((), inputs.dout.dtype)
    sequences = tuple(
        seq._replace(dout=np.ones(seq.dout.shape, one.dtype)) for seq in inputs.sequences
    )
    return replace(inputs, dout=np.broadcast_to(one, inputs.dout.shape), sequences=sequences)


def add_slack(inputs: Inputs) -> Inputs:
    """Packed buffers are longer than the last sequence's end, with NaN behind it."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.full((SLACK_ROWS, *x.shape[1:]), np.nan, x.dtype)])

    q, k, v, dout = map(longer, (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = np.pad(inputs.dlse, ((0, 0), (0, SLACK_ROWS)))
    return replace(inputs, q=q, k=k, v=v, dout=dout, dlse=dlse)


def expand_batch(inputs: Inputs) -> Inputs:
    """A batch of one with stride 0, as an expanded or reinterpreted tensor has it; rows lie apart,
    so that nobody takes it for contiguous."""

    def expanded(x: np.ndarray) -> np.ndarray:
        if len(x) != 1:
            return x
        *rows, dim = x.shape
        wide = np.full((*rows, dim + PADDED_BY), np.nan, x.dtype)
        wide[..., :dim] = x
        return np.ndarray(x.shape, x.dtype, wide, strides=(0, *wide.strides[1:]))

    return replace(inputs, q=expanded(inputs.q), k=expanded(inputs.k), v=expanded(inputs.v))


def stride_lse(saved: Outputs) -> Outputs:
    """The LSE that the backward pass gets is every second column of a buffer, if there is one."""
    if saved.lse is None:
        return saved
    wide = np.repeat(saved.lse, 2, axis=-1)
    wide[..., 1::2] = 0
    return replace(saved, lse=wide[..., ::2])


ARRANGEMENTS: dict[str, Callable[[Inputs], Inputs]] = {
    "": lambda inputs: inputs,
    "transposed dO": transpose_dout,
    "expanded dO": expand_dout,
    "slack behind the last sequence": add_slack,
    "batch of stride 0": expand_batch,
}
SAVED_ARRANGEMENTS: dict[str, Callable[[Outputs], Outputs]] = {"strided LSE": stride_lse}


def arrange_inputs(name: str, inputs: Inputs) -> Inputs:
    """Inputs in an arrangement."""
    return inputs if name in SAVED_ARRANGEMENTS else ARRANGEMENTS[name](inputs)


def arrange_saved(name: str, saved: Outputs) -> Outputs:
    """Results of a forward call as an arrangement gives them to the backward pass."""
    return SAVED_ARRANGEMENTS[name](saved) if name in SAVED_ARRANGEMENTS else saved
