"""The load warp: of each work tile K and V, and Q and dO of each query tile, with a number of every
row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.plan.warpgroup_backward import CONSUMERS
from fa4.sm90.backward.order import first_rows, next_rows, query_head
from fa4.sm90.backward.parts import shared_keys
from fa4.sm90.backward.queue import KeyQueue, draw, first_number, number_of, tell
from fa4.sm100.backward.load import TileSource, copy_tile, tiles_of
from fa4.sm100.backward.tiles import KeyTile

DRAWS_BEFORE = 2  # query tiles to be loaded when the next work tile is drawn
MINUS_LSE, MINUS_D = 0, 1  # places in the statistics of a tile (`fa4.sm100.backward.workspace`)


@dataclass(frozen=True)
class RowNumbers:
    """One of the two numbers of each query. which: MINUS_LSE or MINUS_D.

    tensor: in global memory, (heads, tiles, 2, rows of a block) of float32. shared: of all stages,
    `step` apart.
    """

    which: cutlass.Constexpr
    tensor: cute.Tensor
    shared: cute.Pointer
    step: cutlass.Constexpr


@dataclass(frozen=True)
class LoadSources:
    """What the load warp loads. Stages of k and v: each warpgroup's, one behind the other's.

    gradients: dV and dK in global memory, for keys that no query sees.
    """

    q: TileSource
    k: TileSource
    v: TileSource
    dout: TileSource
    lse: RowNumbers
    d: RowNumbers
    gradients: tuple = ()


@cute.jit
def load(signals: Signals, queue: KeyQueue, sources: LoadSources) -> None:
    """Every work tile that this CTA draws, and in the end that there is none any more.

    K of the last tile of all stands for that of none, for the S that then begins (`consumer`).
    """
    rows, keys = signals.ring("q"), signals.ring("work")
    problem = queue.work.problem
    told = tell(signals, queue, keys, first_number(queue), sources.gradients)
    if told.exists:
        load_keys(signals, "k", sources.k, shared_keys_of(told.of(problem), sources), keys)
    while told.exists:
        rows, drawn = load_tile(signals, queue, told.of(problem), sources, rows, keys)
        keys = keys.next()
        told = tell(signals, queue, keys, number_of(queue, drawn), sources.gradients)
        following = shared_keys_of(told.or_last().of(problem), sources)
        load_keys(signals, "k", sources.k, following, keys)


@cute.jit
def load_tile(
    signals: Signals, queue: KeyQueue, tile: KeyTile, sources: LoadSources, ring: Ring, keys: Ring
) -> tuple[Ring, Int32]:
    """The query tiles of the group's heads, in their order; and V.

    V comes behind the first dO, as its place is free later. Returns where the ring is, and what was
    drawn: not long before the end, as who is free draws first.
    """
    trips = tile.trips
    member, row_tile = first_rows(tile)
    drawn = Int32(0)
    for i in cutlass.range(trips, unroll=1):
        head = query_head(tile, member)
        load_rows(signals, "q", sources.q, sources.lse, tile, head, row_tile, ring)
        if i == cutlass.max(trips - DRAWS_BEFORE, 0):
            drawn = draw(queue)
        load_rows(signals, "do", sources.dout, sources.d, tile, head, row_tile, ring)
        if i == 0:
            load_keys(signals, "v", sources.v, shared_keys_of(tile, sources), Ring(1, 0, keys.slot))
        ring = ring.next()
        member, row_tile = next_rows(tile, member, row_tile)
    return ring, drawn


def shared_keys_of(tile: KeyTile, sources: LoadSources) -> KeyTile:
    """The work tile by the KV head whose K and V it has."""
    return shared_keys(tile, sources.q.tensor, sources.k.tensor)


def load_keys(signals: Signals, name: str, source: TileSource, tile: KeyTile, ring: Ring) -> None:
    """K or V of the work tile, each warpgroup's by itself."""
    tiles = tiles_of(source, tile, tile.head_k, of_keys=True)
    for i in range(CONSUMERS):
        signals.wait(f"{name}{i}_empty", ring)
        full = signals.expect(f"{name}{i}_full", source.num_bytes, ring)
        number = tile.block * CONSUMERS + i
        empty = number * WARPGROUP_ROWS >= tile.seqlen_k
        shared = source.shared[None, None, i * ring.stages + ring.slot]
        copy_tile(source, tiles[None, None, number], shared, full, empty)


def load_rows(
    signals: Signals, name: str, source: TileSource, numbers: RowNumbers, tile: KeyTile,
    head: Int32, row_tile: Int32, ring: Ring,
) -> None:  # fmt: skip
    """Wait until the ring's slot is free, then start the copies of a tile's rows into it."""
    tiles = tiles_of(source, tile, head, of_keys=False)
    signals.wait(f"{name}_empty", ring)
    rows = tile.spec.tile_rows
    full = signals.expect(f"{name}_full", source.num_bytes + rows * 4, ring)
    copy_tile(source, tiles[None, None, row_tile], source.shared[None, None, ring.slot], full)
    copy_numbers(numbers, tile, head, row_tile, ring.slot, full)


def copy_numbers(
    numbers: RowNumbers,
    tile: KeyTile,
    head: Int32,
    row_tile: Int32,
    stage: Int32 | int,
    full: cute.Pointer,
) -> None:
    """Start the copy of a number of each row of a tile: one run of memory."""
    rows = tile.spec.tile_rows
    at, inside = place_of(tile, numbers.tensor.shape[1], head, row_tile)
    offset = (at * 2 + numbers.which) * tile.spec.block_rows + inside
    origin = cute.make_tensor(numbers.tensor.iterator + offset, cute.make_layout(rows))
    to = cute.make_tensor(numbers.shared + stage * numbers.step, cute.make_layout(rows))
    with cute.arch.elect_one():
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), numbers.tensor.element_type),
                  origin, to, mbar_ptr=full)  # fmt: skip


def place_of(
    tile: KeyTile, tiles: Int32 | int, head: Int32, row_tile: Int32
) -> tuple[Int64, Int32]:
    """(block of the workspace, counted over all heads; first row in it) of a tile."""
    first, rows = row_tile * tile.spec.tile_rows, tile.spec.block_rows
    return Int64(head) * tiles + (tile.row_tile + first // rows), first % rows
