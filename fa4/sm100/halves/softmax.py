"""The softmax warpgroups: two for a Q tile, each with half of the keys of a KV tile.

Thread t of both has row t. They exchange the maxima of their halves in every step, so that both
move the row's reference alike, and their sums at the end; each rescales and finishes half of O.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4.kit import rowmath
from fa4.kit.masked_rows import keep_range
from fa4.kit.ptx_block import PtxBlock, stand_apart
from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, locate
from fa4.kit.tmem import read_columns, warp_lanes, write_columns
from fa4.kit.units import WARPGROUP
from fa4.plan.work import FRAGMENT
from fa4.sm100.forward.correction import rescale
from fa4.sm100.forward.mods import Mods, RowMods
from fa4.sm100.halves.output import Output, finish

RESCALED_COLS = 8  # of O at a time: beside a row of S few registers are left
ROW_BYTES = 4 * WARPGROUP  # of a value of each row
READ_COLS = 32  # of S per instruction: the maximum starts while the rest is on its way


@dataclass(frozen=True)
class Half:
    """What a softmax warpgroup works with.

    i, half: its Q tile, and which keys of a KV tile. s, p: TMEM columns. keys: of its half. split:
    columns of P before the first arrival. own, other: shared memory for what both halves tell one
    another, a value of each row, in two places. scale_log2: from scores to exponents of 2.
    num_tiles: work tiles of the call.
    """

    i: Int32 | int
    half: Int32
    s: Int32
    p: Int32
    keys: cutlass.Constexpr
    split: cutlass.Constexpr
    own: Int32
    other: Int32
    scale_log2: Float32
    num_tiles: Int32
    mods: Mods
    output: Output


@cute.jit
def softmax(signals: Signals, problem: KernelProblem, rows: Half) -> None:
    """Every KV tile of every work tile, last keys first: masked, whole, masked by the window."""
    spec: cutlass.Constexpr = problem.spec
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = first_tile(problem)
    keys_done, tiles_done = Int32(0), Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        first_row = tile.tile_row(rows.i)
        visible = tile.visible_start(first_row + thread), tile.visible_end(first_row + thread)
        mods = rows.mods.of_row(tile, first_row + thread)
        whole_stop, whole_start = tile.whole_tiles(first_row)
        number, stop = tile.kv_stop, tile.kv_start
        begun = Boolean(False)
        highest, total = (
            rowmath.reference_without_keys(rows.scale_log2),
            [Float32(0.0), Float32(0.0)],
        )
        for _ in cutlass.range(number - cutlass.max(whole_stop, stop), unroll=1):
            number -= 1
            at = number, keys_done + tiles_done, keys_done
            highest, total = step(signals, rows, mods, at, visible, (highest, total), begun)
            keys_done += 1
            begun = Boolean(True)
        for _ in cutlass.range(number - cutlass.max(whole_start, stop), unroll=1):
            number -= 1
            at = number, keys_done + tiles_done, keys_done
            highest, total = step(signals, rows, mods, at, None, (highest, total), begun)
            keys_done += 1
            begun = Boolean(True)
        if cutlass.const_expr(spec.hides_first_keys):
            for _ in cutlass.range(number - stop, unroll=1):
                number -= 1
                at = number, keys_done + tiles_done, keys_done
                highest, total = step(signals, rows, mods, at, visible, (highest, total), begun)
                keys_done += 1
                begun = Boolean(True)
        mine = total[0] + total[1]
        theirs = exchanged(signals, rows, mine, keys_done + tiles_done)
        finish(signals, problem, rows.output, tile, (mine + theirs, highest), tiles_done)
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


@cute.jit
def exchanged(signals: Signals, rows: Half, value: Float32, turn: Int32) -> Float32:
    """The row's value of the other half; turn: exchanges so far.

    Two places and two barriers in turn. A warp may be one exchange ahead of another one, which has
    not waited for the last, but not two.
    """
    ring = signals.ring("max0a")
    place = ring.on(turn % ring.stages)
    own, other = (start + place.slot * ROW_BYTES for start in (rows.own, rows.other))
    write_value(own, value)
    signals.arrive("max#@_full", place)
    signals.wait("max#^_full", place)
    return read_value(other)


def write_value(start: Int32, value: Float32) -> None:
    """This thread's value behind an address in shared memory that all threads share."""
    code = PtxBlock()
    address = code.do("add.s32", code.read(start), code.read(row_offset()), kind="b32")
    code.effect(f"st.shared.f32 [{address}], {code.read(value)};")
    code.trace(effects=True)


