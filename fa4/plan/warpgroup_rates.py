"""Rates of the Hopper forward kernel's tiles, by head dims and mask, as measured on an H200.

`python -m lab.hardware.warpgroup_forward.tile_rates` writes `fa4/measured/hopper_tiles.csv` from
what `lab.hardware.warpgroup_forward.tiles` has measured.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

RATES_FILE = Path(__file__).parents[1] / "measured" / "hopper_tiles.csv"


class WarpgroupTile(NamedTuple):
    """Warpgroups of 64 rows, keys of a KV tile, stages of a ring, and what was measured.

    start: what a work tile costs beside its keys, in keys. turns: the warpgroups take turns at the
    tensor core. ahead: a CTA that has another work tile starts that one's first S before it stores
    this one's O. promote, direct: as of `WarpgroupPipeline`. columns: of how many the rows of Q and
    K, and of V, in shared memory are a multiple. alone: each work tile has a CTA.
    one_wave: of calls in which no SM has a second work tile, of all others; None: of all.
    """

    consumers: int
    tile_n: int
    kv_stages: int
    tflops: float
    start: float
    turns: bool = False
    ahead: bool = False
    promote: int = 0
    columns: int = 32
    direct: bool = False
    alone: bool = False
    one_wave: bool | None = None


TileClass = tuple[int, int, bool]  # d, dv, is there a mask?


@cache
def measured_rates() -> Mapping[TileClass, tuple[WarpgroupTile, ...]]:
    """The tiles of each class of calls, the fastest rate first."""
    found: dict[TileClass, list[WarpgroupTile]] = {}
    with RATES_FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            one = int(row["head_dim"]), int(row["head_dim_v"]), row["masked"] == "1"
            found.setdefault(one, []).append(
                WarpgroupTile(
                    consumers=int(row["consumers"]), tile_n=int(row["tile_n"]),
                    kv_stages=int(row["kv_stages"]), tflops=float(row["tflops"]),
                    start=float(row["start"]), turns=row["turns"] == "1",
                    ahead=row["ahead"] == "1", columns=int(row["columns"]),
                    direct=row["direct"] == "1", alone=row["alone"] == "1",
                    one_wave=row["one_wave"] == "1",
                )
            )  # fmt: skip
    return {one: tuple(tiles) for one, tiles in found.items()}
