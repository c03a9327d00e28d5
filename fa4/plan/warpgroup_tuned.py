"""Which tiles a Hopper forward kernel gets for a problem: the one place where they are chosen.

`warpgroup_rates` has what was measured of every tile that fits: a rate and what a work tile costs
beside its keys. A problem takes the tile, and the number of parts of its keys, with which all work
tiles take least time: SMs that have none, and rows and keys of padding, cost as much as others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_narrow_rates import NARROW_RATES
from fa4.plan.warpgroup_rates import RATES


class WarpgroupTile(NamedTuple):
    """Warpgroups of 64 rows, keys of a KV tile, stages of a ring, and what was measured.

    start: what a work tile costs beside its keys, in keys. turns: the warpgroups take turns at the
    tensor core. ahead: a CTA strides over work tiles, back and forth under a mask, and starts the
    next one's first S before it stores this one's O; otherwise, under a mask, each has one.
    promote: as of `WarpgroupPipeline`.
    """

    consumers: int
    tile_n: int
    kv_stages: int
    tflops: float
    start: float
    turns: bool = False
    ahead: bool = False
    promote: int = 0


# Of divided keys: the most parts and the fewest KV tiles of one, waves of CTAs that are considered;
# what HBM gives an H200 and one CTA, what L2 gives O's parts, a second launch.
MOST_SPLITS, FEWEST_TILES, SPLIT_WAVES = 128, 2, 3
MEMORY_BYTES_PER_S, CTA_BYTES_PER_S, PARTS_BYTES_PER_S = 4.2e12, 5e10, 3e12
COMBINE_SECONDS = 4e-6
# Rows of these head dims in memory begin within a sector of 32 bytes. Random calls took 1.28, 1.40
# and 1.36 times what tiles of 112 and 224 columns, in rows of 32 and 64 bytes, should take (medians
# of lab/hardware/results/hopper_random.json and the run before); of 120, 184 and 248, in rows of
# 128 bytes, 1.04 to 1.09 times. By that, these are the faster ones: assumed, not measured since.
WIDER = {104: 128, 200: 256, 216: 256}
SWIZZLED_COLUMNS = (32, 64)  # of 16 bits, in 64 and 128 bytes
# Of 15 calls the 8 whose wider rows should take a smaller share of the time were 5 to 22% faster,
# and 4 of the 7 others slower (measured).
WIDER_SHARE = 0.95
# Keys of a window up to which CTAs stride over its work tiles: 1 to 11% faster with 170 to 1,150
# keys, 1% slower with 1,400, 8% with 2,300; 14% with rows swizzled in 32 bytes (measured).
MOST_STRIDDEN = 1152
# Keys of a sequence from which on O of 8-bit values is promoted. What the tensor core's sums lose
# grows with them; up to here they are left as they are, as in FlashAttention-3, for speed.
PROMOTED_FROM = 16384 + 1
# Rows of blocks that run at once back and forth, by warpgroups: of 2 to 16 those whose worst CTA,
# of causal calls on 132 CTAs with 2k to 32k tokens, has least to do beyond the average.
ROWS_AT_ONCE = {1: 4, 2: 4, 3: 2}
# Up to 66 MiB at once were as fast back and forth or faster, 128 MiB as fast or slower (measured).
AT_ONCE_BYTES = 75 << 20


@dataclass(frozen=True, kw_only=True)
class WarpgroupProblem:
    """What the choice looks at. rows: of the longest sequence, times the heads packed in a tile.

    heads: blocks of rows of one sequence are counted for each. keys: of a sequence, on average.
    masked: do rows see different keys? causal: those up to the diagonal? queries: of a sequence; 0
    for as many as keys. kv_heads: of K and V; 0 if memory is no bound. ragged: may sequences differ
    in length? num_splits: parts of the keys; 0 for as many as pay. element_bytes: of q, k and v.
    windowed: do a warpgroup's rows see `keys` of many more? any_width: may a tile have more columns
    than `padded_width` says?
    """

    head_dim: int
    head_dim_v: int
    rows: int
    keys: int
    heads: int
    batch: int
    masked: bool = False
    causal: bool = False
    kv_heads: int = 0
    queries: int = 0
    ragged: bool = False
    num_splits: int = 1
    element_bytes: int = 2
    windowed: bool = False
    any_width: bool = False


@lru_cache(maxsize=1024)
def tuned_warpgroups(problem: WarpgroupProblem, gpu: Gpu) -> WarpgroupPipeline:
    """The pipeline of a problem on a machine of compute capability 9.0; `padded_width` dims.

    Raises ValueError for head dims above 256, and where no tile fits the machine.
    """
    best: tuple[float, int, WarpgroupPipeline] | None = None
    for wide in _widths(problem):
        found = _cheapest(wide, gpu)
        if found and (best is None or found[0] < WIDER_SHARE * best[0]):
            best = found
    if best is None:
        dims = problem.head_dim, problem.head_dim_v
        raise ValueError(f"no tile of (d, dv) = {dims} fits into {gpu.name}'s shared memory")
    _, splits, pipeline = best
    return pipeline if splits == 1 else replace(pipeline, num_splits=splits, ahead=False)


def _cheapest(problem: WarpgroupProblem, gpu: Gpu) -> tuple[float, int, WarpgroupPipeline] | None:
    """Cost, parts of the keys and pipeline of the best tile of a width; None where none fits."""
    columns = problem.head_dim + problem.head_dim_v
    found = (
        (_cost(tile, problem, gpu.sm_count, splits) * columns, splits, pipeline)
        for tile, pipeline in _fitting(problem, gpu)
        for splits in _divisions(tile, problem, gpu.sm_count)
    )
    return min(found, key=lambda one: one[0], default=None)


def _widths(problem: WarpgroupProblem) -> Iterator[WarpgroupProblem]:
    """The problem, and where that is asked for with columns that are swizzled in more bytes.

    Where a work tile has few keys its start counts, which fewer and longer rows make shorter: 408
    keys of 112 columns, 234 of 128, measured.
    """
    yield problem
    d, size = problem.head_dim, problem.element_bytes
    if not problem.any_width or d != problem.head_dim_v or size != 2:
        return
    wider = {-(-d // step) * step for step in SWIZZLED_COLUMNS}
    for width in sorted(wider - {d}):
        yield replace(problem, head_dim=width, head_dim_v=width)


def padded_width(dim: int, element_bytes: int = 2) -> int:
    """Columns of a head dimension in a Hopper tile: a multiple of 16; above 160, and of 8-bit
    elements, of 32.

    In rows of 32 bytes, which others are swizzled in, the wide ones take a sixth more time or more
    than in rows of 64 (measured: 176, 208 and 240 beside 192, 224 and 256). `WIDER` has others.
    """
    if element_bytes == 2 and dim in WIDER:
        return WIDER[dim]
    step = 16 if dim <= 160 and element_bytes == 2 else 32
    return -(-dim // step) * step


def work_tiles(consumers: int, problem: WarpgroupProblem) -> int:
    """How many there are, of all sequences and heads, where keys are not divided."""
    blocks = -(-max(problem.rows, 1) // (consumers * WARPGROUP_ROWS))
    return blocks * problem.heads * problem.batch


def _divisions(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int) -> Iterator[int]:
    """Numbers of parts to choose from: those that fill whole waves of CTAs, the fewest of each."""
    if problem.num_splits:
        yield problem.num_splits
        return
    yield 1
    count, keys = work_tiles(tile.consumers, problem), -(-problem.keys // tile.tile_n)
    for waves in range(1, 1 + SPLIT_WAVES):
        splits = waves * sms // max(count, 1)
        if 1 < splits <= min(keys // FEWEST_TILES, MOST_SPLITS):
            yield splits


def back_and_forth(consumers: int, problem: WarpgroupProblem, sms: int) -> bool:
    """Do CTAs stride over work tiles of unequal length, the longest first?

    Not where the sequences of K and V that they read at once are more than L2 keeps, where an SM
    has no two work tiles, or where sequences have many lengths: the next tile fills the gap then.
    """
    if problem.ragged or work_tiles(consumers, problem) < 2 * sms:
        return False
    at_once = min(sms // ROWS_AT_ONCE[consumers], problem.heads * problem.batch)
    sharing = problem.heads // problem.kv_heads if problem.kv_heads else 1
    dims = problem.head_dim + problem.head_dim_v
    num_bytes = at_once * problem.keys * dims * problem.element_bytes
    return num_bytes // sharing <= AT_ONCE_BYTES


def strides_over(window: WarpgroupProblem, consumers: int, sms: int) -> bool:
    """Do CTAs stride over work tiles of a window, which all have about as many keys?

    What a CTA has to do before its first product, it does once then.
    """
    short = window.windowed and window.keys <= MOST_STRIDDEN
    swizzled = max(window.head_dim, window.head_dim_v) % SWIZZLED_COLUMNS[0] == 0
    return short and swizzled and back_and_forth(consumers, window, sms)


def _fitting(
    problem: WarpgroupProblem, gpu: Gpu
) -> Iterator[tuple[WarpgroupTile, WarpgroupPipeline]]:
    """The tiles of the head dims that the problem can have."""
    for tile in tiles_of(problem):
        strides = not problem.masked or back_and_forth(tile.consumers, problem, gpu.sm_count)
        if tile.ahead and not strides:
            continue
        pipeline = _pipeline(tile, problem.head_dim, problem.head_dim_v, problem.masked, gpu,
                             problem.element_bytes)  # fmt: skip
        if pipeline is not None and problem.keys < PROMOTED_FROM:
            pipeline = replace(pipeline, promote=0)
        if pipeline is not None:
            yield tile._replace(tile_n=pipeline.tile_n), pipeline


@lru_cache(maxsize=1024)
def _pipeline(
    tile: WarpgroupTile, head_dim: int, head_dim_v: int, masked: bool, gpu: Gpu, size: int
) -> WarpgroupPipeline | None:
    """A tile's, with fewer keys where these do not fit the machine; None where none do."""
    for tile_n in range(tile.tile_n, 0, -PRODUCT_DEPTH_BYTES // size):
        pipeline = WarpgroupPipeline(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            element_bytes=size,
            causal=masked,
            tile_n=tile_n,
            consumers=tile.consumers,
            kv_stages=tile.kv_stages,
            ping_pong=tile.turns,
            ahead=tile.ahead,
            promote=tile.promote,
            scheduler="lpt" if masked and not tile.ahead else "static",
        )
        try:
            plan = warpgroup_plan(pipeline, gpu)
        except ValueError:  # too large for shared memory
            continue
        if not any(role.spilled_registers for role in plan.roles):
            return pipeline
    return None


def tiles_of(problem: WarpgroupProblem) -> Iterator[WarpgroupTile]:
    """What was measured of the head dims, or of the next wider ones.

    Raises ValueError for head dims above 256.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    if max(d, dv) > 256:
        raise ValueError(f"head dims are at most 256; got {max(d, dv)}")
    rates: Mapping[tuple[int, int, bool], tuple[tuple[Any, ...], ...]]
    rates = RATES if problem.element_bytes == 2 else NARROW_RATES
    wider = [one for one in rates if one[0] >= d and one[1] >= dv and one[2] == problem.masked]
    nearest = min(wider, key=lambda one: one[0] + one[1])
    return (WarpgroupTile(*fields) for fields in rates[nearest])


def _cost(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int, splits: int = 1) -> float:
    """Time of all work tiles, in rows times keys per TFLOP/s.

    Tiles of equal length come in waves; those of unequal length fill all SMs, but none ends before
    the longest does. None is faster than K and V come from memory. What the parts of divided keys
    cost beside is `_combining_seconds`.
    """
    rows = tile.consumers * WARPGROUP_ROWS
    steps = -(-max(problem.keys, 1) // tile.tile_n)
    keys: float = -(-steps // splits) * tile.tile_n
    if problem.windowed and splits == 1:  # a window begins anywhere in a tile
        keys = problem.keys - 1 + tile.tile_n
    longest = rows * (keys + tile.start) / tile.tflops
    count = work_tiles(tile.consumers, problem) * splits
    found = -(-count // sms) * longest
    if problem.causal:
        diagonal = min(problem.queries or problem.keys, problem.keys)
        seen = problem.keys - diagonal / 2 + (rows + tile.tile_n) / 2
        seen = min(steps * tile.tile_n, seen)
        found = max(count / sms * rows * (seen / splits + tile.start) / tile.tflops, longest)
    beside = _memory_seconds(problem, min(count, sms)), _combining_seconds(problem, splits)
    units = 1e12 / (2 * (problem.head_dim + problem.head_dim_v) * sms)
    # Where memory is the bound, the tile that leaves most of the SM alone.
    return max(found, beside[0] * units) + beside[1] * units + found / 1000


def _memory_seconds(problem: WarpgroupProblem, ctas: int) -> float:
    """K and V once from memory, by so many CTAs."""
    dims = problem.head_dim + problem.head_dim_v
    num_bytes = problem.kv_heads * problem.batch * problem.keys * dims * 2
    return num_bytes / min(MEMORY_BYTES_PER_S, max(ctas, 1) * CTA_BYTES_PER_S)


def _combining_seconds(problem: WarpgroupProblem, splits: int) -> float:
    """A second launch, and the parts of O out and in; 0 where keys are not divided."""
    if splits == 1:
        return 0.0
    rows = problem.rows * problem.heads * problem.batch
    num_bytes = 8 * splits * rows * problem.head_dim_v  # float32, out and in
    return COMBINE_SECONDS + num_bytes / PARTS_BYTES_PER_S
