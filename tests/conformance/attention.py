"""Attention kernels: NVIDIA's fmha examples and flash-attn-4, judged by the error budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fa4.testing import Case, Inputs, Outputs, build_inputs, check_budget, plain_attention
from lab.foreign import cuda_is_cpu, example, flash_attention, multiprocessors
from tests.conformance.program import Arrays, Program, Verdict, tensor_of


def judge(inputs: Inputs, found: Arrays) -> Verdict:
    """The share of the error budget that the outputs of a call use."""
    report = check_budget(inputs, Outputs(**found))
    return Verdict(max(check.error for check in report.checks), report.share)


def values_of(tensor: Any) -> np.ndarray:
    """A copy of a tensor in the NumPy type of its own."""
    from fa4.call.arrays import to_numpy

    return np.array(to_numpy("output", tensor))


def _saved(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of dense inputs, which a backward pass starts from: those of plain attention."""
    parts = plain_attention(inputs)
    out = np.stack([part.out for part in parts]).astype(inputs.q.dtype, order="C")
    return out, np.stack([part.lse for part in parts]).astype(np.float32, order="C")


# NVIDIA's.


def fmha(case: Case, persistent: bool = False) -> Program:
    """The forward example: 256 queries for each CTA and work tile, 128 keys in each step.

    A persistent kernel gets two multiprocessors for all its work tiles.
    """
    inputs = build_inputs(case)
    tensors = [tensor_of(x) for x in (inputs.q, inputs.k, inputs.v)]
    batch, rows, heads, _ = inputs.q.shape
    lse_shape = (batch, heads, rows)
    tensors += [tensor_of(np.zeros_like(inputs.q)), tensor_of(np.zeros(lse_shape, np.float32))]
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        pointers = [from_dlpack(x, assumed_align=16).iterator for x in tensors]
        stream = cutlass.torch.default_stream()
        keys, heads_k, dim = inputs.k.shape[1:]
        scale = 1 / math.sqrt(dim)
        arguments = (
            *pointers[:4],
            (batch, rows, rows, keys, heads, heads_k, dim),
            None,
            None,
            pointers[4],
            scale * math.log2(math.e),
            scale,
            1.0,
            None,
            cutlass.Int32(0) if case.causal else None,
            stream,
        )
        if not compiled:
            module = example("blackwell/fmha.py")
            masks = module.fmha_utils.MaskEnum
            full = case.causal or keys % 128 == 0
            kernel = module.BlackwellFusedMultiHeadAttentionForward(
                cutlass.Float32,
                cutlass.Float32,
                (128, 128, dim),
                persistent,
                masks.WINDOW_MASK if full else masks.RESIDUAL_MASK,
            )
            with multiprocessors(2):
                compiled.append(cute.compile(kernel, *arguments, options="--opt-level 2"))
        with multiprocessors(2):
            compiled[0](*arguments)
        return {"out": values_of(tensors[3]), "lse": values_of(tensors[4])}

    return Program(run, lambda found: judge(inputs, found))


