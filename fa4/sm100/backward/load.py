"""The load warp: K and V once, then Q, dO and the row statistics of each query tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.views import copy_box
from fa4.plan.backward_single import STATS_BYTES
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class TileSource:
    """One operand's way from global to shared memory.

    atoms, tensor: the TMA copies, as `copy_box` takes them, and their coordinates, (rows, dim,
    head, batch). shared: (rows, dim) swizzled, (rows, dim, stage) of Q. column: which part of the
    columns, where a CTA of a pair loads half of them.
    """

    atoms: tuple
    tensor: cute.Tensor
    shared: cute.Tensor
    column: Int32 | int = 0

    @property
    def rows(self) -> int:
        """Rows of one tile."""
        return cute.size(self.shared.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of one tile."""
        shape = self.shared.shape[:2]
        return cute.size(shape) * self.shared.element_type.width // 8


@dataclass(frozen=True)
class TileSources:
    """What the load warp loads. stats: in global memory, (heads, tiles, 2, 128) of float32.

    stats_shared: of all stages.
    """

    q: TileSource
    k: TileSource
    v: TileSource
    dout: TileSource
    stats: cute.Tensor
    stats_shared: cute.Pointer


@cute.jit
def load(signals: Signals, tile: KeyTile, sources: TileSources) -> None:
    """Query heads of the group one after the other, their query tiles from the first on."""
    ring, turn = signals.ring("q"), Ring.of(1)
    trips, q_start = tile.trips, tile.q_start
    head, row_tile = tile.head_k * tile.group, q_start
    if trips > 0:
        load_keys(signals, "q_full", sources.k, tile)
        load_keys(signals, "do_full", sources.v, tile)
    for _ in cutlass.range(trips, unroll=1):
        q = tiles_of(sources.q, tile, head, of_keys=False)
        dout = tiles_of(sources.dout, tile, head, of_keys=False)
        signals.wait("q_empty", ring)
        full = signals.expect("q_full", sources.q.num_bytes, ring)
        copy_tile(sources.q, q[None, None, row_tile], sources.q.shared[None, None, ring.slot], full)
        signals.wait("row_stats_empty", ring)
        full = signals.expect("row_stats_full", STATS_BYTES, ring)
        copy_stats(sources, head, tile.row_tile + row_tile, ring.slot, full)
        signals.wait("do_empty", turn)
        full = signals.expect("do_full", sources.dout.num_bytes, turn)
        copy_tile(sources.dout, dout[None, None, row_tile], sources.dout.shared, full)
        ring, turn = ring.next(), turn.next()
        row_tile += 1
        ended = row_tile == tile.q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)
    if trips > 0:
        for _ in cutlass.range_constexpr(ring.stages):
            signals.wait("q_empty", ring)
            ring = ring.next()
        signals.wait("do_empty", turn)


def load_keys(signals: Signals, name: str, source: TileSource, tile: KeyTile) -> None:
    """K or V of the work tile, counted with the first phase of `name`."""
    number = tile.group_number if source.rows == tile.group_keys else tile.block
    tiles = tiles_of(source, tile, tile.head_k, of_keys=True)
    full = signals.expect_more(name, source.num_bytes)
    empty = number * source.rows >= tile.seqlen_k
    copy_tile(source, tiles[None, None, number], source.shared, full, empty)


def copy_tile(
    source: TileSource,
    tile: cute.Tensor,
    shared: cute.Tensor,
    full: cute.Pointer,
    empty: Boolean | bool = False,
) -> None:
    """Start the copy of a tile of global memory, which completes `full`; empty as of `copy_box`."""
    to, origin = cpasync.tma_partition(
        source.atoms[0],
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
    copy_box(source.atoms, origin, to, full, empty)


def copy_stats(
    sources: TileSources, head: Int32, row_tile: Int32, stage: Int32, full: cute.Pointer
) -> None:
    """Start the copy of a tile's row statistics: one run of memory."""
    words: cutlass.Constexpr = STATS_BYTES // 4
    tiles = sources.stats.shape[1]
    offset = (Int64(head) * tiles + row_tile) * words
    origin = cute.make_tensor(sources.stats.iterator + offset, cute.make_layout(words))
    to = cute.make_tensor(sources.stats_shared + stage * words, cute.make_layout(words))
    with cute.arch.elect_one():
        cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), sources.stats.element_type),
                  origin, to, mbar_ptr=full)  # fmt: skip


def tiles_of(source: TileSource, tile: KeyTile, head: Int32, *, of_keys: bool) -> cute.Tensor:
    """(rows, dim, number) tiles of a head, by their number in the sequence.

    Of the columns, those of `source.column`.
    """
    spec = tile.spec
    packed, ragged, start, length = spec.packed_q, spec.ragged_q, tile.start_q, tile.seqlen_q
    if of_keys:
        packed, ragged, start, length = spec.packed_k, spec.ragged_k, tile.start_k, tile.seqlen_k
    index = [head] if packed else [head, tile.batch]
    if ragged:
        index.append(start + length)
    tensor = source.tensor[(None, None, *index)]
    if ragged:
        tensor = cute.domain_offset((source.tensor.shape[0] - length, 0), tensor)
    shape = source.rows, cute.size(source.shared.shape[1])
    return cute.local_tile(tensor, shape, (None, source.column))
