"""The plan of a compiled kernel with its own instruction counts, for the simulator.

The emulator runs one work tile of the kernel with two numbers of keys. The instructions that a role
executes more in the longer run are those of its loop over KV tiles.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from fa4.compiled.build import build
from fa4.compiled.launch import launch_arguments
from fa4.compiled.support import ForwardCall
from fa4.dtypes import numpy_dtype
from fa4.inspect.pipes import pipe_amounts
from fa4.plan.counted_math import with_measured_math
from fa4.plan.schema import Math, PipelinePlan
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.halves.spec import HalvesSpec

EXTRA_TILES = 2  # KV tiles that the longer run has more


def measured_plan(spec: ForwardSpec | HalvesSpec) -> PipelinePlan:
    """The plan with the counts of `tile_amounts`. Raises as `tile_amounts` does."""
    return with_measured_math(spec.plan, tile_amounts(spec))


def tile_amounts(spec: ForwardSpec | HalvesSpec) -> dict[str, Math]:
    """Instructions per thread and unmasked KV tile of the softmax and correction roles, counted.

    Nothing is rescaled in these runs. Raises ValueError for a spec with features that need more
    than q, k and v, ImportError if the compiler is not installed.
    """
    short, long = (_count(spec, extra) for extra in (0, EXTRA_TILES))
    keys = getattr(spec.pipeline, "piece", spec.tile_n)  # of a softmax thread
    emulated = sum(spec.numerics.exp2.emulated_columns(keys))
    amounts = {}
    for role in spec.plan.roles:
        if role.name != "correction" and not role.name.startswith("softmax"):
            continue
        warp = role.warps[0]
        more = {
            opcode: (count - short[warp][opcode]) / (EXTRA_TILES * spec.cta_group)
            for opcode, count in long[warp].items()
        }
        lone = emulated if role.name != "correction" else 0
        amounts[role.name] = pipe_amounts(more, lone)
    return amounts


def _count(spec: ForwardSpec | HalvesSpec, extra_tiles: int) -> dict[int, Counter[str]]:
    """Warp instructions by warp and opcode for one work tile whose queries are also keys."""
    from fa4 import emulator

    refused = [name for name in ("window_left", "window_right", "packed_q", "packed_k", "used_q",
                                 "used_k", "sink", "softcap", "score_mod", "mask_mod", "mask")
               if getattr(spec, name)]  # fmt: skip
    if refused:
        raise ValueError(f"instructions are counted of plain or causal kernels; got {refused[0]}")
    rows = spec.pipeline.block_rows
    keys = rows + extra_tiles * spec.numerics.tile_n
    call = ForwardCall(
        dtype=spec.dtype, head_dim=spec.head_dim, head_dim_v=spec.head_dim_v,
        heads_q=spec.group, heads_k=1, batch=1, rows_q=rows // spec.group, rows_k=keys,
        softmax_scale=1.0, window=(None, 0 if spec.causal else None), lse=spec.lse,
        numerics=spec.numerics,
    )  # fmt: skip
    heads, dims = (spec.group, 1, 1), (spec.head_dim, spec.head_dim, spec.head_dim_v)
    lengths = (call.rows_q, keys, keys)
    q, k, v = (
        np.zeros((1, *size), numpy_dtype(spec.dtype))
        for size in zip(lengths, heads, dims, strict=True)
    )
    out = np.zeros((*q.shape[:-1], spec.head_dim_v), q.dtype)
    lse = np.zeros((1, spec.group, call.rows_q), np.float32)
    names = ("sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "aux")
    values = launch_arguments(
        call, spec, (q, k, v), (out, lse), dict.fromkeys(names), spec.cta_group
    )
    drawn = [np.zeros(1, np.int32)] if getattr(spec, "draws_work", False) else []
    (report,) = emulator.launch(build(spec, spec.gpu.arch), *values, *drawn, checks=False)
    return report.by_warp
