"""flash-attn-4's forward kernel on Hopper, and FlashAttention-3's, which it descends from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, Problem, WarpgroupPipeline
from fa4.designs import hopper_forward
from fa4.designs.amounts import element_bytes
from fa4.hardware import Gpu


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


def whole_products(tile_n: int, size: int) -> int:
    """The keys of a tile for 16-bit types, less those that an instruction of P V on `size` bytes
    an element would not be full of: FP8 takes 32 at a time."""
    return tile_n - tile_n % (PRODUCT_DEPTH_BYTES // size)


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> WarpgroupPipeline:
    """Choices of flash_attn.cute's Hopper forward: a CTA per work tile, longest first if masked."""
    masked = problem.window_size != (None, None)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > max(HOPPER_TILES):
        raise ValueError(f"its head dims are at most {max(HOPPER_TILES)}; got {widest}")
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
        published=True,
        scheduler="lpt" if masked else "naive",
    )


DESIGN = replace(
    hopper_forward.DESIGN,
    name="published_hopper",
    kernel="published",
    about="flash-attn-4's kernels",
    traits={"published": True},
    choose=choose,
    compiled=None,
    explored=None,
    measured_as="",
)
