"""The pipeline that FlashAttention-4 would choose for a problem."""

from __future__ import annotations

from fa4.config import (
    BackwardConfig,
    BackwardPipeline,
    ForwardConfig,
    ForwardPipeline,
    Problem,
    WarpgroupPipeline,
)
from fa4.hardware import Gpu
from fa4.plan.backward_serial import SERIAL_DIMS


def element_bytes(dtype: str) -> int:
    """Bytes of an element; ValueError for a type the kernels do not take."""
    sizes = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {', '.join(sizes)}; got {dtype!r}")
    return sizes[dtype]


def default_forward(problem: Problem, gpu: Gpu) -> ForwardPipeline:
    """Forward choices of flash_attn.cute: pairs without a mask, longest first with one.

    Two CTAs share operands for head dims of 128 and 192 (dv 128) without causal mask or window,
    when a sequence has more than one block of rows. B300's exponential units are twice as fast, so
    nothing is emulated there.
    """
    masked = problem.window_size != (None, None)
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_k)
    padded = 128 if 96 < problem.head_dim <= 128 else problem.head_dim
    pair = not masked and padded in (128, 192) and problem.head_dim_v == 128 and rows > 256
    numerics = ForwardConfig.tuned(problem.dtype, problem.head_dim, masked)
    if gpu.arch == "sm_103a":
        numerics = ForwardConfig(
            rescale_threshold_log2=numerics.rescale_threshold_log2,
            p_offset_log2=numerics.p_offset_log2,
        )
    return ForwardPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=element_bytes(problem.dtype),
        causal=masked,
        numerics=numerics,
        cta_group=2 if pair else 1,
        scheduler="lpt" if masked else "static",
    )


def default_backward(
    problem: Problem, *, deterministic: bool = False, design: str = "fa4"
) -> BackwardPipeline:
    """Backward choices of a design, as its kernels make them.

    Both run last keys first in a fixed order of sums where a mask hides them from the first rows,
    flash_attn.cute under any mask. Pairs: this package's at (128, 128) with keys for both CTAs and
    at (192, 128), flash_attn.cute's from head dim 128 on.
    """
    dims, (left, right) = (problem.head_dim, problem.head_dim_v), problem.window_size
    if design == "fa4":
        pair = dims == SERIAL_DIMS or (dims == (128, 128) and problem.seqlen_k > 128)
        hides_last = right is not None
    else:
        pair, hides_last = problem.head_dim >= 128, (left, right) != (None, None)
    return BackwardPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.window_size != (None, None),
        numerics=BackwardConfig(cta_group=2 if pair else 1),
        deterministic=deterministic,
        scheduler="spt" if deterministic and hides_last else "naive",
        design=design,
    )


def default_hopper(problem: Problem, gpu: Gpu) -> WarpgroupPipeline:
    """A FlashAttention-3-like kernel: two warpgroups of 64 rows that take turns.

    Without the second overlap (next S beside this P V), which the measured cuDNN kernels do not
    show (docs/simulator.md).
    """
    masked = problem.window_size != (None, None)
    return WarpgroupPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=element_bytes(problem.dtype),
        causal=masked,
        overlap=False,
        scheduler="lpt" if masked else "static",
    )


def default_serial(problem: Problem) -> WarpgroupPipeline:
    """A FlashAttention-2-like kernel: 128 rows, products and softmax of a warpgroup alternate."""
    return WarpgroupPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=element_bytes(problem.dtype),
        causal=problem.window_size != (None, None),
        tile_n=64,
        ping_pong=False,
        overlap=False,
        scheduler="naive",
    )
