"""What both ways to run the compiled backward kernels share: from a call to what is launched.

As in `fa4.backends.kernel`, a form's kernels and the numbers of its launch are found once. A call
then costs its gradients, the workspaces, which no one fills, and a tuple. dO and the saved O may
have any strides: what TMA cannot address is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fa4.backends import AttentionGradients, Saved
from fa4.backends.kernel import (
    FindMachine,
    check_addresses,
    describe,
    new_tensor,
    read_vector,
    read_vectors,
    remembered,
)
from fa4.call.arrays import is_torch
from fa4.call.call import Call
from fa4.compiled.build import build
from fa4.compiled.launch import (
    COUNTS,
    WORKSPACE,
    BackwardArguments,
    backward_template,
    check_operand,
    element_strides,
    is_addressable,
    is_aligned,
    regular,
    workspace_shapes,
)
from fa4.compiled.support import BackwardCall, NotSupported, check
from fa4.compiled.variants import choose_backward_spec, find_key_parts, find_query_parts
from fa4.sm100.backward.workspace import tiles_of

_NUMBERS = BackwardArguments._fields.index("softmax_scale")  # the first that is no tensor


class PreparedBackward(NamedTuple):
    """What is the same for all calls of a form.

    sizes: the call without its tensors. kernel: None for an empty call. template: what a launch
    takes, without the tensors. workspace: names and shapes of the scratch tensors, None for one
    that is not needed. fills: which gradients are to be zero before the
    launch, as rows of no sequence are not written; () for none. query_parts, key_parts:
    in how many dQ, or dK and dV, are summed in float32 before they are added up; 1 where they are
    written whole. regular: can TMA
    address q, k and v as they are? vectors: are there tensors beside these? out_strides,
    lse_strides: of contiguous ones. new: makes a tensor in the framework of the call,
    uninitialised.
    """

    sizes: BackwardCall
    kernel: Callable[..., Any] | None
    template: BackwardArguments
    workspace: tuple[tuple[str, tuple[int, ...] | None], ...]
    fills: tuple[bool, ...]
    query_parts: int
    key_parts: int
    regular: bool
    vectors: bool
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    new: Callable[[Any, tuple[int, ...]], Any]


def describe_backward(
    call: Call, *, lse_gradient: bool = False, out_residual: bool = False
) -> BackwardCall:
    """The call without its tensors, as the backward kernels' support table sees it."""
    return BackwardCall(
        **vars(describe(call)),
        max_seqlen_k=call.max_seqlen_k,
        lse_gradient=lse_gradient,
        out_residual=out_residual,
        deterministic=call.deterministic,
        score_mod_bwd=call.extras.score_mod_bwd,
        order=call.extras.backward_config,
    )


def check_gradient(call: Call, family: str = "sm100") -> None:
    """Raises NotSupported, with the reason, if a family's kernels have no gradient of a call."""
    remembered(call, (check_gradient, family), _check_gradient, family)


def _check_gradient(call: Call, family: str) -> bool:
    check(describe_backward(call), family)
    return True


def require_gradient(call: Call, family: str = "sm100") -> None:
    """The same before the forward pass of a call whose inputs require gradients."""
    try:
        check_gradient(call, family)
    except NotSupported as error:
        raise NotSupported(
            error.feature,
            f"{error}; an input requires grad: call under torch.no_grad(), or with "
            'impl="reference"',
        ) from None


def prepare_backward(
    call: Call, find_machine: FindMachine, saved: Saved, *, lse_gradient: bool
) -> PreparedBackward:
    """The kernels of a call on a machine, compiled if need be. Raises as `fa4.backends.kernel`."""
    given = lse_gradient, saved.residual is not None
    key = (find_machine, call.deterministic, *given)
    found: PreparedBackward = remembered(call, key, _prepare, find_machine, given)
    return found


def _prepare(call: Call, find_machine: FindMachine, given: tuple[bool, bool]) -> PreparedBackward:
    sizes = describe_backward(call, lse_gradient=given[0], out_residual=given[1])
    gpu, _ = find_machine(call)
    spec = choose_backward_spec(sizes, gpu)
    kernel = None
    if not sizes.is_empty:
        for name, tensor in zip("qkv", call[:3], strict=True):
            check_operand(name, tensor)
        kernel = build(spec, gpu.arch)
    tiles = tiles_of(sizes.rows_q, sizes.batch, packed=sizes.packed_q, block_rows=spec.block_rows)
    shapes = workspace_shapes(spec, sizes.heads_q, tiles)
    return PreparedBackward(
        sizes=sizes,
        kernel=kernel,
        template=backward_template(sizes, spec),
        workspace=tuple((name, shapes.get(name)) for name in WORKSPACE),
        fills=_rows_to_fill(sizes),
        query_parts=find_query_parts(sizes, gpu),
        key_parts=find_key_parts(sizes, gpu),
        regular=all(regular(x) is x for x in call[:3]),
        vectors=bool(read_vectors(call, sizes)),
        out_strides=_contiguous_strides(call.out_shape),
        lse_strides=_contiguous_strides(call.lse_shape),
        new=_new_in_torch if is_torch(call.q) else _new_in_numpy,
    )


