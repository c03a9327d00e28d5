"""Torch tensors through the NumPy reference, differentiable.

The only core file that imports torch, and only once a torch tensor was passed in.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4.arrays import like


class _Attention(torch.autograd.Function):
    """Forward and backward of one call; tensors first, then what does not need a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, call: dict[str, Any]) -> Any:
        """(out, lse) as torch tensors; the LSE is differentiable too."""
        from fa4.api import forward_request
        from fa4.request import build_request

        options = call["options"] | ({} if sink is None else {"learnable_sink": sink})
        request = build_request(q, k, v, options, varlen=call["varlen"])
        out, lse = (like(q, x) for x in forward_request(request, call["impl"]))
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of q, k, v and the sink."""
        from fa4.api import flash_attn_backward, flash_attn_varlen_backward

        dout, dlse = grads
        q, k, v, sink, out, lse = ctx.saved_tensors
        options = ctx.call["options"] | ({} if sink is None else {"learnable_sink": sink})
        run = flash_attn_varlen_backward if ctx.call["varlen"] else flash_attn_backward
        result = run(dout, q, k, v, out, lse, dlse=dlse, impl=ctx.call["impl"], **options)
        dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(result[:3], (q, k, v), strict=True))
        dsink = None if sink is None else result.dsink.to(sink.dtype)
        return dq, dk, dv, dsink, None


def attend(
    q: Any, k: Any, v: Any, options: dict[str, Any], *, varlen: bool, impl: str
) -> tuple[Any, Any]:
    """(out, lse) of torch tensors; see `fa4.api.flash_attn_func`."""
    options = dict(options)
    sink = options.pop("learnable_sink", None)
    if sink is not None and not isinstance(sink, torch.Tensor):
        sink = torch.as_tensor(sink)
    call = {"options": options, "varlen": varlen, "impl": impl}
    return _Attention.apply(q, k, v, sink, call)
