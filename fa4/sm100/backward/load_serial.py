"""The load warp of a CTA of a serial pair: Q and dO by rows, then by columns into one place."""

import cutlass
import cutlass.cute as cute

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.plan.backward_single import STATS_BYTES
from fa4.sm100.backward.load import TileSource, copy_stats, copy_tile, load_keys, tiles_of
from fa4.sm100.backward.load_pair import PairTileSources, fill
from fa4.sm100.backward.tiles import KeyTile


@cute.jit
def load_serial(signals: Signals, tile: KeyTile, sources: PairTileSources) -> None:
    """Query heads of the group one after the other, their query tiles from the first on.

    A place is filled twice for each query tile: both phases of its signals.
    """
    stats, rows_turn = signals.ring("row_stats"), Ring.of(1)
    columns_turn = rows_turn.next()
    trips, q_start = tile.trips, tile.q_start
    head, row_tile = tile.head_k * tile.group, q_start
    if trips > 0:
        load_keys(signals, "q_full", sources.whole.k, tile)
        load_keys(signals, "do_full", sources.whole.v, tile)
        load_last_keys(signals, sources.k_t, tile)
    for _ in cutlass.range(trips, unroll=1):
        rows = row_tile * 2 + tile.rank
        fill(signals, "q", sources.whole.q, (tile, head, rows), rows_turn)
        signals.wait("row_stats_empty", stats)
        full = signals.expect("row_stats_full", STATS_BYTES, stats)
        copy_stats(sources.whole, head, tile.row_tile + row_tile, stats.slot, full)
        fill(signals, "do", sources.whole.dout, (tile, head, rows), rows_turn)
        fill(signals, "q", sources.q_t, (tile, head, row_tile), columns_turn)
        fill(signals, "do", sources.do_t, (tile, head, row_tile), columns_turn)
        stats = stats.next()
        row_tile += 1
        ended = row_tile == tile.q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)
    if trips > 0:
        for name in ("q", "do"):
            signals.wait(f"{name}_empty", rows_turn)


def load_last_keys(signals: Signals, source: TileSource, tile: KeyTile) -> None:
    """K by columns, which has a signal of its own."""
    tiles = tiles_of(source, tile, tile.head_k, of_keys=True)
    full = signals.expect("k_t_full", source.num_bytes)
    copy_tile(source, tiles[None, None, tile.group_number], source.shared, full)
