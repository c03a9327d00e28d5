"""A checked call, computed: the one way from the public functions to a backend.

Torch tensors take the operators of `fa4.call.torch_op` where autograd, a compiler or a mode has to
know of the call; plain ones and arrays go to the backend at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4.backends import AttentionGradients, Saved
from fa4.backends.saved import read_saved
from fa4.call.arrays import as_bool, is_torch
from fa4.call.call import Call
from fa4.call.choose import Computed, check_impl, run_backward, run_forward


class AttentionOutput(NamedTuple):
    """Result of a call with return_lse=True: O and LSE."""

    out: Any
    lse: Any


class DropoutOutput(AttentionOutput):
    """The same pair, with the seed that `flash_attn_backward` needs to drop the same again."""

    dropout_seed: int


def attend(call: Call, impl: str, *, return_lse: bool) -> Any:
    """O, or with return_lse an `AttentionOutput`, by an implementation."""
    check_impl(impl)
    lse = as_bool("return_lse", return_lse)
    result = _attend(call, impl, lse=lse)
    if not lse:
        return result.out
    if result.dropout_seed is None:
        return AttentionOutput(result.out, result.lse)
    output = DropoutOutput(result.out, result.lse)
    output.dropout_seed = result.dropout_seed
    return output


def _attend(call: Call, impl: str, *, lse: bool) -> Computed:
    if is_torch(call.q):
        from fa4.call import torch_op

        return torch_op.attend(call, impl, lse=lse)
    return run_forward(call, impl, lse=lse, gradient=False)


def differentiate(call: Call, saved: Saved, dout: Any, dlse: Any, impl: str) -> AttentionGradients:
    """Gradients from a forward pass that the user saved.

    Raises TypeError and ValueError for what is missing or not of the call, before anything runs.
    """
    check_impl(impl)
    if call.dropout_p and call.dropout_seed is None:
        raise ValueError("dropout_seed must be the forward call's, as dropout_p is given; got None")
    saved, dout, dlse = read_saved(call, saved, dout, dlse)
    return run_backward(call, saved, dout, dlse, impl)
