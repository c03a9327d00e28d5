"""torch.ops.fa4: the forward kernel as a torch operator, on CUDA and on CPU tensors.

On CUDA tensors the GPU runs the kernel, on CPU tensors the emulator does. The operators have fake
implementations, so that they work under torch.compile and FakeTensorMode, and are differentiable on
the CPU, through the NumPy reference. Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fa4.arrays import like
from fa4.front.kernel import Arguments, options_of, run_on_emulator, run_on_gpu

NO_BACKWARD = (
    "the SM100 backward kernel is not in this version: call under torch.no_grad(), or with "
    'impl="reference", whose gradients are computed on the CPU'
)

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor[] aux, "
    "float softmax_scale, int? window_left, int? window_right, float softcap, "
    "SymInt? max_seqlen_q, bool? pack_gqa, int extras"
)


@torch.library.custom_op(
    "fa4::flash_attn_forward",
    mutates_args=(),
    schema=f"({_TENSORS}, bool return_lse) -> (Tensor, Tensor)",
)
def flash_attn_forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE (an empty tensor without return_lse); arguments as `fa4.front.kernel.Arguments`.

    max_seqlen_q: None for all rows of q, the bound that needs no look at cu_seqlens.
    """
    arguments, return_lse = Arguments(*values[:-1]), values[-1]
    if arguments.q.device.type == "cuda":
        out, lse = run_on_gpu(arguments, lse=return_lse)
    elif arguments.q.device.type == "cpu":
        out, lse, _ = run_on_emulator(arguments, lse=return_lse)
    else:
        raise ValueError(f"q must be on a CUDA GPU or the CPU; got {arguments.q.device}")
    return out, lse if return_lse else lse.new_empty(0)


@flash_attn_forward.register_fake
def _(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, return_lse = Arguments(*values[:-1]), values[-1]
    shape = arguments.lse_shape if return_lse else (0,)
    return (
        arguments.q.new_empty(arguments.out_shape),
        arguments.q.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op(
    "fa4::flash_attn_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, Tensor out, Tensor lse, {_TENSORS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def flash_attn_backward(
    dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *values: Any
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink), by the reference; CPU tensors only."""
    from fa4.api import flash_attn_varlen_backward

    a = Arguments(*values)
    if a.q.device.type != "cpu":
        raise NotImplementedError(NO_BACKWARD)
    options = options_of(a)
    if options["score_mod"] or options["mask_mod"]:
        raise NotImplementedError("no gradients through a CuTe-DSL score_mod or mask_mod")
    result = flash_attn_varlen_backward(
        dout, a.q, a.k, a.v, out, lse, dlse=dlse, impl="reference", **options
    )
    dsink = a.q.new_empty(0)
    if a.learnable_sink is not None:
        dsink = result.dsink.to(a.learnable_sink.dtype)
    dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(result[:3], (a.q, a.k, a.v), strict=True))
    return dq, dk, dv, dsink


@flash_attn_backward.register_fake
def _(*values: Any) -> tuple[torch.Tensor, ...]:
    a = Arguments(*values[4:])
    sink = a.q.new_empty(0) if a.learnable_sink is None else a.learnable_sink
    return (*(torch.empty_like(x, memory_format=torch.contiguous_format)
              for x in (a.q, a.k, a.v, sink)),)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
    ctx.save_for_backward(*output, *tensors)
    ctx.values = [None if isinstance(x, torch.Tensor) else x for x in inputs]


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    inputs = [value if x is None else x for x, value in zip(tensors, ctx.values, strict=True)]
    a = Arguments(*inputs[:-1])
    if not inputs[-1]:
        raise RuntimeError("gradients need the LSE: call with return_lse=True")
    dq, dk, dv, dsink = torch.ops.fa4.flash_attn_backward(dout, dlse, out, lse, *a)
    grads: dict[str, Any] = dict.fromkeys(a._fields) | {"aux": [None] * len(a.aux)}
    grads |= {"q": dq, "k": dk, "v": dv}
    grads["learnable_sink"] = None if a.learnable_sink is None else dsink
    return *grads.values(), None


flash_attn_forward.register_autograd(_differentiate, setup_context=_save)


def needs_gradient(arguments: Arguments) -> bool:
    """Will autograd record this call?"""
    tensors = (arguments.q, arguments.k, arguments.v, arguments.learnable_sink)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def as_tensors(arguments: Arguments) -> Arguments:
    """The same call with torch tensors for vectors that are given as something else."""
    changed = {}
    for name in ("learnable_sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        value = getattr(arguments, name)
        if value is not None and not isinstance(value, torch.Tensor):
            changed[name] = like(arguments.q, np.asarray(value))
    return arguments._replace(**changed)


def attend(arguments: Arguments, *, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) through the operator. Raises NotImplementedError if a GPU's gradient is wanted."""
    arguments = as_tensors(arguments)
    gradient = needs_gradient(arguments)
    if gradient and arguments.q.device.type == "cuda":
        raise NotImplementedError(NO_BACKWARD)
    out, lse = torch.ops.fa4.flash_attn_forward(*arguments, return_lse or gradient)
    return out, lse
