"""Which tiles, warpgroups and order of work a Hopper kernel has, by head dims, mask and length.

Measured on an H200 (hardware/warpgroup_forward): the fastest of the variants that fit registers and
shared memory.
"""

from __future__ import annotations

from typing import Any

from fa4.sm100.kit.units import padded_dim

SHORT = 1024  # queries: up to so many, tiles of 128 rows leave fewer rows and keys unused
PERSISTENT_ORDER = {False: "static", True: "snake"}  # by: do work tiles differ in length?


def tuned_choices(head_dim: int, head_dim_v: int, uneven: bool, queries: int) -> dict[str, Any]:
    """Fields of a `WarpgroupSpec`. uneven: a mask makes work tiles longer and shorter."""
    consumers, tile_n = _tile(padded_dim(head_dim), padded_dim(head_dim_v), uneven, queries)
    return {
        "consumers": consumers,
        "tile_n": tile_n,
        "scheduler": PERSISTENT_ORDER[uneven],
    }


def _tile(d: int, dv: int, uneven: bool, queries: int) -> tuple[int, int]:
    widest = max(d, dv)
    short = queries <= SHORT
    if widest <= 64:
        return (2, 128) if uneven and short else (3, 128)
    if widest <= 96:
        return (3, 96) if short else (3, 112)
    if widest <= 128:
        return (2, 128) if uneven or short else (3, 80)
    if dv <= 128 and d <= 192:
        return 2, 128
    return (2, 112) if widest <= 192 else (2, 80)
