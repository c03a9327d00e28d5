"""The load warp: K and V once, then Q and dO of each query tile, with a number of every row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.plan.warpgroup_backward import CONSUMERS
from fa4.sm90.backward.parts import shared_keys
from fa4.sm100.backward.load import TileSource, copy_tile, tiles_of
from fa4.sm100.backward.tiles import KeyTile

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
    """What the load warp loads. Stages of k and v are the warpgroups' keys."""

    q: TileSource
    k: TileSource
    v: TileSource
    dout: TileSource
    lse: RowNumbers
    d: RowNumbers


@cute.jit
def load(signals: Signals, tile: KeyTile, sources: LoadSources) -> None:
    """Query heads of the group one after the other, their query tiles from the first on."""
    queries, grads = signals.ring("q"), signals.ring("do")
    trips, q_start, q_stop = tile.trips, tile.q_start, tile.q_stop
    head, row_tile = tile.head_k * tile.group, q_start
    if trips > 0:
        keys = shared_keys(tile, sources.q.tensor, sources.k.tensor)
        load_keys(signals, "q_full", sources.k, keys)
        load_keys(signals, "do_full", sources.v, keys)
    for _ in cutlass.range(trips, unroll=1):
        load_rows(signals, "q", sources.q, sources.lse, tile, head, row_tile, queries)
        load_rows(signals, "do", sources.dout, sources.d, tile, head, row_tile, grads)
        queries, grads = queries.next(), grads.next()
        row_tile += 1
        ended = row_tile == q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)


def load_keys(signals: Signals, name: str, source: TileSource, tile: KeyTile) -> None:
    """K or V of the work tile, counted with the first phase of `name`."""
    tiles = tiles_of(source, tile, tile.head_k, of_keys=True)
    full = signals.expect_more(name, CONSUMERS * source.num_bytes)
    for i in range(CONSUMERS):
        number = tile.block * CONSUMERS + i
        empty = number * WARPGROUP_ROWS >= tile.seqlen_k
        shared = source.shared[None, None, i]
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
