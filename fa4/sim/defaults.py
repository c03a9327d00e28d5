"""The pipeline that FlashAttention-4 would choose for a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4.config import (
    PRODUCT_DEPTH_BYTES,
    WARPGROUP_ROWS,
    BackwardConfig,
    BackwardPipeline,
    ForwardConfig,
    ForwardPipeline,
    Problem,
    WarpgroupPipeline,
)
from fa4.hardware import Gpu
from fa4.plan.backward_serial import SERIAL_DIMS
from fa4.plan.warpgroup_tuned import WarpgroupProblem, tuned_warpgroups


def element_bytes(dtype: str) -> int:
    """Bytes of an element; ValueError for a type the kernels do not take."""
    sizes = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {', '.join(sizes)}; got {dtype!r}")
    return sizes[dtype]


EXPS_PER_CLK = 16  # of the SMs for which a share of the exponentials is emulated


def default_forward(problem: Problem, gpu: Gpu, *, design: str = "fa4") -> ForwardPipeline:
    """Forward choices of flash_attn.cute, with a design's registers.

    Pairs without a mask, longest first with one.

    Two CTAs share operands for head dims of 128 and 192 (dv 128) without causal mask or window,
    when a sequence has more than one block of rows. B300's exponential units are twice as fast, so
    nothing is emulated there.
    """
    masked = problem.window_size != (None, None)
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_k)
    padded = 128 if 96 < problem.head_dim <= 128 else problem.head_dim
    pair = not masked and padded in (128, 192) and problem.head_dim_v == 128 and rows > 256
    numerics = ForwardConfig.tuned(problem.dtype, problem.head_dim, masked)
    if gpu.exp_per_clk > EXPS_PER_CLK:
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
        design=design,
    )


def one_tile_if_wide(pipeline: ForwardPipeline, gpu: Gpu) -> ForwardPipeline:
    """With one Q tile per CTA where two do not fit into tensor memory; no kernel here has that."""
    numerics = pipeline.numerics
    columns = numerics.tile_n + pipeline.head_dim_v
    if not columns <= gpu.tmem_cols < numerics.q_tiles * columns:
        return pipeline
    return replace(pipeline, numerics=replace(numerics, q_tiles=1))


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
    last_first = deterministic and hides_last
    numerics = BackwardConfig(
        cta_group=2 if pair else 1, dq_order="descending" if last_first else "ascending"
    )
    return BackwardPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.window_size != (None, None),
        numerics=numerics,
        deterministic=deterministic,
        scheduler="spt" if last_first else "naive",
        design=design,
    )


def default_warpgroups(problem: Problem, gpu: Gpu) -> WarpgroupPipeline:
    """Choices of this package's Hopper kernel, whose Q tiles pack the heads of a group."""
    left, right = problem.window_size
    group = problem.heads_q // problem.heads_k
    packed = group if WARPGROUP_ROWS % group == 0 else 1
    wanted = WarpgroupProblem(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        rows=problem.seqlen_q * packed,
        keys=problem.seqlen_k,
        heads=problem.heads_q // packed,
        batch=problem.batch,
        masked=(left, right) != (None, None),
        causal=left is None and right == 0,
        element_bytes=element_bytes(problem.dtype),
    )
    return tuned_warpgroups(wanted, gpu)


@dataclass(frozen=True)
class HopperTile:
    """Rows, keys, and from where P enters P V."""

    tile_m: int
    tile_n: int
    p_source: str = "registers"


# Largest head dim -> tile with and without a mask: flash_attn.cute's Hopper forward.
HOPPER_TILES = {
    64: (HopperTile(192, 128), HopperTile(192, 128)),
    96: (HopperTile(192, 144, "smem"), HopperTile(192, 128, "smem")),
    128: (HopperTile(128, 128), HopperTile(128, 128)),
    192: (HopperTile(128, 128), HopperTile(128, 128)),
    256: (HopperTile(128, 80), HopperTile(128, 80)),
}


def default_hopper(problem: Problem, gpu: Gpu, *, design: str) -> WarpgroupPipeline:
    """Choices of a design's Hopper forward; ours takes its CTAs' work longest first if masked."""
    if design != "fa4":
        return published_hopper(problem)
    masked = problem.window_size != (None, None)
    tuned = default_warpgroups(problem, gpu)
    if masked:  # a CTA per work tile: none comes ahead of another one's end
        return replace(tuned, scheduler="lpt", ahead=False)
    return tuned


def whole_products(tile_n: int, size: int) -> int:
    """The keys of a tile for 16-bit types, less those that an instruction of P V on `size` bytes
    an element would not be full of: FP8 takes 32 at a time."""
    return tile_n - tile_n % (PRODUCT_DEPTH_BYTES // size)


def published_hopper(problem: Problem) -> WarpgroupPipeline:
    """Choices of flash_attn.cute's Hopper forward: a CTA per work tile, longest first if masked."""
    masked = problem.window_size != (None, None)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > max(HOPPER_TILES):
        raise ValueError(f"head dims of fa3 are at most {max(HOPPER_TILES)}; got {widest}")
    tile = HOPPER_TILES[min(dim for dim in HOPPER_TILES if dim >= widest)][masked]
    size = element_bytes(problem.dtype)
    return WarpgroupPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=size,
        causal=masked,
        tile_n=whole_products(tile.tile_n, size),
        consumers=tile.tile_m // WARPGROUP_ROWS,
        p_source=tile.p_source,
        design="flash_attn.cute",
        scheduler="lpt" if masked else "naive",
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
        design="flash_attn.cute",
    )
