"""Work tiles of a problem: how many KV (or query) tiles each visits, and in which order they start.

Trip counts follow the kernel: a block of query rows visits the KV tiles from n_min to n_max - 1
that its band can see (bottom-right aligned), and masks those it sees only in part.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fa4.config import WARPGROUP_ROWS, BackwardPipeline, Problem, WarpgroupPipeline
from fa4.designs.amounts import HeadPacking, warpgroup_packing
from fa4.hardware import Gpu
from fa4.plan.warpgroup_roles import passes_tiles

# L2 bytes that the LPT order lets one section of heads occupy (flash_attn.cute).
L2_SECTION_BYTES = 50 * 1024 * 1024


class Lengths(NamedTuple):
    """Query and key length of one sequence."""

    q: int
    k: int


@dataclass(frozen=True, kw_only=True)
class WorkTiles:
    """Arrays over work tiles in launch order: trips (T, 3) total, masked, plain; head and block.

    first: backward, the first query tile it visits. group: backward, the heads that it visits one
    after the other, all with the same tiles; `head` counts the groups then.
    """

    trips: np.ndarray
    batch: np.ndarray
    head: np.ndarray
    block: np.ndarray
    first: np.ndarray
    group: int = 1

    def take(self, order: np.ndarray) -> WorkTiles:
        """The same tiles in another order."""
        return WorkTiles(
            trips=self.trips[order],
            batch=self.batch[order],
            head=self.head[order],
            block=self.block[order],
            first=self.first[order],
            group=self.group,
        )


def sequences(problem: Problem, lengths: Seq[Lengths] | None) -> list[tuple[range, Lengths]]:
    """(batch entries, their lengths): one each of the given ones, or all with the problem's."""
    if lengths is not None:
        return [(range(entry, entry + 1), length) for entry, length in enumerate(lengths)]
    return [(range(problem.batch), Lengths(problem.seqlen_q, problem.seqlen_k))]


def kv_trips(
    problem: Problem, length: Lengths, rows: np.ndarray, tile_n: int, parts: Seq[np.ndarray] = ()
) -> np.ndarray:
    """(M, 3) total, masked and plain KV tiles of row blocks rows[i] = (first, one past last) row.

    Rows are positions in the sequence (already divided by the heads packed into a tile). The first
    KV tile visited always runs the masking code, and a row block that sees nothing runs one step,
    as in the kernel. parts: likewise rows, of parts of each block that pass over tiles of which
    they see no key, as long as those are the first ones; three columns for each follow, the tiles
    it passes over, masked and plain ones.
    """
    start, stop, *whole = _kv_range(problem, length, rows, tile_n)
    total = np.maximum(1, stop - start)
    plain = _between(start, np.maximum(stop, start + 1), *whole)
    columns = [total, total - plain, plain]
    for own in parts:
        _, own_stop, *whole = _kv_range(problem, length, own, tile_n)
        own_stop = np.where(own[:, 0] < length.q, own_stop, 0)  # else it has no row
        own_stop = np.clip(own_stop, start + 1, start + total)
        plain = _between(start, own_stop, *whole)
        columns += [start + total - own_stop, own_stop - start - plain, plain]
    return np.stack(columns, axis=1)


def _between(
    start: np.ndarray, stop: np.ndarray, whole_start: np.ndarray, whole_stop: np.ndarray
) -> np.ndarray:
    """Of the KV tiles from start on, those that no row needs a mask for; never the last one."""
    plain = np.minimum(whole_stop, stop) - np.maximum(whole_start, start)
    return np.clip(plain, 0, stop - start - 1)