def fmha_backward(case: Case, ordered: bool) -> Program:
    """The backward example: sums of O dO, the gradients, and the conversion of dQ.

    ordered: with the barrier that it lacks, see `_ordered`.
    """
    inputs = build_inputs(case)
    out, lse = _saved(inputs)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "dout": inputs.dout}
    arrays |= {f"d{name}": np.zeros_like(arrays[name]) for name in "qkv"}
    tensors = {name: tensor_of(x) for name, x in arrays.items()}
    lse_tensor = tensor_of(lse)
    compiled: list[Any] = []

    def run(session: Any) -> Arrays:
        import cutlass
        import cutlass.torch
        import torch
        from cutlass import cute
        from cutlass.cute.runtime import from_dlpack

        module = example("blackwell/fmha_bwd.py")
        kind = module.BlackwellFusedMultiHeadAttentionBackward
        batch, rows, heads, dim = inputs.q.shape
        keys, heads_k = inputs.k.shape[1:3]
        group = heads // heads_k
        size = kind._get_workspace_size(rows, keys, dim, heads, batch, cutlass.Float32)
        workspace = torch.zeros(size, dtype=torch.uint8)
        grouped_lse = lse_tensor.view(batch, heads_k, group, rows).permute(3, 2, 1, 0)
        views = {name: _by_group(x, heads_k) for name, x in tensors.items()}
        arguments = (
            (rows, keys, dim, ((group, heads_k), batch)),
            *(views[name] for name in ("q", "k", "v", "out", "dq", "dk", "dv", "dout")),
            from_dlpack(grouped_lse, assumed_align=16).mark_layout_dynamic(leading_dim=0),
            None,
            None,
            1 / math.sqrt(dim),
            None,
            cutlass.Int32(0) if case.causal else None,
            from_dlpack(workspace, assumed_align=16).mark_layout_dynamic(),
            cutlass.torch.default_stream(),
        )
        if not compiled:
            masks = module.fmha_utils.MaskEnum
            full = case.causal or rows % 128 == 0
            mask = masks.WINDOW_MASK_BWD if full else masks.RESIDUAL_MASK_BWD
            kind = _ordered(kind) if ordered else kind
            kernel = kind(cutlass.BFloat16, cutlass.Float32, (128, 128, dim), False, mask)
            compiled.append(cute.compile(kernel, *arguments))
        compiled[0](*arguments)
        return {"out": out} | {name: values_of(tensors[name]) for name in ("dq", "dk", "dv")}

    return Program(run, lambda found: judge(inputs, found))


def _by_group(tensor: Any, heads_k: int) -> Any:
    """(b, s, h, d) as a CuTe tensor (s, d, h / heads_k, heads_k, b)."""
    from cutlass.cute.runtime import from_dlpack

    batch, rows, heads, dim = tensor.shape
    split = tensor.view(batch, rows, heads_k, heads // heads_k, dim).permute(1, 4, 3, 2, 0)
    view = from_dlpack(split, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    return view.mark_compact_shape_dynamic(mode=1, stride_order=(4, 0, 3, 2, 1), divisibility=64)


def _ordered(kind: Any) -> Any:
    """The backward kernel, with its tensor memory deallocated after the last use.

    The example's compute warps deallocate when they have dK and dV; nothing makes them wait for the
    last dQ, which the tensor pipe computes later and the reduce warps read still later.
    """
    from tests.conformance.kernels import ordered_backward

    return ordered_backward(kind)


# flash-attn-4.


def flash_forward(case: Case, sms: int = 2, arch: str = "sm_100a", **options: Any) -> Program:
    """Its forward pass, with the LSE; options: of `_flash_attn_fwd`. sms: multiprocessors, for the
    kernels that are persistent."""
    inputs = build_inputs(case)
    # It multiplies the values of hidden keys by 0, so that there must be no NaN.
    arrays = (np.where(np.isnan(x), x.dtype.type(0), x) for x in (inputs.q, inputs.k, inputs.v))
    q, k, v = map(tensor_of, arrays)
    given = {"causal": case.causal, "num_splits": case.num_splits, **options}
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    given |= {n: tensor_of(inputs.options[n]) for n in names if n in inputs.options}

    def run(session: Any) -> Arrays:
        with cuda_is_cpu(arch), multiprocessors(sms):
            out, lse, *_ = flash_attention()._flash_attn_fwd(q, k, v, return_lse=True, **given)
        return {"out": values_of(out), "lse": values_of(lse)}

    return Program(run, lambda found: judge(inputs, found))


def flash_backward(case: Case, sms: int = 2, arch: str = "sm_100a", **options: Any) -> Program:
    """Its backward pass: preprocessing, the gradients, and the conversion of dQ."""
    inputs = build_inputs(case)
    out, lse = _saved(inputs)
    arrays = (inputs.q, inputs.k, inputs.v, out, inputs.dout, lse)
    tensors = [tensor_of(x) for x in arrays]

    def run(session: Any) -> Arrays:
        with cuda_is_cpu(arch), multiprocessors(sms):
            interface = flash_attention()
            found = interface._flash_attn_bwd(*tensors, causal=case.causal, **options)
        gradients = zip(("dq", "dk", "dv"), found, strict=False)
        return {"out": out} | {name: values_of(value) for name, value in gradients}

    return Program(run, lambda found: judge(inputs, found))
