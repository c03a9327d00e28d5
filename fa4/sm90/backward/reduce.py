"""dQ of a query tile on its way to global memory: a warpgroup's part by way of shared memory.

A part is a warpgroup's 64 rows of dQ, in the order in which its threads hold them, so that each
stores 16 bytes at a time and the lanes' lie side by side. A warp for each warpgroup adds its part
with one bulk copy: the consumers wait neither for the memory nor for other CTAs. Parts lie one
behind the other:

    dq_accum    float32 (heads, blocks, rows * d), of a block (its query tiles, their warpgroups,
                their warps, runs of 8 columns, lanes, 4): elements 4 j to 4 j + 3 of a lane

In a fixed order of sums each part of a tile has a counter, which tells whose turn it is.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.units import WARP, WARPGROUP
from fa4.plan.warpgroup_backward import CONSUMERS, dq_columns
from fa4.sm90.backward.epilogue import KeyGradients, send
from fa4.sm90.backward.load import place_of
from fa4.sm90.backward.order import first_rows, next_rows, query_head
from fa4.sm90.backward.queue import KeyQueue, receive
from fa4.sm100.backward.reduce import add_bulk, await_turn, release_turn, store_rows
from fa4.sm100.backward.tiles import KeyTile
from fa4.sm100.backward.workspace import VECTOR

FLOAT_BYTES = 4


@dataclass(frozen=True)
class DqReduction:
    """Where a warpgroup's part of dQ goes.

    number: of the warpgroup. staging: its part's address in shared memory. dq_accum: in global
    memory. turns: (heads, tiles, counters) of int32, None in any order. gradients: of the
    warpgroup's keys, which leave by the same warp.
    """

    number: Int32
    staging: Int32
    dq_accum: cute.Tensor
    turns: Any
    gradients: KeyGradients


def store_part(signals: Signals, staging: Int32, turn: Ring, values: list[Float32]) -> None:
    """A warpgroup's part of dQ into shared memory, when the last one has left it.

    staging: as of `DqReduction`.
    """
    signals.wait("dq#_empty", turn)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    warp_bytes = len(values) * WARP * FLOAT_BYTES
    offset = thread // WARP * warp_bytes + thread % WARP * (VECTOR * FLOAT_BYTES)
    store_rows(values, staging + offset)


def hand_over_part(signals: Signals, turn: Ring) -> None:
    """What `store_part` has stored may be added."""
    cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive_once("dq#_full", turn)


@cute.jit
def reduce(signals: Signals, queue: KeyQueue, work: DqReduction) -> None:
    """A warp: of every work tile of its CTA the parts of dQ, and dV and dK."""
    turn, keys = signals.ring("dq0"), signals.ring("work")
    told = receive(signals, queue, keys)
    while told.exists:
        turn = reduce_tile(signals, told.of(queue.work.problem), work, turn, keys)
        keys = keys.next()
        told = receive(signals, queue, keys)


@cute.jit
def reduce_tile(signals: Signals, tile: KeyTile, work: DqReduction, turn: Ring, keys: Ring) -> Ring:
    """The query tiles of the group's heads, in their order.

    Returns where the ring of parts is.
    """
    member, row_tile = first_rows(tile)
    once = Ring(1, 0, keys.slot)  # of what there is one of for each work tile
    gradients = work.gradients.at(work.number, keys)
    for _ in cutlass.range(tile.trips, unroll=1):
        add_part(signals, tile, work, turn, (query_head(tile, member), row_tile))
        turn = turn.next()
        member, row_tile = next_rows(tile, member, row_tile)
    send(signals, "dv#_full", tile, gradients.dv, work.number, once)
    signals.wait("stored#")
    signals.arrive_once("dv#_empty", once)
    send(signals, "dk#_full", tile, gradients.dk, work.number, keys)
    signals.wait("stored#")
    signals.arrive_once("k#_empty", keys)
    return turn


@cute.jit
def add_part(
    signals: Signals, tile: KeyTile, work: DqReduction, turn: Ring, rows: tuple[Int32, Int32]
) -> None:
    """The part of dQ of (query head, query tile), in its turn."""
    spec: cutlass.Constexpr = tile.spec
    columns: cutlass.Constexpr = spec.pipeline.dq_dim
    part: cutlass.Constexpr = WARPGROUP_ROWS * dq_columns(spec.pipeline)
    head, row_tile = rows
    at, inside = place_of(tile, work.dq_accum.shape[1], head, row_tile)
    target = work.dq_accum.iterator.toint() + FLOAT_BYTES * (
        (at * spec.block_rows + inside) * columns + work.number * part
    )
    signals.wait("dq#_full", turn)
    if cutlass.const_expr(spec.deterministic):
        own = at * spec.dq_counters + inside // spec.tile_rows * CONSUMERS + work.number
        await_turn(work.turns, own, tile.keys_before(row_tile))
    if cute.arch.lane_idx() == 0:
        add_bulk(target, work.staging, part * FLOAT_BYTES)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    signals.arrive_once("dq#_empty", turn)
    if cutlass.const_expr(spec.deterministic):
        release_turn(work.turns, own)
