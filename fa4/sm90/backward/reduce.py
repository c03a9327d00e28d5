"""A warp's part of dQ of a query tile, added to global memory.

A part is 16 rows and the warpgroup's columns, in the order in which the threads hold it, so that
each adds 16 bytes at a time and the lanes' lie side by side. Through shared memory and bulk copies,
as the published kernels do it, a step takes 512 accesses to it more, and 7% more time (measured on
an H200). Parts lie one behind the other:

    dq_accum    float32 (heads, tiles, 128 * d), of a tile (rows of a query tile, its warpgroups,
                their warps, runs of 8 columns, lanes, 4): elements 4 j to 4 j + 3 of a lane

In a fixed order of sums each part of a tile has a counter, which tells whose turn it is.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.sm90.backward.load import place_of
from fa4.sm90.backward.spec import CONSUMER_WARPS
from fa4.sm100.backward.reduce import await_turn, release_turn
from fa4.sm100.backward.tiles import KeyTile
from fa4.sm100.backward.workspace import VECTOR
from fa4.sm100.kit.ptx_block import PtxBlock
from fa4.sm100.kit.units import TILE_ROWS, WARP

FLOAT_BYTES = 4


@dataclass(frozen=True)
class DqReduction:
    """Where a warp's dQ goes.

    warp: of all consumers'. dq_accum: in global memory. turns: (heads, tiles, counters) of int32,
    None in any order.
    """

    warp: Int32
    dq_accum: cute.Tensor
    turns: Any


@cute.jit
def add_part(
    work: DqReduction, tile: KeyTile, head: Int32, row_tile: Int32, values: list[Float32]
) -> None:
    """Add the warp's part of dQ of a tile; in a fixed order of sums, when it is its turn."""
    spec: cutlass.Constexpr = tile.spec
    floats: cutlass.Constexpr = len(values) * WARP
    columns: cutlass.Constexpr = spec.pipeline.head_dim
    at, inside = place_of(tile, work.dq_accum.shape[1], head, row_tile)
    counter = at * spec.dq_counters + inside // spec.tile_rows * CONSUMER_WARPS + work.warp
    if cutlass.const_expr(spec.deterministic):
        await_turn(work.turns, counter, tile.keys_before(row_tile))
    offset = (at * TILE_ROWS + inside) * columns + work.warp * floats
    lane = cute.arch.lane_idx()
    target = work.dq_accum.iterator.toint() + FLOAT_BYTES * (offset + lane * VECTOR)
    add_vectors(values, target)
    if cutlass.const_expr(spec.deterministic):
        cute.arch.sync_warp()
        release_turn(work.turns, counter)


def add_vectors(values: list[Float32], address: Int64) -> None:
    """A thread's elements; the same of the lanes lie side by side."""
    code = PtxBlock()
    start, words = code.read(address), code.read_all(values)
    for number in range(0, len(words), VECTOR):
        place = f"[{start}+{number * WARP * FLOAT_BYTES}]"
        some = ", ".join(words[number : number + VECTOR])
        code.effect(f"red.relaxed.gpu.global.add.v4.f32 {place}, {{{some}}};")
    code.trace(effects=True)
