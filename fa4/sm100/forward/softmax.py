"""A softmax warpgroup: S to P, one thread per row of its Q tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.sm100.forward import rowmath
from fa4.sm100.forward.context import ELEMENTS, WARPGROUP, Signals
from fa4.sm100.forward.spec import TILE_ROWS
from fa4.sm100.forward.tiles import Problem, first_tile, locate, next_tile

FRAGMENT = 32


@dataclass(frozen=True)
class Rows:
    """What the softmax warps of Q tile i work with.

    s, p: TMEM columns. stats: shared memory of this tile's statistics, alpha or l of 128 rows,
    then m. scale_log2: softmax_scale * log2(e). split: columns of P before the first arrival.
    """

    i: cutlass.Constexpr
    s: cutlass.Constexpr
    p: cutlass.Constexpr
    split: cutlass.Constexpr
    stats: cute.Tensor
    scale_log2: Float32


@cute.jit
def softmax(signals: Signals, problem: Problem, rows: Rows):
    """Every KV tile of every work tile: masked ones first, as they hold the last keys."""
    i: cutlass.Constexpr = rows.i
    spec: cutlass.Constexpr = problem.spec
    tile_n: cutlass.Constexpr = spec.numerics.tile_n
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = first_tile(problem)
    uses, tiles_done = Int32(0), Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        first_row = tile.first_row + i * TILE_ROWS
        row = first_row + thread
        stop, start = tile.visible_end(row), tile.visible_start(row)
        unmasked = cutlass.max(tile.visible_end(first_row), 0) // tile_n
        number = tile.kv_stop - 1
        highest, total = -Float32.inf, Float32(0.0)
        signals.wait(f"stats{i}_empty", uses + tiles_done)
        while number >= cutlass.max(unmasked, tile.kv_start):
            highest, total = step(
                signals, rows, spec, True, number, (start, stop), uses, tiles_done, highest, total
            )
            uses += 1
            number -= 1
        while number >= tile.kv_start:
            highest, total = step(
                signals, rows, spec, False, number, (start, stop), uses, tiles_done, highest, total
            )
            uses += 1
            number -= 1
        rows.stats[thread] = total
        rows.stats[WARPGROUP + thread] = highest
        signals.arrive(f"stats{i}_full")
        tiles_done += 1
        index = next_tile(problem, index)


@cute.jit
def step(
    signals,
    rows,
    spec,
    masked: cutlass.Constexpr,
    number,
    visible,
    uses,
    tiles_done,
    highest,
    total,
):
    """One KV tile. Returns the reference maximum and the row sum so far."""
    i: cutlass.Constexpr = rows.i
    tile_n: cutlass.Constexpr = spec.numerics.tile_n
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    signals.wait(f"s{i}_full", uses)
    s = read_scores(rows.s, tile_n, thread)
    if cutlass.const_expr(masked):
        first_key = number * tile_n
        start = visible[0] - first_key if spec.window_left else None
        s = rowmath.keep_range(s, start, visible[1] - first_key)
    highest, alpha, offset = new_reference(
        rowmath.maximum(s, highest), highest, rows.scale_log2, spec
    )
    rows.stats[thread] = alpha
    signals.arrive(f"stats{i}_full")
    x = rowmath.scaled(s, rows.scale_log2, offset)
    emulated = spec.numerics.exp2.emulated_columns(tile_n)
    p = []
    for first in cutlass.range_constexpr(0, tile_n, FRAGMENT):
        chunk = slice(first, first + FRAGMENT)
        p += rowmath.exponentials(x[chunk], emulated[chunk], spec.numerics.exp2.degree)
        write_columns(
            rounded_words(p[chunk], ELEMENTS[spec.dtype]),
            rows.p + first // 2,
            FRAGMENT // 2,
            thread,
        )
        if cutlass.const_expr(first + FRAGMENT == rows.split):
            cute.arch.fence_view_async_tmem_store()
            signals.arrive(f"p{i}_full_o{i}_scaled")
    if cutlass.const_expr(rows.split < tile_n):
        cute.arch.fence_view_async_tmem_store()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            signals.arrive(f"p{i}_last")
    signals.wait(f"stats{i}_empty", uses + tiles_done + 1)
    return highest, rowmath.total(p, total * alpha)


def new_reference(most, highest, scale_log2, spec):
    """(reference maximum, alpha, offset of the exponents) once `most` is the true maximum.

    The old reference stays while the maximum has risen by no more than tau powers of two. At the
    start it is -inf: then alpha is 0, and multiplies a sum of 0.
    """
    safe = cutlass.select_(most == -Float32.inf, Float32(0.0), most)
    rise = (highest - safe) * scale_log2
    if spec.numerics.rescale_threshold_log2 > 0:
        keep = rise >= -spec.numerics.rescale_threshold_log2
        most = cutlass.select_(keep, highest, most)
        safe = cutlass.select_(keep, highest, safe)
        rise = cutlass.select_(keep, Float32(0.0), rise)
    alpha = cute.math.exp2(rise, fastmath=True)
    return most, alpha, -(safe * scale_log2)


def read_scores(column: int, tile_n: int, thread: Int32) -> list[Float32]:
    """This thread's row of S out of tensor memory."""
    width = min(tile_n, 64)
    values: list[Float32] = []
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(width))
    for first in range(0, tile_n, width):
        values += read_columns(op, column + first, width, thread)
    return values


def read_columns(op, column: int, width: int, thread: Int32) -> list[Float32]:
    """`width` TMEM columns of this thread's lane."""
    source = tmem_tensor(column, width)
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), source)
    mine = copy.get_slice(thread)
    part = mine.partition_S(source)
    shape = mine.partition_D(cute.make_identity_tensor(source.shape)).shape
    registers = cute.make_rmem_tensor(shape, Float32)
    cute.copy(copy, part, registers)
    flat = cute.make_tensor(registers.iterator, cute.make_layout(width))
    return [flat[c] for c in range(width)]


def write_columns(values: cute.Tensor, column: int, width: int, thread: Int32) -> None:
    """`width` 32-bit registers to TMEM columns of this thread's lane."""
    target = tmem_tensor(column, width)
    op = tcgen05.St32x32bOp(tcgen05.Repetition(width))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), target)
    mine = copy.get_slice(thread)
    shape = mine.partition_S(cute.make_identity_tensor(target.shape)).shape
    registers = cute.make_tensor(values.iterator, cute.make_layout(shape))
    cute.copy(copy, registers, mine.partition_D(target))


def tmem_tensor(column: int, width: int) -> cute.Tensor:
    """128 lanes x `width` columns of tensor memory. Lanes are 2^16 addresses apart."""
    start = cute.make_ptr(Float32, column, cute.AddressSpace.tmem, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout((WARPGROUP, width), stride=(1 << 16, 1)))


def rounded_words(values: list[Float32], element: type) -> cute.Tensor:
    """Values rounded to a 16-bit type, two to a register."""
    exact = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
    for c, value in enumerate(values):
        exact[c] = value
    rounded = cute.make_rmem_tensor(cute.make_layout(len(values)), element)
    rounded.store(exact.load().to(element))
    words = cute.recast_ptr(rounded.iterator, dtype=Float32)
    return cute.make_tensor(words, cute.make_layout(len(values) // 2))
