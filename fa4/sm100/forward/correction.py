"""The correction warpgroup: rescales O between products, and finishes it at the end."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import stand_apart
from fa4.kit.rowmath import LOG2_E, multiplied, store_rounded
from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile, locate
from fa4.kit.tmem import read_columns, warp_lanes, write_columns
from fa4.kit.units import WARPGROUP, padded_dim

CHUNK = 16  # TMEM columns that a thread holds at a time
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class CorrectionOperands:
    """What the correction warps work with.

    stats: per Q tile, log2(alpha) or l of 128 rows, then m. o: first TMEM column by Q tile.
    shared: O in shared memory, (rows, cols, Q tile). lse, sink: global tensors or None.
    """

    stats: tuple
    o: cutlass.Constexpr
    shared: cute.Tensor
    scale_log2: Float32
    lse: cute.Tensor | None
    sink: Any


@cute.jit
def correction(signals: Signals, problem: KernelProblem, outputs: CorrectionOperands) -> None:
    """Votes per warp whether O needs rescaling; releases the other Q tile's statistics."""
    q_tiles: cutlass.Constexpr = problem.spec.numerics.q_tiles
    last: cutlass.Constexpr = q_tiles - 1
    cols: cutlass.Constexpr = padded_dim(problem.spec.head_dim_v)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    for i in cutlass.range_constexpr(q_tiles):
        signals.numbered(i).arrive("p#_full_o#_scaled")
    index = first_tile(problem)
    tiles_done = Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        # The first keys' products overwrite O: these signals only pass through.
        signals.numbered(0).wait("stats#_full")
        signals.numbered(0).arrive("stats#_empty")
        if cutlass.const_expr(q_tiles == 2):
            signals.numbered(1).wait("stats#_full")
        for _ in cutlass.range(1, tile.kv_tiles, unroll=1):
            for i in cutlass.range_constexpr(q_tiles):
                signals.numbered(i).wait("stats#_full")
                log2_alpha = outputs.stats[i][thread]
                if cute.arch.vote_any_sync(log2_alpha < 0.0):
                    alpha = cute.math.exp2(log2_alpha, fastmath=True)
                    rescale(outputs.o[i], cols, alpha)
                signals.numbered(i).arrive("p#_full_o#_scaled")
                signals.numbered(last - i).arrive("stats#_empty")
        if cutlass.const_expr(q_tiles == 2):
            signals.numbered(1).arrive("stats#_empty")
        for i in cutlass.range_constexpr(q_tiles):
            finish(signals, problem, outputs, tile, i, tiles_done)
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


@cute.jit
def rescale(
    column: Int32 | int,
    cols: cutlass.Constexpr,
    factor: Float32,
    width: cutlass.Constexpr = CHUNK,
    apart: Int32 | None = None,
) -> None:
    """O *= factor, one row per thread, in place in tensor memory, `width` columns at a time."""
    lanes = warp_lanes()
    for first in cutlass.range_constexpr(0, cols, width):
        place = lanes + (column + first)
        row = multiplied(read_columns(place, width, width), factor)
        write_columns(row, place)
        if cutlass.const_expr(apart is not None and first + width < cols):
            stand_apart(apart)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def finish(
    signals: Signals,
    problem: KernelProblem,
    outputs: CorrectionOperands,
    tile: WorkTile,
    i: cutlass.Constexpr,
    tiles_done: Int32,
) -> None:
    """O_i / l to shared memory and LSE to global memory, once the last product is there."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    signals.numbered(i).wait("stats#_full")
    total, highest = outputs.stats[i][thread], outputs.stats[i][WARPGROUP + thread]
    signals.numbered(i).arrive("stats#_empty")
    row = tile.tile_row(i) + thread
    peak, shrink = highest * outputs.scale_log2, Float32(1.0)
    if cutlass.const_expr(outputs.sink is not None):
        total, peak, shrink = add_sink(outputs.sink[tile.query_head(row)], total, peak)
    empty = (total == 0.0) | (total != total)
    factor = shrink * cute.arch.rcp_approx(cutlass.select_(empty, Float32(1.0), total))
    if cutlass.const_expr(outputs.lse is not None):
        lse = (peak + cute.math.log2(total, fastmath=True)) * LN_2
        store_lse(outputs.lse, tile, row, cutlass.select_(empty, -Float32.inf, lse))
    signals.numbered(i).wait("o#_full", tiles_done)
    signals.numbered(i).wait("epi#_empty", tiles_done)
    lanes = warp_lanes()
    for first in cutlass.range_constexpr(0, padded_dim(problem.spec.head_dim_v), CHUNK):
        columns = read_columns(lanes + (outputs.o[i] + first), CHUNK, CHUNK)
        values = multiplied(columns, factor)
        target = cute.local_tile(
            outputs.shared[None, None, i], (1, CHUNK), (thread, first // CHUNK)
        )
        store_rounded(values, target, problem.spec.dtype)
        stand_apart(problem.num_tiles)
    signals.numbered(i).arrive("p#_full_o#_scaled")
    if cutlass.const_expr(not problem.spec.ragged_q):
        cute.arch.fence_proxy("async.shared", space="cta")
    signals.numbered(i).arrive("epi#_full")


@cute.jit
def store_lse(lse: cute.Tensor, tile: WorkTile, row: Int32, value: Float32) -> None:
    """LSE of a packed row, if the row exists."""
    spec: cutlass.Constexpr = tile.spec
    if tile.has_row(row):
        position, head = tile.position(row), tile.query_head(row)
        if cutlass.const_expr(spec.packed_q):
            lse[head, tile.start_q + position] = value
        else:
            lse[tile.batch, head, position] = value


def add_sink(sink: Float32, total: Float32, peak: Float32) -> tuple[Float32, Float32, Float32]:
    """(l, m in powers of 2, factor of O) with a sink: a logit that has no value.

    The larger of both becomes the reference, so that neither power of two overflows.
    """
    sink = sink * LOG2_E
    highest = cute.arch.fmax(peak, sink)
    shrink = cute.math.exp2(peak - highest, fastmath=True)
    share = cute.math.exp2(sink - highest, fastmath=True)
    return total * shrink + share, highest, shrink
