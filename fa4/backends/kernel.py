"""What both ways to run the compiled forward kernel share: from a call to what is launched.

The kernel of a form of calls, and everything of its launch that is no tensor, is found once
(`prepare`); after that a call costs two outputs and a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fa4.call.arrays import element_type, is_torch
from fa4.call.call import Call
from fa4.call.options import Option
from fa4.compiled.build import build
from fa4.compiled.launch import (
    LENGTHS,
    LaunchArguments,
    check_address,
    check_operand,
    is_aligned,
    launch_arguments,
    part_shapes,
    regular,
)
from fa4.compiled.support import UNKNOWN, ForwardCall
from fa4.compiled.variants import AnyForwardSpec, choose_spec, count_splits
from fa4.hardware import Gpu

FindMachine: TypeAlias = Callable[[Call], tuple[Gpu, int]]  # and its number of SMs


class Prepared(NamedTuple):
    """What is the same for all calls of a form.

    sizes: the call without its tensors. kernel: None for an empty call. num_sms: CTAs at most.
    template: what a launch takes, without the tensors; None if TMA wants other strides of them.
    vectors: are there tensors beside q, k and v? parts: the shapes of O and LSE of all parts of the
    keys, where these are divided.
    """

    sizes: ForwardCall
    spec: AnyForwardSpec
    kernel: Callable[..., Any] | None
    num_sms: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    template: LaunchArguments | None
    vectors: bool
    parts: tuple[tuple[int, ...], ...] = ()


def describe(call: Call, *, lse: bool = True) -> ForwardCall:
    """The call without its tensors, as the kernels' support table sees it."""
    mods = call.extras.score_mod is not None or call.extras.mask_mod is not None
    return ForwardCall(
        dtype=call.dtype,
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        heads_q=call.q.shape[-2],
        heads_k=call.k.shape[-2],
        batch=call.batch,
        rows_q=call.q.shape[-3],
        rows_k=call.k.shape[-3],
        max_seqlen_q=call.max_seqlen_q,
        softmax_scale=call.softmax_scale,
        window=call.window,
        lse=lse,
        sink=call.learnable_sink is not None,
        softcap=call.softcap,
        packed_q=call.cu_seqlens_q is not None,
        packed_k=call.cu_seqlens_k is not None,
        used_q=call.seqused_q is not None,
        used_k=call.seqused_k is not None,
        pack_gqa=call.pack_gqa,
        score_mod=call.extras.score_mod,
        mask_mod=call.extras.mask_mod,
        aux=tuple((_aux_type(x), len(x.shape)) for x in call.aux_tensors) if mods else (),
        numerics=call.extras.forward_config,
        dropout_p=call.dropout_p,
        num_splits=call.num_splits,
        paged=call.page_table is not None,
        block_sparse=bool(call.sparse_block),
        descale="".join(x for x in "qkv" if getattr(call, f"{x}_descale") is not None),
        others=tuple(option.name for option in UNKNOWN if is_given(call, option)),
    )


def is_given(call: Call, option: Option) -> bool:
    """Has the call another value than an option's default?"""
    if "extras" in option.carried_by:
        return getattr(call.extras, option.name) is not None
    found = [getattr(call, name) for name in option.carried_by]
    return any(x is not None if option.default is None else x != option.default for x in found)


