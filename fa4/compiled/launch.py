"""The arguments of compiled kernels: what they take for a call, in their order.

Tensors are torch tensors or NumPy arrays; neither package is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fa4.compiled.support import BackwardCall, ForwardCall, NotSupported
from fa4.compiled.variants import AnyForwardSpec, kernel_window
from fa4.kit.features import BackwardFeatures, CallFeatures

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
VECTORS = ("sink", *LENGTHS, "aux")
WORKSPACE = ("dq_accum", "stats", "sink_parts", "turns", "drawn")  # of the backward kernels
COUNTS = ("turns", "drawn")  # of these, those that are int32
ALIGN_BYTES = 16  # TMA: of addresses and strides (PTX ISA, tensormap; CUDA driver API)


def check_operand(name: str, tensor: Any) -> None:
    """Raises NotSupported unless TMA can address a tensor: contiguous rows, 16-byte alignment."""
    strides, item_bytes = element_strides(tensor), tensor.itemsize
    sizes = list(zip(tensor.shape, strides, strict=True))
    if sizes[-1][0] > 1 and sizes[-1][1] != 1:
        raise _refused("the last dimension must be contiguous", name, strides)
    if any(size > 1 and (n < 0 or n * item_bytes % ALIGN_BYTES) for size, n in sizes[:-1]):
        rule = f"strides must be multiples of {ALIGN_BYTES // item_bytes} elements"
        raise _refused(rule, name, strides)
    check_address(name, tensor)


def check_address(name: str, tensor: Any) -> None:
    """Raises NotSupported unless TMA can address the first element."""
    if not is_aligned(tensor):
        address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
        raise _refused(f"the first element must lie at a multiple of {ALIGN_BYTES} bytes",
                       name, hex(address))  # fmt: skip


def is_aligned(*tensors: Any) -> bool:
    """Are the first elements where TMA can address them?"""
    joined = 0
    for tensor in tensors:
        joined |= tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return joined % ALIGN_BYTES == 0


def is_addressable(tensor: Any) -> bool:
    """Can TMA address a tensor?"""
    try:
        check_operand("", tensor)
    except NotSupported:
        return False
    return True


def _refused(rule: str, name: str, value: object) -> NotSupported:
    return NotSupported("strides", f"compiled kernel, strides: {rule}; {name} has {value}")


def element_strides(tensor: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if hasattr(tensor, "stride"):  # torch
        strides: tuple[int, ...] = tensor.stride()
        return strides
    return tuple(stride // tensor.itemsize for stride in tensor.strides)


def regular(tensor: Any) -> Any:
    """The same tensor with the strides of a contiguous one in dimensions of size 1.

    Such a stride addresses nothing, but TMA descriptors ask every stride to be aligned.
    """
    strides = element_strides(tensor)
    wanted, step = list(strides), 1
    for axis in reversed(range(len(strides))):
        if tensor.shape[axis] == 1:
            wanted[axis] = step
        step = max(step, wanted[axis] * tensor.shape[axis])
    if tuple(wanted) == strides:
        return tensor
    if hasattr(tensor, "as_strided"):
        return tensor.as_strided(tuple(tensor.shape), wanted)
    from numpy.lib.stride_tricks import as_strided

    return as_strided(tensor, strides=[n * tensor.itemsize for n in wanted])


class LaunchArguments(NamedTuple):
    """What a compiled kernel takes: the parameters of `fa4.sm100.forward.kernel.forward`.

    Those of the Hopper kernel are the same. None for what its spec has no use for. aux: a tuple.
    num_sms: CTAs at most.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    softmax_scale: float
    softcap: float | None
    window_left: int | None
    window_right: int | None
    max_seqlen_q: int
    sink: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    aux: tuple[Any, ...] | None
    num_sms: int


