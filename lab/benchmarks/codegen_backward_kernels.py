"""Compiles the backward pass for sm_100a: what `codegen_kernels.py` does of `Wanted.backward`.

Each maker's pass is three kernels, before, main and behind; times are of all of them, the code is
the main kernel's. All compile for (2, 4096, 8, d) in bf16.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from lab.benchmarks.codegen_wanted import Timed, Wanted, compile_whole, no_device

BATCH, ROWS, HEADS = 2, 4096, 8
TILE = 128


def compile_flash(wanted: Wanted, timed: Timed) -> None:
    """flash-attn-4: its interface on fake tensors chooses tile, CTA group and registers itself."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lab.foreign import flash_attention

    interface = flash_attention()
    d, dv = wanted.head_dim, wanted.head_dim_v
    with mock.patch.object(interface.cute, "compile", timed), no_device(), FakeTensorMode():
        tensors = [
            torch.empty(BATCH, ROWS, HEADS, dim, dtype=torch.bfloat16, device="cuda")
            for dim in (d, d, dv, dv, dv)
        ]
        lse = torch.empty(BATCH, HEADS, ROWS, dtype=torch.float32, device="cuda")
        interface._flash_attn_bwd(*tensors, lse, causal=wanted.causal)


def compile_cudnn(wanted: Wanted, timed: Timed) -> None:
    """cuDNN's open kernel that adds dQ by TMA, its choice where sums may be in any order."""
    import cutlass
    from cudnn.frost import compiled_cache
    from cudnn.sdpa.bwd.d128_contract import workspace_layout

    if (wanted.head_dim, wanted.head_dim_v) != (TILE, TILE):
        raise ValueError("cuDNN's open backward kernel of this kind is of head dim 128 alone")
    with mock.patch.object(compiled_cache, "compile_cached", timed), no_device():
        from cudnn.sdpa.bwd.kernels.sm100 import prepared_d128_accum_host

        shape = (BATCH, ROWS, HEADS, TILE)
        operand = shape, (ROWS * HEADS * TILE, HEADS * TILE, TILE, 1)
        lse = (BATCH, HEADS, ROWS), (HEADS * ROWS, ROWS, 1)
        geometry = (*[operand] * 5, lse, *[operand] * 3)
        regions, _ = workspace_layout(BATCH, HEADS, ROWS)
        prepared_d128_accum_host.compile_host(
            geometry, regions, cutlass.BFloat16, wanted.causal, 100
        )


def compile_example(wanted: Wanted, timed: Timed) -> None:
    """NVIDIA's backward example of CuTe-DSL 4.7, as its own main program compiles it."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from lab.foreign import SITE, example

    sys.path.append(str(SITE))  # whose package has it
    module = example("blackwell/fmha_bwd.py")
    kind, dim = module.BlackwellFusedMultiHeadAttentionBackward, wanted.head_dim
    if dim != wanted.head_dim_v:
        raise ValueError("NVIDIA's example has one head dim")
    rows = make_fake_tensor(
        cutlass.BFloat16,
        (ROWS, dim, 1, HEADS, BATCH),
        stride=(HEADS * dim, 1, dim, dim, ROWS * HEADS * dim),
        assumed_align=16,
    )
    lse = make_fake_tensor(
        cutlass.Float32,
        (ROWS, 1, HEADS, BATCH),
        stride=(1, ROWS, ROWS, HEADS * ROWS),
        assumed_align=16,
    )
    num_bytes = kind._get_workspace_size(ROWS, ROWS, dim, HEADS, BATCH, cutlass.Float32)
    workspace = make_fake_tensor(cutlass.Uint8, (num_bytes,), stride=(1,), assumed_align=16)
    masks = module.fmha_utils.MaskEnum
    kernel = kind(
        cutlass.BFloat16, cutlass.Float32, (TILE, TILE, dim), False, masks.WINDOW_MASK_BWD
    )
    right = cutlass.Int32(0) if wanted.causal else None
    with no_device():
        timed(
            kernel, (ROWS, ROWS, dim, ((1, HEADS), BATCH)), *[rows] * 8, lse, None, None,
            dim**-0.5, None, right, workspace, make_fake_stream(),
        )  # fmt: skip


def compile_ours(wanted: Wanted, timed: Timed) -> None:
    """fa4's kernels."""
    from fa4.compiled.backward import compile_backward

    spec = our_spec(wanted)
    timed.run(lambda: compile_whole(spec, compile_backward))


def our_spec(wanted: Wanted) -> Any:
    """The `BackwardSpec` of kernels of ours."""
    from fa4.sm100.backward.spec import BackwardSpec

    return BackwardSpec(
        head_dim=wanted.head_dim,
        head_dim_v=wanted.head_dim_v,
        causal=wanted.causal,
        cta_group=wanted.cta_group,
        deterministic=wanted.deterministic,
    )
