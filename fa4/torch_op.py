"""torch.ops.fa4: attention as torch operators, for every implementation.

They have fake implementations and gradients, so that calls work under autograd, torch.compile and
FakeTensorMode; their arguments are the fields of `Call`. Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4.backends import NO_BACKWARD, Saved
from fa4.call import ARGUMENTS, FIRST_OPTION, Call, Extras, operator_schema
from fa4.choose import Computed, run_backward, run_forward
from fa4.form import with_form

_SCHEMA = operator_schema()
_DIFFERENTIABLE = ("q", "k", "v", "learnable_sink")
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)  # O of these is bf16
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_WORD = 2**64  # seeds are unsigned, an operator's integers signed

_known: list[Extras] = [Extras()]
_numbers: dict[Extras, int] = {Extras(): 0}


@torch._dynamo.assume_constant_result
def remember(*fields: Any) -> int:
    """A number that stands for `Extras` of these fields as long as the process lives."""
    extras = Extras(*fields)
    if extras not in _numbers:
        _numbers[extras] = len(_known)
        _known.append(extras)
    return _numbers[extras]


def _signed(seed: int) -> int:
    return seed - _WORD if seed >= _WORD // 2 else seed


def to_operator(call: Call) -> tuple[Any, ...]:
    """A call as an operator's arguments."""
    seed = None if call.dropout_seed is None else _signed(call.dropout_seed)
    return call._replace(extras=remember(*call.extras), dropout_seed=seed)[:-1]


def from_operator(values: tuple[Any, ...]) -> Call:
    """An operator's arguments as a checked call."""
    call = Call(*values)
    seed = call.dropout_seed
    extras = _known[call.extras]  # type: ignore[call-overload]
    call = call._replace(extras=extras, dropout_seed=None if seed is None else seed % _WORD)
    return with_form(call)


@torch.library.custom_op(
    "fa4::attention_forward",
    mutates_args=(),
    schema=f"({_SCHEMA}, str impl, bool gradient, bool return_lse) -> (Tensor, Tensor, Tensor)",
)
def attention_forward(*values: Any) -> tuple[torch.Tensor, ...]:
    """O, LSE (empty without return_lse) and the seed of the dropout, for `Call`'s fields.

    impl: may be "auto", which is decided when it runs. gradient: will one be asked for?
    """
    *fields, impl, gradient, return_lse = values
    result = run_forward(from_operator(tuple(fields)), impl, lse=return_lse, gradient=gradient)
    seed = torch.tensor([_signed(result.dropout_seed or 0)])
    empty_type = torch.float64 if impl == "oracle" else torch.float32
    lse = result.lse if return_lse else result.out.new_empty(0, dtype=empty_type)
    return result.out, lse, seed


@attention_forward.register_fake
def _(*values: Any) -> tuple[torch.Tensor, ...]:
    *fields, impl, _, return_lse = values
    call = Call(*fields)
    out_type = torch.bfloat16 if call.q.dtype in _NARROW else call.q.dtype
    exact = impl == "oracle"
    lse_type = torch.float64 if exact else torch.float32
    return (
        call.q.new_empty(call.out_shape, dtype=torch.float64 if exact else out_type),
        call.q.new_empty(call.lse_shape if return_lse else (0,), dtype=lse_type),
        torch.empty(1, dtype=torch.int64),
    )


@torch.library.custom_op(
    "fa4::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, Tensor out, Tensor lse, Tensor seed, {_SCHEMA}, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(*values: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink), in the types of their inputs."""
    dout, dlse, out, lse, seed, *fields, impl = values
    call = from_operator(tuple(fields))
    if call.dropout_p:
        call = call._replace(dropout_seed=int(seed) % _WORD)
    found = run_backward(call, Saved(out, lse), dout, dlse, impl)
    inputs = (getattr(call, name) for name in _DIFFERENTIABLE)
    return tuple(
        call.q.new_empty(0) if x is None or grad is None else grad.to(x.dtype).contiguous()
        for grad, x in zip(found, inputs, strict=True)
    )


@attention_backward.register_fake
def _(*values: Any) -> tuple[torch.Tensor, ...]:
    call = Call(*values[5:-1])
    sink = call.q.new_empty(0) if call.learnable_sink is None else call.learnable_sink
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*call[:3], sink)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *fields, impl, _, has_lse = inputs
    call = Call(*fields)
    ctx.save_for_backward(*output, *call[:FIRST_OPTION], *call.aux_tensors)
    ctx.rest, ctx.impl, ctx.has_lse = fields[FIRST_OPTION + 1 :], impl, has_lse


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
    if not ctx.has_lse:
        raise RuntimeError("gradients need the LSE: call the operator with return_lse=True")
    out, lse, seed, *tensors = ctx.saved_tensors
    fields = (*tensors[:FIRST_OPTION], tensors[FIRST_OPTION:], *ctx.rest)
    found = torch.ops.fa4.attention_backward(dout, dlse, out, lse, seed, *fields, ctx.impl)
    call = Call(*fields)
    grads: dict[str, Any] = dict.fromkeys(ARGUMENTS)
    grads["aux_tensors"] = [None] * len(call.aux_tensors)
    grads["sparse_block"] = [None] * len(call.sparse_block)
    for name, grad in zip(_DIFFERENTIABLE, found, strict=True):
        grads[name] = None if getattr(call, name) is None else grad
    return *grads.values(), None, None, None


def _differentiate_twice(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("fa4 has no second derivatives: call backward without create_graph")


def _refuse_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    raise NotImplementedError("fa4 has no batching rule for torch.vmap: make it a batch dimension")


attention_forward.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(_differentiate_twice)
attention_forward.register_vmap(_refuse_vmap)
attention_backward.register_vmap(_refuse_vmap)


def needs_gradient(call: Call) -> bool:
    """Will autograd record this call?"""
    if not torch.is_grad_enabled():
        return False
    q, k, v, sink = call[:4]
    needed = q.requires_grad or k.requires_grad or v.requires_grad
    return needed or (sink is not None and sink.requires_grad)


def is_plain(call: Call) -> bool:
    """Can the operator be left out: no gradient, no tracing, no mode, ordinary tensors?"""
    return (
        type(call.q) in _ORDINARY
        and type(call.k) in _ORDINARY
        and type(call.v) in _ORDINARY
        and not torch.compiler.is_compiling()
        and not needs_gradient(call)
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def attend(call: Call, impl: str, *, lse: bool) -> Computed:
    """O and LSE through the operator. Raises NotImplementedError for a gradient that is missing."""
    gradient = needs_gradient(call)
    if gradient and impl in NO_BACKWARD:
        raise NotImplementedError(NO_BACKWARD[impl])
    out, found, seed = torch.ops.fa4.attention_forward(
        *to_operator(call), impl, gradient, lse or gradient
    )
    if not call.dropout_p or torch.compiler.is_compiling():
        return Computed(out, found, None)
    return Computed(out, found, int(seed) % _WORD)
