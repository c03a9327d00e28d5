"""The softmax warpgroups: S to P, one thread per row of a warpgroup's Q tile."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit import rowmath
from fa4.kit.masked_rows import keep_range
from fa4.kit.ptx_block import stand_apart
from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, locate
from fa4.kit.tmem import read_columns, warp_lanes, write_columns
from fa4.kit.units import WARPGROUP
from fa4.plan.work import FRAGMENT
from fa4.sm100.forward.mods import Mods, RowMods

READ_COLS = 64  # of S per instruction: the maximum starts while the rest is on its way


@dataclass(frozen=True)
class Rows:
    """What the softmax warps of a Q tile work with.

    i: number of the Q tile. s, p: TMEM columns. stats: shared memory of this tile's statistics,
    log2(alpha) or l of 128 rows, then m. scale_log2: from scores to exponents of 2. split: columns
    of P before the first arrival. num_tiles: work tiles of the call.
    """

    i: Int32 | int
    s: Int32 | int
    p: Int32 | int
    split: cutlass.Constexpr
    stats: cute.Tensor
    scale_log2: Float32
    num_tiles: Int32
    mods: Mods


@cute.jit
def softmax(signals: Signals, problem: KernelProblem, rows: Rows) -> None:
    """Every KV tile of every work tile, last keys first: masked, whole, masked by the window."""
    spec: cutlass.Constexpr = problem.spec
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    slot = cute.make_tensor(rows.stats.iterator + thread, cute.make_layout(2, stride=WARPGROUP))
    index = first_tile(problem)
    keys_done, tiles_done = Int32(0), Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        first_row = tile.tile_row(rows.i)
        visible = tile.visible_start(first_row + thread), tile.visible_end(first_row + thread)
        mods = rows.mods.of_row(tile, first_row + thread)
        whole_stop, whole_start = tile.whole_tiles(first_row)
        number, stop = tile.kv_stop, tile.kv_start
        highest, total = (
            rowmath.reference_without_keys(rows.scale_log2),
            [Float32(0.0), Float32(0.0)],
        )
        for _ in cutlass.range(number - cutlass.max(whole_stop, stop), unroll=1):
            number -= 1
            state = highest, total
            highest, total = step(signals, rows, mods, number, visible, keys_done, state, slot)
            keys_done += 1
        for _ in cutlass.range(number - cutlass.max(whole_start, stop), unroll=1):
            number -= 1
            state = highest, total
            highest, total = step(signals, rows, mods, number, None, keys_done, state, slot)
            keys_done += 1
        if cutlass.const_expr(spec.hides_first_keys):
            for _ in cutlass.range(number - stop, unroll=1):
                number -= 1
                state = highest, total
                highest, total = step(signals, rows, mods, number, visible, keys_done, state, slot)
                keys_done += 1
        slot[0], slot[1] = total[0] + total[1], highest
        signals.arrive("stats#_full")
        signals.wait("stats#_empty")
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


@cute.jit
def step(
    signals: Signals,
    rows: Rows,
    mods: RowMods,
    number: Int32,
    visible: Any,
    keys_done: Int32,
    state: tuple,
    slot: cute.Tensor,
) -> tuple[Float32, list[Float32]]:
    """KV tile `number`. Returns the reference maximum and two partial row sums so far.

    visible: keys [start, stop) that the row sees, None where the tile needs no mask. keys_done: KV
    tiles before it, of all work tiles. slot: the row's statistics in shared memory, log2(alpha) or
    l, then m.
    """
    spec: cutlass.Constexpr = rows.mods.spec
    tile_n: cutlass.Constexpr = spec.numerics.tile_n
    highest, total = state
    lanes = warp_lanes()
    signals.wait("s#_full", keys_done)
    s = read_columns(lanes + rows.s, tile_n, gcd(tile_n, READ_COLS))
    first_key = number * tile_n
    s = mods.modified(s, first_key)
    if cutlass.const_expr(visible is not None):
        start = visible[0] - first_key if spec.hides_first_keys else None
        s = keep_range(s, start, visible[1] - first_key)
    most = rowmath.maximum(s, highest)
    highest, log2_alpha = rowmath.new_reference(
        most, highest, rows.scale_log2, spec.numerics.rescale_threshold_log2
    )
    slot[0] = log2_alpha
    signals.arrive("stats#_full")
    scale, offset = rows.scale_log2, -(highest * rows.scale_log2)
    exp2 = spec.numerics.exp2
    emulated = exp2.emulated_columns(tile_n)
    sums: list[Float32] = []
    for first in cutlass.range_constexpr(0, tile_n, FRAGMENT):
        chunk = slice(first, first + FRAGMENT)
        values, words = rowmath.exponentials(
            s[chunk], scale, offset, emulated[chunk], exp2.degree, spec.dtype
        )
        write_columns(words, lanes + (rows.p + first // 2))
        sums = rowmath.add_up(values, sums)
        if cutlass.const_expr(first + FRAGMENT == rows.split):
            cute.arch.fence_view_async_tmem_store()
            signals.arrive("p#_full_o#_scaled")
        if cutlass.const_expr(first + FRAGMENT < tile_n):
            stand_apart(rows.num_tiles)
    if cutlass.const_expr(rows.split < tile_n):
        cute.arch.fence_view_async_tmem_store()
        with cute.arch.elect_one():
            signals.arrive("p#_last")
    total = rowmath.total(sums, total, cute.math.exp2(log2_alpha, fastmath=True))
    signals.wait("stats#_empty")
    return highest, total