def read_value(start: Int32) -> Float32:
    """The same, read."""
    code = PtxBlock()
    address = code.do("add.s32", code.read(start), code.read(row_offset()), kind="b32")
    (value,) = code.load("ld.shared.f32", 1, address)
    return code.trace(value, effects=True)[0]


def row_offset() -> Int32:
    """Bytes to this thread's row in an array of float32."""
    return cute.arch.thread_idx()[0] % WARPGROUP * 4


@cute.jit
def step(
    signals: Signals,
    rows: Half,
    mods: RowMods,
    at: tuple,
    visible: Any,
    state: tuple,
    begun: Boolean,
) -> tuple[Float32, list[Float32]]:
    """This half of a KV tile. Returns the reference maximum and two partial row sums so far.

    at: number of the KV tile, exchanges and KV tiles before it, of all work tiles. visible: keys
    [start, stop) that the row sees, None where the tile needs no mask. begun: has the work tile had
    keys before? Else O is nothing yet.
    """
    spec: cutlass.Constexpr = rows.mods.spec
    number, turn, keys_done = at
    highest, total = state
    lanes = warp_lanes()
    signals.wait("s#@_full", keys_done)
    s = read_columns(lanes + rows.s, rows.keys, READ_COLS)
    first_key = number * spec.tile_n + rows.half * rows.keys
    s = mods.modified(s, first_key)
    if cutlass.const_expr(visible is not None):
        start = visible[0] - first_key if spec.hides_first_keys else None
        s = keep_range(s, start, visible[1] - first_key)
    most = rowmath.maximum(s, highest)
    most = cute.arch.fmax(most, exchanged(signals, rows, most, turn))
    highest, log2_alpha = rowmath.new_reference(
        most, highest, rows.scale_log2, spec.numerics.rescale_threshold_log2
    )
    alpha = cute.math.exp2(log2_alpha, fastmath=True)
    if cute.arch.vote_any_sync((log2_alpha < 0.0) & begun):
        rescale(rows.output.column, rows.output.cols, alpha, RESCALED_COLS, rows.num_tiles)
    if rows.half == 1:
        signals.of("softmax#b").arrive("p#a_full")
    scale, offset = rows.scale_log2, -(highest * rows.scale_log2)
    exp2 = spec.numerics.exp2
    emulated = exp2.emulated_columns(rows.keys)
    sums: list[Float32] = []
    for first in cutlass.range_constexpr(0, rows.keys, FRAGMENT):
        chunk = slice(first, first + FRAGMENT)
        values, words = rowmath.exponentials(
            s[chunk], scale, offset, emulated[chunk], exp2.degree, spec.dtype
        )
        write_columns(words, lanes + (rows.p + first // 2))
        sums = rowmath.add_up(values, sums)
        if cutlass.const_expr(first + FRAGMENT == rows.split):
            cute.arch.fence_view_async_tmem_store()
            signals.arrive("p#@_full")
        if cutlass.const_expr(first + FRAGMENT < rows.keys):
            stand_apart(rows.num_tiles)
    if cutlass.const_expr(rows.split < rows.keys):
        cute.arch.fence_view_async_tmem_store()
        with cute.arch.elect_one():
            signals.arrive("p#@_last")
    return highest, rowmath.total(sums, total, alpha)
