"""Which tiles a Hopper forward kernel gets for a problem: the one place where they are chosen.

`warpgroup_rates` has what was measured of the tiles that fit: a rate and what a work tile costs
beside its keys. A problem takes the tile, the number of heads packed and the number of parts of its
keys with which the SM that has most to do takes least time: SMs that have none, and rows and keys
of padding, cost as much as others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, WarpgroupPipeline, Window
from fa4.hardware import Gpu
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_lengths import busiest, keys_of_blocks, keys_seen
from fa4.plan.warpgroup_narrow_rates import NARROW_RATES
from fa4.plan.warpgroup_packing import ROW_BYTES, straddles
from fa4.plan.warpgroup_rates import WarpgroupTile, measured_rates

# Of divided keys: the most parts and the fewest KV tiles of one, waves of CTAs that are considered;
# what HBM gives an H200 and one CTA, what L2 gives O's parts, a second launch.
MOST_SPLITS, FEWEST_TILES, SPLIT_WAVES = 128, 2, 3
MEMORY_BYTES_PER_S, CTA_BYTES_PER_S, PARTS_BYTES_PER_S = 4.2e12, 5e10, 3e12
COMBINE_SECONDS = 4e-6
# O from registers, as where positions straddle: by hopper_tiles.json, of 46 tiles timed both ways
# with 333 and 1,111 tokens.
STRADDLING = 1.01
# Power of the share of its keys that a tile has where all do not fit, by which its rate falls: by
# hopper_tiles.csv at head dim 256, where 48 keys instead of 80 cost 7%.
FEWER_KEYS = 0.15
# Tiles of fewer keys than those that were timed, which may fit the keys of a call better: how many
# fewer; what they are taken to be slower by beside `FEWER_KEYS`, so that none is another kernel for
# little; and up to how many KV tiles of a work tile they are considered: of more, padding is less.
FEWER, NOT_TIMED, FEWEST_KEYS, MOST_PADDED = (16, 32), 0.995, 48, 24
# A counter that is set to zero before a kernel that draws its work tiles.
QUEUE_SECONDS = 4e-6
# Keys of a sequence from which on O of 8-bit values is promoted. What the tensor core's sums lose
# grows with them; up to here they are left as they are, as in FlashAttention-3, for speed.
PROMOTED_FROM = 16384 + 1


@dataclass(frozen=True, kw_only=True)
class WarpgroupProblem:
    """What the choice looks at. rows: of the longest sequence and one head.

    heads: of queries. packings: how many of them may share the rows of a tile. keys: of a sequence,
    on average. masked: do rows see different keys? window: those that they see, where their
    position alone says it. queries: of a sequence; 0 for as many as keys. kv_heads: of K and V; 0
    if memory is no bound. ragged: may sequences differ in length? num_splits: parts of the keys; 0
    for as many as pay. element_bytes: of q, k and v.
    """

    head_dim: int
    head_dim_v: int
    rows: int
    keys: int
    heads: int
    batch: int
    masked: bool = False
    window: Window = (None, None)
    kv_heads: int = 0
    queries: int = 0
    ragged: bool = False
    num_splits: int = 1
    element_bytes: int = 2
    packings: tuple[int, ...] = (1,)

    @property
    def packed(self) -> int:
        """Heads that share the rows of a tile, where there is one choice."""
        (packed,) = self.packings
        return packed

    @property
    def packed_rows(self) -> int:
        """Rows of the longest sequence, of all heads that share a tile."""
        return self.rows * self.packed

    @property
    def row_groups(self) -> int:
        """Heads, or groups of those that share a tile, of all sequences."""
        return self.heads // self.packed * self.batch

    @property
    def uneven(self) -> bool:
        """May work tiles differ in the number of their keys?"""
        return self.masked or self.ragged


@lru_cache(maxsize=1024)
def tuned_warpgroups(problem: WarpgroupProblem, gpu: Gpu) -> WarpgroupPipeline:
    """The pipeline of a problem on a machine of compute capability 9.0.

    Raises ValueError for head dims above 256, and where no tile fits the machine.
    """
    best = min(choices(problem, gpu), key=lambda one: one.cost, default=None)
    if best is None:
        dims = problem.head_dim, problem.head_dim_v
        raise ValueError(f"no tile of (d, dv) = {dims} fits into {gpu.name}'s shared memory")
    return best.pipeline()


class TileChoice(NamedTuple):
    """A tile, the heads packed (of the problem) and the parts of its keys, and what they cost."""

    cost: float
    problem: WarpgroupProblem
    tile: WarpgroupTile
    fitting: WarpgroupPipeline
    splits: int
    sms: int

    def pipeline(self) -> WarpgroupPipeline:
        """Work tiles that differ are drawn from a queue if SMs have several, else have CTAs.

        So have those of a call in which no SM has a second one to prepare for.
        """
        found = self.fitting
        if self.splits > 1:
            found = replace(found, num_splits=self.splits, ahead=False, direct=False)
        if not self.problem.uneven:
            alone = self.splits == 1 and work_tiles(found.consumers, self.problem) <= self.sms
            return replace(found, scheduler="naive", ahead=False) if alone else found
        drawn = draws(self.problem, found.consumers, self.sms, self.splits)
        if drawn and not self.tile.alone:
            return replace(found, scheduler="queue")
        return replace(found, scheduler="lpt", ahead=False)


def choices(problem: WarpgroupProblem, gpu: Gpu) -> Iterator[TileChoice]:
    """All that a problem may get."""
    sms = gpu.sm_count
    for packed in problem.packings:
        one = replace(problem, packings=(packed,))
        for tile, pipeline in _of_any_width(one, gpu):
            for splits in _divisions(tile, one, sms):
                one_wave = splits > 1 or work_tiles(tile.consumers, one) <= sms
                if tile.one_wave in (None, one_wave):
                    cost = _cost(tile, one, sms, splits)
                    yield TileChoice(cost, one, tile, pipeline, splits, sms)


def draws(problem: WarpgroupProblem, consumers: int, sms: int, splits: int) -> bool:
    """Have SMs several work tiles that differ?"""
    return problem.uneven and splits == 1 and work_tiles(consumers, problem) > sms


def padded_width(dim: int, element_bytes: int = 2) -> int:
    """Columns of a head dimension in shared memory, unless a tile says otherwise.

    Rows of whole 128 bytes, of 16 bits: narrower ones take TMA as many boxes more as they are
    narrower, each of whose rows may begin within a sector of memory.
    """
    step = 64 if element_bytes == 2 and dim > 32 else 32
    return -(-dim // step) * step


def work_tiles(consumers: int, problem: WarpgroupProblem) -> int:
    """How many there are, of all sequences and heads, where keys are not divided."""
    blocks = -(-max(problem.packed_rows, 1) // (consumers * WARPGROUP_ROWS))
    return blocks * problem.row_groups


def _divisions(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int) -> Iterator[int]:
    """Numbers of parts to choose from: those that fill whole waves of CTAs, the fewest of each."""
    if problem.num_splits:
        yield problem.num_splits
        return
    yield 1
    most = int(keys_of(tile, problem).max()) // tile.tile_n
    count = work_tiles(tile.consumers, problem)
    for waves in range(1, 1 + SPLIT_WAVES):
        splits = waves * sms // max(count, 1)
        if 1 < splits <= min(most // FEWEST_TILES, MOST_SPLITS):
            yield splits


def _of_any_width(
    problem: WarpgroupProblem, gpu: Gpu
) -> Iterator[tuple[WarpgroupTile, WarpgroupPipeline]]:
    """The tiles that fit; of each also such of fewer keys, where padding may be a good part."""
    for tile, pipeline in _fitting(problem, gpu):
        yield tile, pipeline
        if problem.element_bytes == 1 or keys_of(tile, problem).max() > MOST_PADDED * tile.tile_n:
            continue
        for width in (tile.tile_n - fewer for fewer in FEWER):
            if width >= FEWEST_KEYS:
                rate = tile.tflops * NOT_TIMED * (width / tile.tile_n) ** FEWER_KEYS
                yield tile._replace(tile_n=width, tflops=rate), replace(pipeline, tile_n=width)


def _fitting(
    problem: WarpgroupProblem, gpu: Gpu
) -> Iterator[tuple[WarpgroupTile, WarpgroupPipeline]]:
    """The tiles of the head dims, and of each its pipeline."""
    for tile in tiles_of(problem):
        pipeline = _pipeline(tile, problem.head_dim, problem.head_dim_v, problem.masked, gpu,
                             problem.element_bytes, problem.packed)  # fmt: skip
        if pipeline is not None and problem.keys < PROMOTED_FROM:
            pipeline = replace(pipeline, promote=0)
        if pipeline is not None:
            slower = (pipeline.tile_n / tile.tile_n) ** FEWER_KEYS
            if problem.element_bytes == 1:  # products take all columns in shared memory
                dims = problem.head_dim, problem.head_dim_v
                columns = sum(padded_width(dim, 1) for dim in dims)
                slower *= columns / (pipeline.head_dim + pipeline.head_dim_v)
            yield tile._replace(tile_n=pipeline.tile_n, tflops=tile.tflops * slower), pipeline


@lru_cache(maxsize=1024)
def _pipeline(
    tile: WarpgroupTile, head_dim: int, head_dim_v: int, masked: bool, gpu: Gpu, size: int,
    packed: int,
) -> WarpgroupPipeline | None:  # fmt: skip
    """A tile's, with fewer keys where these do not fit the machine; None where none do."""
    depth = PRODUCT_DEPTH_BYTES // size
    d, dv = (-(-dim // tile.columns) * tile.columns for dim in (head_dim, head_dim_v))
    if straddles(packed):
        d = -(-d // (ROW_BYTES // size)) * (ROW_BYTES // size)
    wide = d, dv
    if size == 2:
        d, dv = (-(-dim // depth) * depth for dim in (head_dim, head_dim_v))
    for tile_n in range(tile.tile_n, 0, -depth):
        pipeline = WarpgroupPipeline(
            head_dim=d,
            head_dim_v=dv,
            element_bytes=size,
            causal=masked,
            tile_n=tile_n,
            consumers=tile.consumers,
            kv_stages=tile.kv_stages,
            ping_pong=tile.turns,
            ahead=tile.ahead,
            promote=tile.promote,
            columns=None if wide == (d, dv) else wide,
            direct=tile.direct or (size == 2 and (head_dim_v % 16 == 8 or straddles(packed))),
            packed=packed,
        )
        try:
            plan = warpgroup_plan(replace(pipeline, scheduler="queue"), gpu)
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
    rates = measured_rates() if problem.element_bytes == 2 else NARROW_RATES
    wider = [one for one in rates if one[0] >= d and one[1] >= dv and one[2] == problem.masked]
    nearest = min(wider, key=lambda one: one[0] + one[1])
    return iter(rates[nearest])


def keys_of(tile: WarpgroupTile, problem: WarpgroupProblem) -> Any:
    """Keys of each block of a sequence's rows, in whole KV tiles."""
    queries = problem.queries or problem.keys
    return keys_of_blocks(problem.packed_rows, tile.consumers * WARPGROUP_ROWS, tile.tile_n,
                          queries, problem.keys, problem.window)  # fmt: skip


def _cost(tile: WarpgroupTile, problem: WarpgroupProblem, sms: int, splits: int = 1) -> float:
    """Time of all work tiles, in rows times keys per TFLOP/s.

    None is faster than K and V come from memory. What the parts of divided keys cost beside is
    `_combining_seconds`.
    """
    rows = tile.consumers * WARPGROUP_ROWS
    parts = -(-keys_of(tile, problem) // (tile.tile_n * splits)) * tile.tile_n
    found = busiest(parts + tile.start, problem.row_groups * splits, sms) * rows / tile.tflops
    if straddles(problem.packed) and not tile.direct:
        found *= STRADDLING
    count = work_tiles(tile.consumers, problem) * splits
    beside = _combining_seconds(problem, splits)
    if draws(problem, tile.consumers, sms, splits) and not tile.alone:
        beside += QUEUE_SECONDS
    units = 1e12 / (2 * (problem.head_dim + problem.head_dim_v) * sms)
    memory = _memory_seconds(problem, min(count, sms)) * units
    # Where memory is the bound, the tile that leaves most of the SM alone.
    return max(found, memory) + beside * units + found / 1000


def _memory_seconds(problem: WarpgroupProblem, ctas: int) -> float:
    """The keys and values that any row sees, once from memory, by so many CTAs."""
    dims = problem.head_dim + problem.head_dim_v
    seen = keys_seen(problem.queries or problem.keys, problem.keys, problem.window)
    num_bytes = problem.kv_heads * problem.batch * seen * dims * problem.element_bytes
    return num_bytes / min(MEMORY_BYTES_PER_S, max(ctas, 1) * CTA_BYTES_PER_S)


def _combining_seconds(problem: WarpgroupProblem, splits: int) -> float:
    """A second launch, and the parts of O out and in; 0 where keys are not divided."""
    if splits == 1:
        return 0.0
    rows = problem.rows * problem.heads * problem.batch
    # Out and in.
    return combining_seconds(2 * splits * rows * problem.head_dim_v)


def combining_seconds(numbers: int) -> float:
    """A second launch, and so many float32 numbers that cross L2."""
    return COMBINE_SECONDS + 4 * numbers / PARTS_BYTES_PER_S
