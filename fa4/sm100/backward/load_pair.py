"""The load warp of a CTA of a pair: halves of the operands, as both of the pair's products want."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.plan.backward_single import STATS_BYTES
from fa4.sm100.backward.load import (
    TileSource,
    TileSources,
    copy_stats,
    copy_tile,
    load_keys,
    tiles_of,
)
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class PairTileSources:
    """What a CTA loads: Q and dO by rows, as `whole`, and Q, dO and both K tiles by columns."""

    whole: TileSources
    q_t: TileSource
    do_t: TileSource
    k_t: TileSource


@cute.jit
def load_pair(signals: Signals, tile: KeyTile, sources: PairTileSources) -> None:
    """In the order in which the products before them free their places."""
    stats, turn = signals.ring("row_stats"), Ring.of(1)
    trips, q_start = tile.trips, tile.q_start
    head, row_tile = tile.head_k * tile.group, q_start
    if trips > 0:
        load_keys(signals, "q_full", sources.whole.k, tile)
        load_keys(signals, "do_full", sources.whole.v, tile)
        load_keys(signals, "q_t_full", sources.k_t, tile)
    for _ in cutlass.range(trips, unroll=1):
        rows = row_tile * 2 + tile.rank
        fill(signals, "q", sources.whole.q, (tile, head, rows), turn)
        signals.wait("row_stats_empty", stats)
        full = signals.expect("row_stats_full", STATS_BYTES, stats)
        copy_stats(sources.whole, head, tile.row_tile + row_tile, stats.slot, full)
        fill(signals, "do", sources.whole.dout, (tile, head, rows), turn)
        fill(signals, "do_t", sources.do_t, (tile, head, row_tile), turn)
        fill(signals, "q_t", sources.q_t, (tile, head, row_tile), turn)
        stats, turn = stats.next(), turn.next()
        row_tile += 1
        ended = row_tile == tile.q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)
    if trips > 0:
        for name in ("q", "do", "do_t", "q_t"):
            signals.wait(f"{name}_empty", turn)


def fill(signals: Signals, name: str, source: TileSource, place: tuple, turn: Ring) -> None:
    """A tile of Q or dO. place: work tile, query head, number of the tile."""
    tile, head, number = place
    signals.wait(f"{name}_empty", turn)
    full = signals.expect(f"{name}_full", source.num_bytes, turn)
    tiles = tiles_of(source, tile, head, of_keys=False)
    empty = number * source.rows >= tile.seqlen_q
    copy_tile(source, tiles[None, None, number], source.shared, full, empty)
