"""torch.ops.fa4: attention as torch operators, for every implementation; and their short cut.

The operators have fake implementations and gradients, so that calls work under torch.compile and
FakeTensorMode; their arguments are the fields of `Call`. Importing this module registers them.
Where only autograd has to know of a call, it is recorded without them, in a third of the time.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4.backends import AttentionGradients, Saved
from fa4.call.call import ARGUMENTS, FIRST_OPTION, Call, Extras, operator_schema
from fa4.call.choose import Computed, choose, draw_seed, run_backward, run_forward
from fa4.call.form import with_form

_SCHEMA = operator_schema()
_DIFFERENTIABLE = Call._fields[:4]  # q, k, v and learnable_sink
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
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor seed, {_SCHEMA}, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(*values: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink), in the types of their inputs."""
    dout, dlse, out, lse, seed, *fields, impl = values
    call = from_operator(tuple(fields))
    if call.dropout_p:
        call = call._replace(dropout_seed=int(seed) % _WORD)
    found = run_backward(call, Saved(out, lse), dout, dlse, impl)
    return tuple(
        call.q.new_empty(0) if grad is None else grad.contiguous()
        for grad in _in_types(found, call)
    )


def _in_types(found: AttentionGradients, call: Call) -> list[torch.Tensor | None]:
    """The gradients of `_DIFFERENTIABLE` in the types of their inputs; None for no input."""
    return [
        None if x is None or grad is None else grad if grad.dtype is x.dtype else grad.to(x.dtype)
        for grad, x in zip(found, call, strict=False)
    ]


@attention_backward.register_fake
def _(*values: Any) -> tuple[torch.Tensor, ...]:
    call = Call(*values[5:-1])
    sink = call.q.new_empty(0) if call.learnable_sink is None else call.learnable_sink
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*call[:3], sink)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *fields, impl, _, has_lse = inputs
    _keep(ctx, Call(*fields), output)
    ctx.impl, ctx.has_lse = impl, has_lse


def _keep(ctx: Any, call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
    """Hands autograd the tensors, whose changes it sees, and keeps the rest of the call."""
    ctx.save_for_backward(*outputs, *call[:FIRST_OPTION], *call.aux_tensors)
    ctx.rest = call[FIRST_OPTION + 1 :]
    # A gradient that nobody asked for is then None, not zeros.
    ctx.set_materialize_grads(False)


def _restore(ctx: Any, outputs: int) -> tuple[list[torch.Tensor], Call]:
    """What `_keep` was given: so many outputs, and the call."""
    tensors = ctx.saved_tensors
    given, aux = tensors[outputs : outputs + FIRST_OPTION], tensors[outputs + FIRST_OPTION :]
    return tensors[:outputs], Call._make([*given, list(aux), *ctx.rest])


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
    if not ctx.has_lse:
        raise RuntimeError("gradients need the LSE: call the operator with return_lse=True")
    (out, lse, seed), call = _restore(ctx, 3)
    dout = torch.zeros_like(out) if dout is None else dout
    fields = call[: len(ARGUMENTS)]
    found = torch.ops.fa4.attention_backward(dout, dlse, out, lse, seed, *fields, ctx.impl)
    grads: dict[str, Any] = dict.fromkeys(ARGUMENTS)
    grads["aux_tensors"] = [None] * len(call.aux_tensors)
    grads["sparse_block"] = [None] * len(call.sparse_block)
    for name, grad in zip(_DIFFERENTIABLE, found, strict=True):
        grads[name] = None if getattr(call, name) is None else grad
    return *grads.values(), None, None, None


class _Recorded(torch.autograd.Function):
    """A call that autograd records, with the tensors that it may ask gradients of."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, call: Call, impl: str) -> Any:
        """(O, LSE)."""
        del q, k, v, sink  # the call's
        result = run_forward(call, impl, lse=True, gradient=True)
        _keep(ctx, call, (result.out, result.lse))
        ctx.impl = impl
        return result.out, result.lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        """The gradients of `_DIFFERENTIABLE`."""
        (out, lse), call = _restore(ctx, 2)
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled():  # create_graph: the operator refuses second derivatives
            seed = torch.tensor([_signed(call.dropout_seed or 0)])
            given = (dout, dlse, out, lse, seed, *to_operator(call))
            found = torch.ops.fa4.attention_backward(*given, ctx.impl)
            return *found[:3], None if call.learnable_sink is None else found[3], None, None
        found = run_backward(call, Saved(out, lse), dout, dlse, ctx.impl)
        return *_in_types(found, call), None, None


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
    """Can the operator be left out: no tracing, no mode, ordinary tensors that hold data?"""
    return (
        type(call.q) in _ORDINARY
        and not call.q.is_meta
        and type(call.k) in _ORDINARY
        and type(call.v) in _ORDINARY
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def attend(call: Call, impl: str, *, lse: bool) -> Computed:
    """O and LSE, recorded by autograd if a gradient is required.

    Raises NotImplementedError, before anything is computed, for a gradient that a kernel lacks.
    """
    gradient = needs_gradient(call)
    if not is_plain(call):
        return _attend_by_operator(call, impl, gradient, lse or gradient)
    if not gradient:
        return run_forward(call, impl, lse=lse, gradient=False)
    if call.dropout_p and call.dropout_seed is None:
        call = call._replace(dropout_seed=draw_seed(call))
    name = choose(call, gradient=True) if impl == "auto" else impl
    out, found = _Recorded.apply(*call[:4], call, name)
    return Computed(out, found, call.dropout_seed)


def _attend_by_operator(call: Call, impl: str, gradient: bool, lse: bool) -> Computed:
    """The same where somebody has to know of the operator: a compiler, a mode, a subclass."""
    out, found, seed = torch.ops.fa4.attention_forward(*to_operator(call), impl, gradient, lse)
    if not call.dropout_p or torch.compiler.is_compiling():
        return Computed(out, found, None)
    return Computed(out, found, int(seed) % _WORD)
