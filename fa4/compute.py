"""A checked call, computed: the one way from the public functions to a backend.

Torch tensors take the operators of `fa4.torch_op` where autograd, a compiler or a mode has to know
of the call; plain ones and arrays go to the backend at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4.arrays import as_bool, is_torch, to_numpy
from fa4.backends import AttentionGradients, Saved
from fa4.call import Call
from fa4.choose import Computed, check_impl, run_backward, run_forward


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
        from fa4 import torch_op

        if not torch_op.is_plain(call):
            return torch_op.attend(call, impl, lse=lse)
    return run_forward(call, impl, lse=lse, gradient=False)


def differentiate(call: Call, saved: Saved, dout: Any, dlse: Any, impl: str) -> AttentionGradients:
    """Gradients from a forward pass that the user saved. Raises ValueError for wrong shapes."""
    check_impl(impl)
    if call.dropout_p and call.dropout_seed is None:
        raise ValueError("dropout_seed must be the forward call's, as dropout_p is given; got None")
    given = {"dout": dout, "out": saved.out, "lse": saved.lse, "dlse": dlse}
    shapes = {"dout": call.out_shape, "out": call.out_shape,
              "lse": call.lse_shape, "dlse": call.lse_shape}  # fmt: skip
    for name, value in given.items():
        if value is None and name == "dlse":
            continue
        if not is_torch(value):
            given[name] = value = to_numpy(name, value)
        if tuple(value.shape) != tuple(shapes[name]):
            raise ValueError(f"{name} must have shape {shapes[name]}; got {tuple(value.shape)}")
    saved = Saved(given["out"], given["lse"])
    return run_backward(call, saved, given["dout"], given["dlse"], impl)
