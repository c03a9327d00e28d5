"""From a call to a kernel: which spec it needs, and the arguments that the kernel takes.

Tensors are torch tensors or NumPy arrays; neither package is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa4.config import ForwardConfig, Window
from fa4.hardware import B200, Gpu
from fa4.sm100 import support
from fa4.sm100.forward.spec import TILE_ROWS, ForwardSpec
from fa4.sm100.support import ForwardCall, NotSupported
from fa4.sm100.variants import GPUS, tuned_spec

ALIGN_BYTES = 16  # TMA: of addresses and strides (PTX ISA, tensormap; CUDA driver API)
PAIR_DIMS = (128, 192)


def find_gpu(capability: tuple[int, int]) -> Gpu:
    """The machine with a compute capability. Raises ValueError if no kernel runs on it."""
    arch = f"sm_{capability[0]}{capability[1]}a"
    if arch not in GPUS:
        known = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in GPUS.values())
        raise ValueError(
            f"the SM100 kernel runs on {known}; this GPU has compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    return GPUS[arch]


def choose_spec(call: ForwardCall, gpu: Gpu = B200) -> ForwardSpec:
    """The kernel of a call. Raises NotSupported, with the reason, if there is none."""
    support.check(call)
    left, right = kernel_window(call)
    packs = call.group > 1 and TILE_ROWS % call.group == 0 and call.pack_gqa is not False
    group = call.group if packs else 1
    spec = tuned_spec(
        call.head_dim,
        call.head_dim_v,
        gpu,
        dtype=call.dtype,
        causal=right == 0,
        window_left=left is not None,
        window_right=right not in (None, 0),
        lse=call.lse,
        group=group,
        packed_q=call.packed_q,
        packed_k=call.packed_k,
        used_q=call.used_q,
        used_k=call.used_k,
        sink=call.sink,
        softcap=call.softcap > 0,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        cta_group=_cta_group(call, call.longest_q * group),
        # Tiles of unequal length: the longest first, so that the short ones fill the gaps.
        scheduler="static" if (left, right) == (None, None) else "lpt",
        **({"aux": call.aux} if call.aux else {}),
    )
    return replace(spec, numerics=_numerics(call, spec.numerics, call.longest_q * group))


def _numerics(call: ForwardCall, tuned: ForwardConfig, rows: int) -> ForwardConfig:
    """The given ones, else the tuned ones with as many Q tiles as there is work for."""
    if call.numerics is not None:
        return call.numerics
    return replace(tuned, q_tiles=1) if rows <= TILE_ROWS else tuned


def _cta_group(call: ForwardCall, rows: int) -> int:
    """2 where pairs of CTAs pay: long sequences without a mask, whose tiles are all alike."""
    plain = kernel_window(call) == (None, None) and call.mask_mod is None
    varlen = call.packed_q or call.packed_k or call.used_q or call.used_k
    plain = plain and (call.numerics is None or call.numerics.q_tiles == 2)
    fits = call.head_dim in PAIR_DIMS and call.head_dim_v == TILE_ROWS and rows > 2 * TILE_ROWS
    return 2 if plain and not varlen and fits else 1


def kernel_window(call: ForwardCall) -> Window:
    """The window as the kernel needs it: no side that hides nothing, and 32-bit bounds.

    Query i of Sq sees keys from i + Sk - Sq - left to i + Sk - Sq + right.
    """
    left, right = call.window
    most = call.rows_q + call.rows_k
    if left is not None:
        left = None if left >= call.rows_k - 1 else max(left, -most)
    if right is not None:
        # A right side of 0 is another kernel (causal), not another bound: it stays.
        right = None if right > 0 and right >= call.rows_q - 1 else max(right, -most)
    return left, right


def check_operand(name: str, tensor: Any) -> None:
    """Raises NotSupported unless TMA can address a tensor: contiguous rows, 16-byte alignment."""
    strides, item_bytes = element_strides(tensor), tensor.itemsize
    sizes = list(zip(tensor.shape, strides, strict=True))
    if sizes[-1][0] > 1 and sizes[-1][1] != 1:
        raise _refused("the last dimension must be contiguous", name, strides)
    if any(size > 1 and (n < 0 or n * item_bytes % ALIGN_BYTES) for size, n in sizes[:-1]):
        rule = f"strides must be multiples of {ALIGN_BYTES // item_bytes} elements"
        raise _refused(rule, name, strides)
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    if address % ALIGN_BYTES:
        raise _refused(f"the first element must lie at a multiple of {ALIGN_BYTES} bytes",
                       name, hex(address))  # fmt: skip


def _refused(rule: str, name: str, value: object) -> NotSupported:
    return NotSupported("strides", f"SM100 kernel, strides: {rule}; {name} has {value}")


def element_strides(tensor: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if hasattr(tensor, "stride"):  # torch
        return tuple(tensor.stride())
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


def launch_arguments(
    call: ForwardCall,
    spec: ForwardSpec,
    operands: Sequence[Any],
    outputs: tuple[Any, Any],
    vectors: Mapping[str, Any],
    num_sms: int,
) -> tuple[Any, ...]:
    """What the compiled kernel takes, in its order.

    operands: q, k, v. outputs: o and lse. vectors: sink, cu_seqlens_q, cu_seqlens_k, seqused_q,
    seqused_k and aux (a tuple), None where they are not given. num_sms: CTAs at most. Raises
    NotSupported for a tensor that TMA cannot address.
    """
    for name, tensor in zip("qkv", operands, strict=True):
        check_operand(name, tensor)
    out, lse = outputs
    left, right = kernel_window(call)
    return (
        *(regular(tensor) for tensor in (*operands, out)),
        lse if spec.lse else None,
        call.softmax_scale,
        call.softcap if spec.softcap else None,
        left if spec.window_left else None,
        right if spec.window_right else None,
        max(call.longest_q, 1),
        *(vectors[name] for name in ("sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
                                     "seqused_k", "aux")),
        num_sms,
    )  # fmt: skip