def _aux_type(tensor: Any) -> str:
    """Its element type; integers by their names, such as "int32"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if kind.startswith(("int", "uint", "bool")) else element_type(tensor)


def prepare(call: Call, find_machine: FindMachine, *, lse: bool) -> Prepared:
    """The kernel of a call on a machine (and its number of SMs), compiled if need be.

    Raises NotSupported for what it refuses, ImportError without CuTe-DSL.
    """
    found: Prepared = remembered(call, (find_machine, lse), _prepare, find_machine, lse)
    return found


def remembered(call: Call, key: Any, find: Callable[..., Any], *arguments: Any) -> Any:
    """What `find(call, *arguments)` finds, once for all calls of a form.

    But each time for calls with callables: their globals may change, at which `build` looks.
    """
    form = call.form
    found = None if form is None else form.memo.get(key)
    if found is None:
        found = find(call, *arguments)
        if form and call.extras.score_mod is None and call.extras.mask_mod is None:
            form.memo[key] = found
    return found


def _prepare(call: Call, find_machine: FindMachine, lse: bool) -> Prepared:
    sizes = describe(call, lse=lse)
    gpu, num_sms = find_machine(call)
    spec = choose_spec(sizes, gpu)
    splits = count_splits(sizes, spec)
    kernel = template = None
    if not sizes.is_empty:
        for name, tensor in zip("qkv", call[:3], strict=True):
            check_operand(name, tensor)
        kernel = build(spec, gpu.arch)
        if all(regular(x) is x for x in call[:3]):
            template = launch_arguments(sizes, spec, call[:3], (call.q, None), {}, num_sms)
    return Prepared(
        sizes=sizes,
        spec=spec,
        kernel=kernel,
        num_sms=num_sms,
        out_shape=call.out_shape,
        lse_shape=call.lse_shape,
        template=template,
        vectors=bool(read_vectors(call, sizes)),
        parts=() if splits == 1 else part_shapes(call.out_shape, call.lse_shape, splits),
    )


def launch(call: Call, prepared: Prepared, start: Callable[..., None]) -> tuple[Any, Any]:
    """(O, LSE or None): `start(kernel, *arguments)` runs it."""
    out, lse = _allocate(call, prepared)
    sizes, template = prepared.sizes, prepared.template
    if prepared.kernel is None:
        return out, lse
    q, k, v = call[:3]
    more = [new_tensor(q, shape, None, "float32") for shape in prepared.parts]
    more += read_factors(call, prepared.spec)
    if getattr(prepared.spec, "draws_work", False):
        more.append(new_tensor(q, (1,), 0, "int32"))
    if template is None:
        values = launch_arguments(
            sizes, prepared.spec, (q, k, v), (out, lse), read_vectors(call, sizes), prepared.num_sms
        )
        start(prepared.kernel, *values, *more)
        return out, lse
    check_addresses(q, k, v)
    if prepared.vectors:
        template = template._replace(**read_vectors(call, sizes))
    start(prepared.kernel, q, k, v, out, lse, *template[5:], *more)
    return out, lse


def check_addresses(q: Any, k: Any, v: Any) -> None:
    """Raises NotSupported unless TMA can address the first element of each."""
    if not is_aligned(q, k, v):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_address(name, tensor)


def read_vectors(call: Call, sizes: ForwardCall) -> dict[str, Any]:
    """Lengths, sink and auxiliary tensors as the kernel reads them."""
    vectors = {
        name: read_vector(tensor, "int32")
        for name, tensor in ((name, getattr(call, name)) for name in LENGTHS)
        if tensor is not None
    }
    if call.learnable_sink is not None:
        vectors["sink"] = read_vector(call.learnable_sink, "float32")
    if sizes.aux:
        vectors["aux"] = tuple(call.aux_tensors)
    return vectors


def read_factors(call: Call, spec: AnyForwardSpec) -> tuple[Any, ...]:
    """Those of q, k and v, None without one; kernels of 16-bit types have no such arguments."""
    if spec.element_bytes > 1:
        return ()
    factors = (call.q_descale, call.k_descale, call.v_descale)
    return tuple(read_vector(factor, "float32") for factor in factors)


def read_vector(value: Any, kind: str) -> Any:
    """A length vector or sink as the kernel reads it; conversions run where the tensor is."""
    if value is None:
        return None
    if not is_torch(value):
        return np.ascontiguousarray(value, kind)
    dtype = torch_type(kind)
    if value.dtype is dtype and value.is_contiguous():
        return value
    return value.detach().to(dtype).contiguous()


@cache
def torch_type(kind: str) -> Any:
    """torch's type of a name such as "float32"."""
    import torch

    return getattr(torch, kind)


def _allocate(call: Call, prepared: Prepared) -> tuple[Any, Any]:
    """O and LSE; filled where the kernel may leave rows unwritten: those of no sequence."""
    sizes = prepared.sizes
    padded = sizes.packed_q or sizes.used_q or sizes.is_empty
    kind = "bfloat16" if prepared.spec.element_bytes == 1 else ""
    out = new_tensor(call.q, prepared.out_shape, 0.0 if padded else None, kind)
    if not sizes.lse:
        return out, None
    lse = new_tensor(call.q, prepared.lse_shape, -np.inf if padded else None, "float32")
    if sizes.is_empty and call.learnable_sink is not None:
        lse[...] = read_vector(call.learnable_sink, "float32")[:, None]
    return out, lse


def new_tensor(template: Any, shape: tuple[int, ...], value: float | None, kind: str = "") -> Any:
    """A new tensor beside `template` and of its type (or `kind`); value None: uninitialised."""
    if not is_torch(template):
        dtype = np.dtype(kind) if kind else template.dtype
        return np.empty(shape, dtype) if value is None else np.full(shape, value, dtype)
    dtype = torch_type(kind) if kind else template.dtype
    if value is None:
        return template.new_empty(shape, dtype=dtype)
    if value == 0:  # a memset, where a GPU has one
        return template.new_zeros(shape, dtype=dtype)
    return template.new_full(shape, value, dtype=dtype)