def _rows_to_fill(sizes: BackwardCall) -> tuple[bool, ...]:
    """Whether dQ, dK, dV and dsink may have elements that no kernel writes; () if none has."""
    empty = sizes.is_empty
    keys = empty or sizes.packed_k or sizes.used_k
    found = (empty or sizes.packed_q or sizes.used_q, keys, keys, empty)
    return found if any(found) else ()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def launch_backward(
    call: Call,
    prepared: PreparedBackward,
    saved: Saved,
    upstream: tuple[Any, Any],
    start: Callable[..., None],
) -> AttentionGradients:
    """The gradients, in the types of their inputs; `start(kernels, *arguments)` runs them.

    upstream: dO and, or None, the gradient of the LSE. Raises TypeError for dO or what was saved of
    another type than the call's; nothing is launched then.
    """
    q, k, v, sink = call[:4]
    (out, lse, residual), (dout, dlse) = saved, upstream
    _check_types(q.dtype, saved, dout)
    check_addresses(q, k, v)
    new = prepared.new
    dq, dk, dv = new(q, q.shape), new(k, k.shape), new(v, v.shape)
    dsink = None if sink is None else new(lse, sink.shape)
    parts = _parts(prepared, lse, call[:3])
    filled = (
        *(whole if part is None else part for part, whole in zip(parts, (dq, dk, dv), strict=True)),
        dsink,
    )
    for grad, fill in zip(filled, prepared.fills, strict=False):
        if fill and grad is not None:
            grad[...] = 0
    if prepared.kernel is None:
        return _without_scores(AttentionGradients(dq, dk, dv, dsink), sink, dlse)
    if not prepared.regular:
        q, k, v = regular(q), regular(k), regular(v)
    template = prepared.template
    if prepared.vectors:
        template = template._replace(**read_vectors(call, prepared.sizes))
    strides, row_strides = prepared.out_strides, prepared.lse_strides
    if not (element_strides(out) == strides == element_strides(dout) and is_aligned(out, dout)):
        out, dout = _operand(out, strides), _operand(dout, strides)
    if dlse is not None:
        dlse = _rows(dlse, row_strides)
    if residual is not None:
        residual = _operand(residual, strides)
    start(
        prepared.kernel, q, k, v, out, dout, _rows(lse, row_strides), dlse, residual,
        dq, dk, dv, dsink,
        *[shape and new_tensor(q, shape, None, "int32") if name in COUNTS
          else shape and new(lse, shape) for name, shape in prepared.workspace],
        *parts,
        *template[_NUMBERS:],
    )  # fmt: skip
    return AttentionGradients(dq, dk, dv, _in_type(dsink, sink))


def _parts(prepared: PreparedBackward, lse: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """New dQ, dK and dV in parts, of float32 as the LSE is; None where they are written whole."""
    counts = (prepared.query_parts, prepared.key_parts, prepared.key_parts)
    return tuple(
        None if count == 1
        else prepared.new(lse, (*x.shape[:-2], x.shape[-2] * count, x.shape[-1]))
        for x, count in zip(operands, counts, strict=True)
    )  # fmt: skip


def _new_in_torch(template: Any, shape: tuple[int, ...]) -> Any:
    return template.new_empty(shape)


def _new_in_numpy(template: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, template.dtype)


def _check_types(dtype: Any, saved: Saved, dout: Any) -> None:
    """dO, O and its residual are of q's type, the LSE is float32."""
    out, lse, residual = saved
    if dout.dtype != dtype or out.dtype != dtype:
        name, wrong = ("dout", dout) if dout.dtype != dtype else ("out", out)
        raise TypeError(f"{name} must be {dtype}, as q is; got {wrong.dtype}")
    if residual is not None and residual.dtype != dtype:
        raise TypeError(f"out_residual must be {dtype}, as q is; got {residual.dtype}")
    if lse.itemsize != 4:
        raise TypeError(f"lse must be float32, as the forward pass returns it; got {lse.dtype}")


def _without_scores(grads: AttentionGradients, sink: Any, dlse: Any) -> AttentionGradients:
    """Of a call without queries or keys: zeros, but for a sink, which then is all of the LSE."""
    if grads.dsink is not None and dlse is not None:
        heads_first = dlse if len(dlse.shape) == 2 else dlse.swapaxes(0, 1)
        grads.dsink[...] = heads_first.reshape(len(grads.dsink), -1).sum(-1)
    return grads._replace(dsink=_in_type(grads.dsink, sink))


def _in_type(dsink: Any, sink: Any) -> Any:
    """dsink, which the kernels write in float32, in the sink's type."""
    if dsink is None or dsink.dtype == sink.dtype:
        return dsink
    return dsink.to(sink.dtype) if is_torch(sink) else dsink.astype(sink.dtype)


def _operand(tensor: Any, strides: tuple[int, ...]) -> Any:
    """dO or O as TMA can address it: itself where it is contiguous, else perhaps a copy."""
    if element_strides(tensor) == strides and is_aligned(tensor):
        return tensor
    # A stride of 0, of a gradient that was expanded, is no stride of a TMA descriptor.
    repeats = any(
        n == 0 < size - 1 for n, size in zip(element_strides(tensor), tensor.shape, strict=True)
    )
    if is_addressable(tensor) and not repeats:
        return regular(tensor)
    return _copy(tensor)


def _rows(tensor: Any, strides: tuple[int, ...]) -> Any:
    """LSE or its gradient: float32 and contiguous."""
    if tensor.itemsize != 4:
        tensor = read_vector(tensor, "float32")
    return tensor if element_strides(tensor) == strides else _copy(tensor)


def _copy(tensor: Any) -> Any:
    """A contiguous one of its own."""
    if not is_torch(tensor):
        return np.array(tensor, order="C")
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)
