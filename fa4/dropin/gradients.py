"""Gradients of modified attention in torch: of q, k, v, the sink and a bias that is added.

The backward pass is that of the reference (the oracle's for impl="oracle"), which calls the
modification's derivative once for every tile. That is also where a bias finds its gradient: what
reaches the score of a pair reaches the bias of the pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from fa4.api import (
    flash_attn_backward,
    flash_attn_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
)
from fa4.backends import KERNELS
from fa4.call.arrays import like, to_numpy
from fa4.dropin.mods import Modification


class _Call(NamedTuple):
    """What is no tensor of the autograd function."""

    options: dict[str, Any]
    modification: Modification
    varlen: bool
    impl: str

    def with_sink(self, sink: Any) -> dict[str, Any]:
        return self.options | ({} if sink is None else {"learnable_sink": sink})


def attend_with_gradient(
    tensors: tuple[Any, Any, Any],
    options: dict[str, Any],
    modification: Modification,
    *,
    varlen: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) that autograd records; arguments as `fa4.dropin.attend.attend`."""
    sink = options.get("learnable_sink")
    options = {name: value for name, value in options.items() if name != "learnable_sink"}
    call = _Call(options, modification, varlen, impl)
    return _Modified.apply(*tensors, sink, modification.learned, call)


class _Modified(torch.autograd.Function):
    """One call; tensors first, then what does not need a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, bias: Any, call: _Call) -> Any:
        """(out, lse) by the implementation that was asked for."""
        run = flash_attn_varlen_func if call.varlen else flash_attn_func
        changed = call.modification
        mods = changed.for_kernel() if call.impl in KERNELS else changed.for_arrays()
        out, lse = run(q, k, v, **call.with_sink(sink), **mods, impl=call.impl, return_lse=True)
        ctx.save_for_backward(q, k, v, sink, bias, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        """Gradients of q, k, v, the sink and the bias."""
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        mods = call.modification.for_arrays()
        total = None
        if bias is not None and ctx.needs_input_grad[4]:
            total = _Total(
                call.modification.aux[0].shape, to_numpy("bias", call.modification.aux[0]).dtype
            )
            mods["score_mod_bwd"] = total.add
        run = flash_attn_varlen_backward if call.varlen else flash_attn_backward
        impl = "oracle" if call.impl == "oracle" else "reference"
        result = run(dout, q, k, v, out, lse, dlse=dlse, impl=impl, **call.with_sink(sink), **mods)
        dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(result[:3], (q, k, v), strict=True))
        dsink = None if sink is None else result.dsink.to(sink.dtype)
        dbias = None
        if total is not None:
            dbias = like(q, total.values).sum_to_size(bias.shape).to(bias.dtype)
        return dq, dk, dv, dsink, dbias, None


class _Total:
    """The gradient that reached the score of every pair, (B, Hq, Sq, Sk)."""

    def __init__(self, shape: Any, dtype: np.dtype) -> None:
        self.values = np.zeros(tuple(shape), dtype)

    def add(
        self, grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any
    ) -> Any:
        """A score_mod_bwd that changes nothing; each pair is in one tile."""
        self.values[b, h, i, j] += grad
        return grad
