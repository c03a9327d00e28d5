"""A half of O, finished by the softmax warps whose sums it needs."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import stand_apart
from fa4.kit.rowmath import multiplied, store_rounded
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile
from fa4.kit.tmem import read_columns, warp_lanes
from fa4.kit.units import WARPGROUP
from fa4.sm100.forward.correction import CHUNK, LN_2, add_sink, store_lse


@dataclass(frozen=True)
class Output:
    """Half of an O tile, and where it goes.

    i, half: which one. column: its first in tensor memory. cols: of them. shared: O in shared
    memory, (rows, cols, Q tile). lse, sink: global tensors or None.
    """

    i: Int32 | int
    half: Int32
    column: Int32
    cols: cutlass.Constexpr
    shared: cute.Tensor
    scale_log2: Float32
    lse: cute.Tensor | None
    sink: Any


@cute.jit
def finish(
    signals: Signals,
    problem: KernelProblem,
    output: Output,
    tile: WorkTile,
    statistics: tuple,
    tiles_done: Int32,
) -> None:
    """O / l to shared memory, once the last product is there; LSE to global memory by one half.

    statistics: l of both halves, and the row's reference maximum.
    """
    spec: cutlass.Constexpr = problem.spec
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    total, highest = statistics
    row = tile.tile_row(output.i) + thread
    peak, shrink = highest * output.scale_log2, Float32(1.0)
    if cutlass.const_expr(output.sink is not None):
        total, peak, shrink = add_sink(output.sink[tile.query_head(row)], total, peak)
    empty = (total == 0.0) | (total != total)
    factor = shrink * cute.arch.rcp_approx(cutlass.select_(empty, Float32(1.0), total))
    if cutlass.const_expr(output.lse is not None):  # noqa: SIM102
        if output.half == 0:
            lse = (peak + cute.math.log2(total, fastmath=True)) * LN_2
            store_lse(output.lse, tile, row, cutlass.select_(empty, -Float32.inf, lse))
    signals.wait("o#_full", tiles_done)
    signals.wait("epi#_empty", tiles_done)
    lanes = warp_lanes()
    width: cutlass.Constexpr = gcd(output.cols, CHUNK)
    for first in cutlass.range_constexpr(0, output.cols, width):
        columns = read_columns(lanes + (output.column + first), width, width)
        values = multiplied(columns, factor)
        place = thread, output.half * (output.cols // width) + first // width
        target = cute.local_tile(output.shared[None, None, output.i], (1, width), place)
        store_rounded(values, target, spec.dtype)
        stand_apart(problem.num_tiles)
    if cutlass.const_expr(not spec.ragged_q):
        cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive("epi#_full")