def part_shapes(
    out_shape: tuple[int, ...], lse_shape: tuple[int, ...], splits: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a kernel that divides the keys takes behind `LaunchArguments`: O and LSE of each part.

    Both are float32 and uninitialised.
    """
    return (splits, *out_shape), (splits, *lse_shape)


class BackwardArguments(NamedTuple):
    """What the compiled backward kernels take: the parameters of `fa4.sm100.backward.host`.

    out, lse: of the forward pass. dlse, residual (of out), sink, dsink: None where their spec has
    no use for them. dq_accum to drawn: as `fa4.sm100.backward.workspace` describes them,
    uninitialised; turns is None without a fixed order, sink_parts without a sink, drawn where CTAs
    do not draw work tiles. dq_parts:
    dQ in float32 with a head for each part of the keys, None where these are not divided. dk_parts,
    dv_parts: the same of dK and dV and of the query heads (`fa4.sm90.backward.parts`). The rest as
    in `LaunchArguments`.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dlse: Any
    residual: Any
    dq: Any
    dk: Any
    dv: Any
    dsink: Any
    dq_accum: Any
    stats: Any
    sink_parts: Any
    turns: Any
    drawn: Any
    dq_parts: Any
    dk_parts: Any
    dv_parts: Any
    softmax_scale: float
    softcap: float | None
    window_left: int | None
    window_right: int | None
    max_seqlen_q: int
    max_seqlen_k: int
    sink: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    aux: tuple[Any, ...] | None


def launch_arguments(
    call: ForwardCall,
    spec: AnyForwardSpec,
    operands: Sequence[Any],
    outputs: tuple[Any, Any],
    vectors: Mapping[str, Any],
    num_sms: int,
) -> LaunchArguments:
    """The arguments of a call.

    operands: q, k, v. outputs: o and lse. vectors: sink, cu_seqlens_*, seqused_* and aux, where
    they are given. Raises NotSupported for a tensor that TMA cannot address.
    """
    for name, tensor in zip("qkv", operands, strict=True):
        check_operand(name, tensor)
    out, lse = outputs
    q, k, v, out = (regular(tensor) for tensor in (*operands, out))
    given: dict[str, Any] = _numbers(call, spec) | {name: vectors.get(name) for name in VECTORS}
    return LaunchArguments(
        q=q, k=k, v=v, o=out, lse=lse if spec.lse else None, **given, num_sms=num_sms
    )


def backward_template(call: BackwardCall, spec: BackwardFeatures) -> BackwardArguments:
    """The arguments of a call that are no tensors; None in the place of these."""
    tensors: dict[str, Any] = dict.fromkeys(BackwardArguments._fields)
    numbers = _numbers(call, spec) | {"max_seqlen_k": max(call.longest_k, 1)}
    return BackwardArguments(**(tensors | numbers))


def workspace_shapes(spec: Any, heads: Any, tiles: Any) -> dict[str, tuple[Any, ...]]:
    """The shapes of what the kernels of a backward spec hand one another, by name.

    heads: of queries. tiles: of a head's queries, as `fa4.sm100.backward.workspace.tiles_of` counts
    those of the spec's `block_rows`. All are float32 but COUNTS, which are int32.
    """
    shapes: dict[str, tuple[Any, ...]] = {}
    if spec.adds_up_dq:
        shapes["dq_accum"] = (heads, tiles, spec.block_rows * spec.dq_dim)
    shapes["stats"] = (heads, tiles, 2, spec.block_rows)
    if spec.sink:
        shapes["sink_parts"] = (heads, tiles)
    if spec.deterministic:
        shapes["turns"] = (heads, tiles, spec.dq_counters)
    if getattr(spec, "draws_work", False):
        shapes["drawn"] = (1, 1)
    return shapes


def _numbers(call: ForwardCall, spec: CallFeatures) -> dict[str, Any]:
    """Scale, softcap, bounds and the longest sequence; None for those that the spec has not."""
    left, right = kernel_window(call)
    return {
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap if spec.softcap else None,
        "window_left": left if spec.window_left else None,
        "window_right": right if spec.window_right else None,
        "max_seqlen_q": max(call.longest_q, 1),
    }
