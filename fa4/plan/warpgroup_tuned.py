"""Which tiles a Hopper forward kernel gets for a problem: the one place where they are chosen.

Measured on an H200 at 1,980 MHz with `hardware.warpgroup_forward.measure`: bf16, 16k tokens, hidden
size 2048. Long problems take the fastest tile. A short one takes that with which all SMs have work,
little of it is padding and not much is spent on the beginning and the end of work tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fa4.config import WARPGROUP_ROWS, WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.warpgroup import warpgroup_plan


@dataclass(frozen=True)
class WarpgroupTile:
    """Warpgroups of 64 rows and keys of a KV tile, and what they were measured at.

    tflops: with one sequence of 16k. start: what a work tile takes beside its keys, in rows times
    keys per TFLOP/s, from sequences of 512 or 1k.
    """

    consumers: int
    tile_n: int
    tflops: float
    start: float


# Of one warpgroup, measured with d 128: what it reaches of the speed of two, and its start.
_ONE, _ONE_START = 475 / 711, 20
# (largest d and dv, masked) -> tiles, that of fewest warpgroups last. 192: of dv up to 128.
TILES: dict[tuple[int, bool], tuple[WarpgroupTile, ...]] = {
    (64, False): (WarpgroupTile(3, 128, 596, 91), WarpgroupTile(2, 128, 449, 47)),
    (64, True): (WarpgroupTile(3, 128, 566, 109), WarpgroupTile(2, 128, 466, 46)),
    (96, False): (WarpgroupTile(3, 112, 687, 49), WarpgroupTile(3, 96, 677, 43)),
    (96, True): (WarpgroupTile(3, 112, 618, 42), WarpgroupTile(3, 96, 608, 38)),
    (128, False): (
        WarpgroupTile(3, 80, 775, 38),
        WarpgroupTile(2, 144, 741, 46),
        WarpgroupTile(2, 128, 735, 36),
    ),
    (128, True): (WarpgroupTile(3, 80, 703, 47), WarpgroupTile(2, 128, 734, 32)),
    (192, False): (WarpgroupTile(2, 128, 769, 41),),
    (192, True): (WarpgroupTile(2, 128, 733, 39), WarpgroupTile(2, 112, 732, 46)),
    (256, False): (WarpgroupTile(2, 80, 829, 34),),
    (256, True): (WarpgroupTile(2, 80, 808, 42), WarpgroupTile(2, 64, 785, 39)),
}


@dataclass(frozen=True, kw_only=True)
class WarpgroupProblem:
    """What the choice looks at. rows: of the longest sequence, times the heads packed in a tile.

    heads: blocks of rows of one sequence are counted for each. keys: of a sequence, on average.
    masked: do rows see different keys? causal: about half of them?
    """

    head_dim: int
    head_dim_v: int
    rows: int
    keys: int
    heads: int
    batch: int
    masked: bool = False
    causal: bool = False


@lru_cache(maxsize=1024)
def tuned_warpgroups(problem: WarpgroupProblem, gpu: Gpu) -> WarpgroupPipeline:
    """The pipeline of a problem on a machine of compute capability 9.0; head dims as the kernel's.

    Raises ValueError for head dims above 256, and where no tile fits the machine.
    """
    found = list(_fitting(problem, gpu))
    if not found:
        dims = problem.head_dim, problem.head_dim_v
        raise ValueError(f"no tile of (d, dv) = {dims} fits into {gpu.name}'s shared memory")
    return min(found, key=lambda one: _cost(one[0], problem, gpu.sm_count))[1]


def _fitting(
    problem: WarpgroupProblem, gpu: Gpu
) -> Iterator[tuple[WarpgroupTile, WarpgroupPipeline]]:
    """The tiles of the head dims, with fewer keys where they do not fit the machine."""
    for tile in _measured(problem):
        for tile_n in range(tile.tile_n, 0, -16):
            pipeline = WarpgroupPipeline(
                head_dim=problem.head_dim,
                head_dim_v=problem.head_dim_v,
                causal=problem.masked,
                tile_n=tile_n,
                consumers=tile.consumers,
                scheduler="lpt" if problem.masked else "static",
            )
            try:
                plan = warpgroup_plan(pipeline, gpu)
            except ValueError:  # too large for shared memory
                continue
            if not any(role.spilled_registers for role in plan.roles):
                yield WarpgroupTile(tile.consumers, tile_n, tile.tflops, tile.start), pipeline
                break


def _measured(problem: WarpgroupProblem) -> tuple[WarpgroupTile, ...]:
    """Those of the head dims' class, and one warpgroup alone, for few rows."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 256:
        raise ValueError(f"head dims are at most 256; got {widest}")
    if widest > 128:
        widest = 192 if widest <= 192 and problem.head_dim_v <= 128 else 256
    tiles = TILES[min(dim for dim, _ in TILES if dim >= widest), problem.masked]
    two = tiles[-1]
    return *tiles, WarpgroupTile(1, two.tile_n, two.tflops * _ONE, _ONE_START)


def _cost(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int) -> float:
    """Time of all work tiles, in rows times keys per TFLOP/s.

    Tiles of equal length come in waves; those of unequal length fill all SMs, but none ends before
    the longest does.
    """
    rows = tile.consumers * WARPGROUP_ROWS
    blocks = -(-max(problem.rows, 1) // rows)
    shares = [(i + 1) / blocks for i in range(blocks)] if problem.causal else [1.0]
    steps = [max(1, -(-problem.keys * share // tile.tile_n)) for share in shares]
    times = [rows * tile.tile_n * count / tile.tflops + tile.start for count in steps]
    tiles = blocks * problem.heads * problem.batch
    if not problem.causal:
        return -(-tiles // sms) * times[0]
    return max(tiles / sms * sum(times) / blocks, times[-1])
