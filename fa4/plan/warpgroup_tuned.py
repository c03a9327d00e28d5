"""Which tiles a Hopper forward kernel gets for a problem: the one place where they are chosen.

Measured on an H200: TFLOP/s of the kernel in `fa4.sm90.forward`, bf16, two sequences of 16k tokens,
hidden size 2048, by `hardware.warpgroup_forward.measure`; those of 64 rows are assumed where their
comment says so, at the share that they reach with head dim 128. Long problems take the fastest
tile. A short one takes that with which all SMs have work and little of it is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.warpgroup import warpgroup_plan


@dataclass(frozen=True)
class WarpgroupTile:
    """Warpgroups of 64 rows, keys of a KV tile, what was measured; stages of a ring.

    turns_to: up to how many keys of a sequence the warpgroups take turns at the tensor core.
    keys_to: up to how many the tile is taken at all; 0 for any. ahead: where a CTA strides over
    work tiles, it starts the next one's first S before it stores this one's O. promote: as of
    `WarpgroupPipeline`.
    """

    consumers: int
    tile_n: int
    tflops: float
    turns_to: int = 0
    kv_stages: int = 2
    keys_to: int = 0
    ahead: bool = False
    promote: int = 0


_ONE = 482 / 710  # of the speed of two warpgroups has one: measured, d 128, 128 keys

# (largest d and dv, masked) -> tiles, the fastest first. (192, 128) is the class of dv to 128. The
# rates of tiles of short sequences, and of head dim 96's two warpgroups, are what calls of 512 and
# 1k tokens come to by `_cost`.
# Without a mask, times what that call's last wave of work tiles leaves idle on 132 SMs.
TILES: dict[tuple[int, bool], tuple[WarpgroupTile, ...]] = {
    (64, False): (
        WarpgroupTile(3, 128, 610 * 1.007, turns_to=2048, kv_stages=4, keys_to=2048, ahead=True),
        WarpgroupTile(3, 128, 610 * 1.007, kv_stages=4),
        WarpgroupTile(2, 128, 412 * 1.015),
        WarpgroupTile(1, 128, 412 * _ONE * 1.015),  # assumed
    ),
    (64, True): (
        WarpgroupTile(3, 64, 640, kv_stages=6, keys_to=1024, ahead=True),
        WarpgroupTile(3, 128, 581, turns_to=4096, kv_stages=4, ahead=True),
        WarpgroupTile(2, 128, 395),
        WarpgroupTile(1, 128, 395 * _ONE),  # assumed
    ),
    (96, False): (
        WarpgroupTile(3, 96, 728 * 1.007, kv_stages=3, ahead=True),
        WarpgroupTile(2, 128, 585),
        WarpgroupTile(1, 128, 585 * _ONE),  # assumed
    ),
    (96, True): (
        WarpgroupTile(3, 64, 730, kv_stages=4, keys_to=2048, ahead=True),
        WarpgroupTile(3, 112, 699),
        WarpgroupTile(2, 128, 580),
        WarpgroupTile(1, 128, 580 * _ONE),  # assumed
    ),
    (128, False): (
        WarpgroupTile(3, 80, 820 * 1.007, ahead=True),
        WarpgroupTile(2, 128, 750 * 1.031),
        WarpgroupTile(1, 128, 750 * _ONE * 1.031),  # assumed
    ),
    (128, True): (
        WarpgroupTile(3, 80, 796),
        WarpgroupTile(2, 128, 796 * 700 / 749),  # both a CTA per work tile
        WarpgroupTile(1, 128, 796 * 700 / 749 * _ONE),  # assumed
    ),
    (192, False): (
        WarpgroupTile(3, 80, 825 * 1.007),
        WarpgroupTile(2, 128, 769 * 1.031),
        WarpgroupTile(1, 128, 769 * _ONE * 1.031),  # assumed
    ),
    (192, True): (
        WarpgroupTile(3, 64, 788),
        WarpgroupTile(1, 128, 733 * _ONE),  # assumed
    ),
    (256, False): (
        WarpgroupTile(2, 80, 821 * 1.031),
        WarpgroupTile(1, 80, 821 * _ONE * 1.031),  # assumed
    ),
    (256, True): (
        WarpgroupTile(2, 64, 803),
        WarpgroupTile(1, 64, 803 * _ONE),  # assumed
    ),
}

# Of 8-bit types: measured by `hardware.warpgroup_fp8.measure`, 32k tokens, hidden size 2048; those
# of one warpgroup, of head dims 96 and 192 and under a mask of all but 128 assumed alike.
NARROW_TILES: dict[tuple[int, bool], tuple[WarpgroupTile, ...]] = {
    **dict.fromkeys(
        ((64, False), (64, True)),
        (
            WarpgroupTile(3, 160, 700, kv_stages=4, ahead=True, promote=4),
            WarpgroupTile(2, 128, 560, kv_stages=3, ahead=True, promote=6),
            WarpgroupTile(1, 128, 560 * _ONE, promote=6),
        ),
    ),
    **dict.fromkeys(
        ((96, False), (96, True), (128, False), (128, True)),
        (
            WarpgroupTile(3, 96, 1060, kv_stages=3, ahead=True, promote=8),
            WarpgroupTile(2, 128, 900, kv_stages=3, ahead=True, promote=6),
            WarpgroupTile(1, 128, 900 * _ONE, promote=6),
        ),
    ),
    **dict.fromkeys(
        ((192, False), (192, True), (256, False), (256, True)),
        (WarpgroupTile(2, 64, 900, promote=12), WarpgroupTile(1, 64, 900 * _ONE, promote=12)),
    ),
}
# Keys' worth of time that a work tile costs beside its steps: its first S and its store. From the
# same run: calls of 512 to 4k tokens beside those of 16k, head dims 64 and 128.
START_KEYS = 160
START_KEYS_CAUSAL = {1: 80, 2: 80, 3: 120}  # by warpgroups; of one, assumed


@dataclass(frozen=True, kw_only=True)
class WarpgroupProblem:
    """What the choice looks at. rows: of the longest sequence, times the heads packed in a tile.

    heads: blocks of rows of one sequence are counted for each. keys: of a sequence, on average.
    masked: do rows see different keys? causal: about half of them? element_bytes: of q, k and v.
    """

    head_dim: int
    head_dim_v: int
    rows: int
    keys: int
    heads: int
    batch: int
    masked: bool = False
    causal: bool = False
    element_bytes: int = 2


@lru_cache(maxsize=1024)
def tuned_warpgroups(problem: WarpgroupProblem, gpu: Gpu) -> WarpgroupPipeline:
    """The pipeline of a problem on a machine of compute capability 9.0; head dims padded by 16.

    Raises ValueError for head dims above 256, and where no tile fits the machine.
    """
    found = list(_fitting(problem, gpu))
    if not found:
        dims = problem.head_dim, problem.head_dim_v
        raise ValueError(f"no tile of (d, dv) = {dims} fits into {gpu.name}'s shared memory")
    return min(found, key=lambda one: _cost(one[0], problem, gpu.sm_count))[1]


def whole_depth(dim: int, element_bytes: int) -> int:
    """A head dimension, padded to what products of such elements take at a time."""
    depth = PRODUCT_DEPTH_BYTES // element_bytes
    return -(-dim // depth) * depth


def work_tiles(consumers: int, problem: WarpgroupProblem) -> int:
    """How many there are, of all sequences and heads."""
    blocks = -(-max(problem.rows, 1) // (consumers * WARPGROUP_ROWS))
    return blocks * problem.heads * problem.batch


def _fitting(
    problem: WarpgroupProblem, gpu: Gpu
) -> Iterator[tuple[WarpgroupTile, WarpgroupPipeline]]:
    """The tiles of the head dims, with fewer keys where they do not fit the machine."""
    for tile in _measured(problem):
        if 0 < tile.keys_to < problem.keys:
            continue
        for tile_n in range(tile.tile_n, 0, -PRODUCT_DEPTH_BYTES // problem.element_bytes):
            pipeline = WarpgroupPipeline(
                head_dim=problem.head_dim,
                head_dim_v=problem.head_dim_v,
                element_bytes=problem.element_bytes,
                causal=problem.masked,
                tile_n=tile_n,
                consumers=tile.consumers,
                kv_stages=tile.kv_stages,
                ping_pong=0 < problem.keys <= tile.turns_to,
                ahead=tile.ahead,
                promote=tile.promote,
            )
            try:
                plan = warpgroup_plan(pipeline, gpu)
            except ValueError:  # too large for shared memory
                continue
            if not any(role.spilled_registers for role in plan.roles):
                yield WarpgroupTile(tile.consumers, tile_n, tile.tflops), pipeline
                break


def _measured(problem: WarpgroupProblem) -> tuple[WarpgroupTile, ...]:
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 256:
        raise ValueError(f"head dims are at most 256; got {widest}")
    if widest > 128:
        widest = 192 if widest <= 192 and problem.head_dim_v <= 128 else 256
    width = min(dim for dim, _ in TILES if dim >= widest)
    return (TILES if problem.element_bytes == 2 else NARROW_TILES)[width, problem.masked]


def _cost(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int) -> float:
    """Time of all work tiles, in rows times keys per TFLOP/s.

    Tiles of equal length come in waves; those of unequal length fill all SMs, but none ends before
    the longest does.
    """
    rows = tile.consumers * WARPGROUP_ROWS
    keys = -(-max(problem.keys, 1) // tile.tile_n) * tile.tile_n
    start = START_KEYS_CAUSAL[tile.consumers] if problem.causal else START_KEYS
    longest = rows * (keys + start) / tile.tflops
    count = work_tiles(tile.consumers, problem)
    if not problem.causal:
        return -(-count // sms) * longest
    mean = rows * (min(keys, (problem.keys + rows + tile.tile_n) / 2) + start) / tile.tflops
    return max(count / sms * mean, longest)
