"""The load warp of a CTA of a pair: halves of the operands, as both of the pair's products want."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.plan.backward_single import STATS_BYTES
from fa4.sm100.backward.load import Source, Sources, copy_stats, copy_tile, tiles_of, with_first
from fa4.sm100.backward.tiles import KeyTile
from fa4.sm100.kit.rings import Ring
from fa4.sm100.kit.signals import Signals


@dataclass(frozen=True)
class PairSources:
    """What a CTA loads: Q and dO by rows, as `whole`, and Q, dO and both K tiles by columns."""

    whole: Sources
    q_t: Source
    do_t: Source
    k_t: Source


@dataclass(frozen=True)
class Place:
    """A query tile of the group: query head, number of the tile, number of the trip."""

    head: Int32
    row_tile: Int32
    trip: Int32


@cute.jit
def load_pair(signals: Signals, tile: KeyTile, sources: PairSources) -> None:
    """In the order in which the products before them free their places."""
    stats, turn = signals.ring("row_stats"), Ring.of(1)
    trips, q_start = tile.trips, tile.q_start
    head, row_tile = tile.head_k * tile.group, q_start
    for trip in cutlass.range(trips, unroll=1):
        place = Place(head, row_tile, trip)
        rows = row_tile * 2 + tile.rank
        _fill(signals, "q", sources.whole.q, sources.whole.k, tile, place, rows, turn)
        signals.wait("row_stats_empty", stats)
        full = signals.expect("row_stats_full", STATS_BYTES, stats)
        copy_stats(sources.whole, head, tile.row_tile + row_tile, stats.slot, full)
        _fill(signals, "do", sources.whole.dout, sources.whole.v, tile, place, rows, turn)
        _fill(signals, "do_t", sources.do_t, None, tile, place, row_tile, turn)
        _fill(signals, "q_t", sources.q_t, sources.k_t, tile, place, row_tile, turn)
        stats, turn = stats.next(), turn.next()
        row_tile += 1
        ended = row_tile == tile.q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)
    if trips > 0:
        for name in ("q", "do", "do_t", "q_t"):
            signals.wait(f"{name}_empty", turn)


@cute.jit
def _fill(
    signals: Signals,
    name: cutlass.Constexpr,
    source: Source,
    keys: Source | None,
    tile: KeyTile,
    place: Place,
    number: Int32,
    turn: Ring,
) -> None:
    """A tile of Q or dO, with K or V before the first one."""
    signals.wait(f"{name}_empty", turn)
    extra: cutlass.Constexpr = 0 if keys is None else keys.num_bytes
    full = signals.expect(f"{name}_full", with_first(place.trip, source.num_bytes, extra), turn)
    if cutlass.const_expr(keys is not None):  # noqa: SIM102
        if place.trip == 0:
            whole: cutlass.Constexpr = cute.size(keys.shared.shape[0]) == tile.group_keys
            block = tile.group_number if whole else tile.block
            tiles = tiles_of(keys, tile, tile.head_k, of_keys=True)
            copy_tile(keys, tiles[None, None, block], keys.shared, full)
    tiles = tiles_of(source, tile, place.head, of_keys=False)
    copy_tile(source, tiles[None, None, number], source.shared, full)