def _kv_range(
    problem: Problem, length: Lengths, rows: np.ndarray, tile_n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First and one past the last KV tile that some row sees; the same of those that all see."""
    left, right = problem.window_size
    first, last = rows[:, 0], rows[:, 1] - 1
    offset = length.k - length.q
    n_max = np.full(len(rows), -(-length.k // tile_n))
    plain_to = np.full(len(rows), length.k // tile_n)
    if right is not None:
        n_max = np.minimum(n_max, -(-(last + offset + right + 1) // tile_n))
        plain_to = np.minimum(plain_to, (first + offset + right + 1) // tile_n)
    n_min, plain_from = np.zeros_like(n_max), np.zeros_like(n_max)
    if left is not None:
        n_min = np.maximum(0, (first + offset - left) // tile_n)
        plain_from = np.maximum(0, -(-(last + offset - left) // tile_n))
    return n_min, n_max, plain_from, plain_to


def query_trips(problem: Problem, length: Lengths, keys: np.ndarray, tile_m: int) -> np.ndarray:
    """(N, 3) total, masked and plain query tiles of key blocks (first, one past last key)."""
    left, right = problem.window_size
    mirrored = Problem(
        seqlen_q=length.k, seqlen_k=length.q, heads_q=1, heads_k=1, head_dim=8,
        window_size=(right, left),
    )  # fmt: skip
    return kv_trips(mirrored, Lengths(length.k, length.q), keys, tile_m)


def forward_tiles(
    problem: Problem,
    pipeline: Any,
    lengths: Seq[Lengths] | None = None,
    *,
    passes: bool = False,
    packing: HeadPacking | None = None,
) -> WorkTiles:
    """Work tiles of a forward call, row blocks fastest, then heads, then sequences.

    passes: do warpgroups pass over tiles of which only rows of others see keys? packing: None for
    all query heads of a KV head in the rows of a tile, none of which is empty.
    """
    heads, ratio = packing or HeadPacking(problem.heads_k, problem.heads_q // problem.heads_k)
    step = pipeline.block_rows
    own_rows = range(0, step, WARPGROUP_ROWS) if passes else ()

    def positions(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return np.stack([starts // ratio, -(-stops // ratio)], axis=1)

    parts = []
    for batches, length in sequences(problem, lengths):
        packed = length.q * ratio
        starts = np.arange(0, packed, step)
        rows = positions(starts, np.minimum(starts + step, packed))
        own = [positions(starts + n, starts + n + WARPGROUP_ROWS) for n in own_rows]
        every = kv_trips(problem, length, rows, pipeline.tile_n, own)
        trips = split_trips(every, pipeline.num_splits)
        parts.append((batches, trips, heads))
    return _collect(parts)


def warpgroup_tiles(
    problem: Problem, pipeline: WarpgroupPipeline, lengths: Seq[Lengths] | None = None
) -> WorkTiles:
    """Those of a kernel of warpgroups, which pass over tiles where the last keys are hidden."""
    hides_last = problem.window_size[1] is not None  # else all rows see the last keys
    passes = passes_tiles(pipeline) and hides_last and not pipeline.ahead
    packing = None if pipeline.published else warpgroup_packing(problem, pipeline)
    return forward_tiles(problem, pipeline, lengths, passes=passes, packing=packing)


def forward_order(tiles: WorkTiles, problem: Problem, pipeline: Any) -> WorkTiles:
    """In the order in which the scheduler starts them: longest first, if it is one of those."""
    if pipeline.scheduler not in ("lpt", "clc", "queue") or not len(tiles.trips):
        return tiles
    dims = pipeline.head_dim + pipeline.head_dim_v
    return tiles.take(lpt_order(tiles, problem.seqlen_k * dims * pipeline.element_bytes))


def split_trips(trips: np.ndarray, splits: int) -> np.ndarray:
    """Cut the KV tiles (M, 3) of each row block into `splits` contiguous parts of ceil(n / splits).

    Empty parts are left out. The tiles visited first are the masked ones, and every part masks its
    first tile.
    """
    if splits == 1:
        return trips
    total, masked = trips[:, :1], trips[:, 1:2]
    size = -(-total // splits)
    starts = np.arange(splits) * size
    counts = np.clip(total - starts, 0, size)
    hidden = np.minimum(np.maximum(np.clip(masked - starts, 0, counts), 1), counts)
    parts = np.stack([counts, hidden, counts - hidden], axis=-1).reshape(-1, 3)
    return parts[parts[:, 0] > 0]


def backward_tiles(
    problem: Problem, pipeline: BackwardPipeline, lengths: Seq[Lengths] | None = None
) -> WorkTiles:
    """Work tiles of a backward call: key blocks fastest, then heads, then sequences.

    This package's CTAs visit all query heads of a KV head, one after the other.
    """
    return _blocks(problem, pipeline, lengths, problem.heads_q // problem.heads_k)


def backward_tiles_of_heads(
    problem: Problem, pipeline: BackwardPipeline, lengths: Seq[Lengths] | None = None
) -> WorkTiles:
    """The same for CTAs that visit one query head, as flash_attn.cute's do."""
    return _blocks(problem, pipeline, lengths, 1)


def _blocks(
    problem: Problem, pipeline: BackwardPipeline, lengths: Seq[Lengths] | None, group: int
) -> WorkTiles:
    numerics = pipeline.numerics
    step = numerics.tile_n * numerics.cta_group
    return key_blocks(problem, numerics.tile_m, step, group, lengths)


def key_blocks(
    problem: Problem, tile_m: int, step: int, group: int, lengths: Seq[Lengths] | None = None
) -> WorkTiles:
    """Blocks of `step` keys, whose CTA visits query tiles of `group` heads one after the other."""
    right = problem.window_size[1]
    parts, firsts = [], []
    for batches, length in sequences(problem, lengths):
        starts = np.arange(0, length.k, step)
        keys = np.stack([starts, np.minimum(starts + step, length.k)], axis=1)
        trips = query_trips(problem, length, keys, tile_m)
        parts.append((batches, group * trips, problem.heads_q // group))
        first = np.zeros(len(starts), np.int64)
        if right is not None:
            first = np.maximum(0, (starts + length.q - length.k - right) // tile_m)
        firsts.append(np.tile(first, len(batches) * problem.heads_q // group))
    tiles = _collect(parts)
    return replace(tiles, group=group, first=np.concatenate(firsts)) if firsts else tiles


def query_blocks(
    problem: Problem, step: int, tile_n: int, lengths: Seq[Lengths] | None = None
) -> WorkTiles:
    """Blocks of `step` queries of one head, whose CTA visits KV tiles."""
    parts = []
    for batches, length in sequences(problem, lengths):
        starts = np.arange(0, length.q, step)
        rows = np.stack([starts, np.minimum(starts + step, length.q)], axis=1)
        parts.append((batches, kv_trips(problem, length, rows, tile_n), problem.heads_q))
    return _collect(parts)


def divided(tiles: WorkTiles, parts: int) -> WorkTiles:
    """Each in so many parts of its steps, as even as can be; masked ones are in the last part."""
    if parts == 1:
        return tiles
    each = np.arange(parts)
    total, masked = tiles.trips[:, :1], tiles.trips[:, 1:2]
    stops = total * (each + 1) // parts
    count = np.maximum(1, stops - total * each // parts)
    last = np.clip(stops - (total - masked), 0, count)
    trips = np.stack([count, last, count - last], axis=-1).reshape(-1, 3)
    rest = {
        name: np.repeat(getattr(tiles, name), parts) for name in ("batch", "head", "block", "first")
    }
    return WorkTiles(trips=trips, group=tiles.group, **rest)


def _collect(parts: list[tuple[range, np.ndarray, int]]) -> WorkTiles:
    trips, batches, heads, blocks = [], [], [], []
    for entries, block_trips, head_count in parts:
        count, copies = len(block_trips), len(entries)
        trips.append(np.tile(block_trips, (copies * head_count, 1)))
        heads.append(np.tile(np.repeat(np.arange(head_count), count), copies))
        blocks.append(np.tile(np.arange(count), copies * head_count))
        batches.append(np.repeat(np.arange(entries.start, entries.stop), count * head_count))
    if not trips:
        trips = [np.zeros((0, 3), np.int64)]
        batches = heads = blocks = [np.zeros(0, np.int64)]
    return WorkTiles(
        trips=np.concatenate(trips).astype(np.int64),
        batch=np.concatenate(batches),
        head=np.concatenate(heads),
        block=np.concatenate(blocks),
        first=np.zeros(sum(map(len, blocks)), np.int64),
    )


def lpt_order(tiles: WorkTiles, head_bytes: float) -> np.ndarray:
    """Longest first within sections of heads whose K and V fit together into L2.

    w = max(1, 2^floor(log2(50 MiB / bytes of one head))) heads run side by side, their longest row
    blocks first.
    """
    heads = int(tiles.head.max(initial=0)) + 1
    width = max(1, 2 ** int(np.floor(np.log2(max(1.0, L2_SECTION_BYTES / head_bytes)))))
    section = (tiles.batch * heads + tiles.head) // width
    return np.lexsort((tiles.batch * heads + tiles.head, -tiles.block, section))


def launched(tiles: WorkTiles, problem: Problem, pipeline: BackwardPipeline) -> WorkTiles:
    """Backward work tiles in the order of their launch."""
    return tiles.take(backward_order(tiles, pipeline.scheduler))


def backward_order(tiles: WorkTiles, scheduler: str) -> np.ndarray:
    """Launch order of backward work tiles, head by head.

    "naive": key blocks ascending. "lpt": most query tiles first. "spt": key blocks descending, so
    that under a causal mask the shortest come first and do not all queue for the same dQ tile.
    """
    head = tiles.batch * (int(tiles.head.max(initial=0)) + 1) + tiles.head
    keys = {"naive": tiles.block, "lpt": -tiles.trips[:, 0], "spt": -tiles.block}
    return np.lexsort((keys[scheduler], head))


def clusters(gpu: Gpu, cta_group: int) -> int:
    """CTAs, or CTA pairs, that run side by side: one per SM, or one per two SMs."""
    if gpu.sm_count < cta_group:
        raise ValueError(f"a CTA pair needs 2 SMs; {gpu.name} has {gpu.sm_count}")
    return gpu.sm_count // cta_group
