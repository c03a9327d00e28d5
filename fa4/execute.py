"""A checked call on a backend: which one, and with which seed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fa4.arrays import is_torch
from fa4.backends import AttentionGradients, Saved, find_backend
from fa4.call import Call
from fa4.choose import choose

MOST_SEED = 2**31 - 1


class Computed(NamedTuple):
    """O, LSE, and the seed of what was dropped (None without dropout)."""

    out: Any
    lse: Any
    dropout_seed: int | None


def run_forward(call: Call, impl: str, *, lse: bool, gradient: bool) -> Computed:
    """The backend's forward pass, with a seed drawn if dropout needs one."""
    if call.dropout_p and call.dropout_seed is None:
        call = call._replace(dropout_seed=draw_seed(call))
    name = choose(call, gradient=gradient) if impl == "auto" else impl
    return Computed(*find_backend(name).forward(call, lse=lse), call.dropout_seed)


def run_backward(call: Call, saved: Saved, dout: Any, dlse: Any, impl: str) -> AttentionGradients:
    """The gradients of a call, by the implementation that computes it."""
    name = choose(call, gradient=True) if impl == "auto" else impl
    return find_backend(name).backward(call, saved, dout, dlse)


def draw_seed(call: Call) -> int:
    """A seed from the generator of the tensors' framework: torch's or NumPy's global one."""
    if is_torch(call.q):
        import torch

        return int(torch.randint(MOST_SEED, ()))
    return int(np.random.randint(MOST_SEED))  # noqa: NPY002 - np.random.seed is what users set
