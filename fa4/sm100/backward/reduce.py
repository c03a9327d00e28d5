"""The reduce warps: dQ of a query tile out of tensor memory, added into global memory.

Each warp has 32 rows, and hands over their columns by slices: a run of memory here as there
(`workspace.dq_offset`), which one bulk copy adds. No warp waits for another one. In a fixed order
of sums each warp's part of a tile has a counter, which tells whose turn it is.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.tmem import read_columns, warp_lanes
from fa4.kit.units import TILE_ROWS, WARP, WARPGROUP, padded_dim
from fa4.plan.backward_single import DQ_STAGES
from fa4.sm100.backward.tiles import KeyTile
from fa4.sm100.backward.workspace import DQ_WARPS, VECTOR

FLOAT_BYTES = 4
READ_COLS = 64  # of dQ per instruction, at most


@dataclass(frozen=True)
class Reduction:
    """What the reduce warps work with.

    dq: columns of tensor memory. staging: shared memory of all slots. dq_accum: in global memory,
    (heads, tiles, 128 * d) of float32. turns: (heads, tiles, 8) of int32, None in any order.
    """

    dq: Int32 | int
    staging: cute.Pointer
    dq_accum: cute.Tensor
    turns: Any


@cute.jit
def reduce(signals: Signals, tile: KeyTile, work: Reduction) -> None:
    """Query heads of the group one after the other, their query tiles from the first on."""
    spec: cutlass.Constexpr = tile.spec
    dim: cutlass.Constexpr = padded_dim(spec.head_dim)
    own_cols: cutlass.Constexpr = dim // spec.cta_group
    slot_bytes: cutlass.Constexpr = spec.plan.buffer("dq_staging").size
    cols: cutlass.Constexpr = slot_bytes // (WARPGROUP * FLOAT_BYTES)
    slices: cutlass.Constexpr = own_cols // cols
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % (WARPGROUP // WARP)
    lane = cute.arch.lane_idx()
    own = Int32(work.staging.toint()) + warp * (slot_bytes * WARP // WARPGROUP)
    turn, turned, held = Ring.of(1), Int32(0), Int64(-1)
    q_start, q_stop = tile.q_start, tile.q_stop
    head, row_tile = tile.head_k * tile.group, q_start
    for _ in cutlass.range(tile.trips, unroll=1):
        signals.wait("dq_full", turn)
        values = read_columns(warp_lanes() + work.dq, own_cols, gcd(READ_COLS, own_cols))
        cute.arch.fence_view_async_tmem_load()
        signals.arrive_once("dq_empty")
        place = Int64(head) * work.dq_accum.shape[1] + tile.row_tile + row_tile
        if cutlass.const_expr(spec.deterministic):
            release_turn(work.turns, held)
            held = place * DQ_WARPS + tile.rank * (DQ_WARPS // 2) + warp
            await_turn(work.turns, held, tile.keys_before(row_tile))
        target = work.dq_accum.iterator.toint() + FLOAT_BYTES * (
            place * (TILE_ROWS * dim) + part_of_tile(tile, warp, dim)
        )
        for number in cutlass.range_constexpr(slices):
            slot = (turned + number) % DQ_STAGES
            staged = own + slot * slot_bytes
            signals.wait("dq_slot_empty")
            cute.arch.sync_warp()
            store_rows(values[number * cols : (number + 1) * cols], staged + lane * 16)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                num_bytes = WARP * cols * FLOAT_BYTES
                add_bulk(target + number * num_bytes, staged, num_bytes)
                signals.arrive("dq_slot_empty", after="reduce")
        if cutlass.const_expr(slices % DQ_STAGES):
            turned = turned ^ 1
        turn = turn.next()
        row_tile += 1
        ended = row_tile == q_stop
        head = cutlass.select_(ended, head + 1, head)
        row_tile = cutlass.select_(ended, q_start, row_tile)
    if cutlass.const_expr(spec.deterministic):
        release_turn(work.turns, held)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def part_of_tile(tile: KeyTile, warp: Int32, dim: int) -> Int32:
    """Where a warp's part of a dQ tile starts, in float32.

    In a pair each CTA has half of the rows, and two of its warps the halves of their columns.
    """
    if tile.spec.cta_group == 1:
        return warp * (WARP * dim)
    rows, half = tile.rank * 2 + warp % 2, warp // 2
    return rows * (WARP * dim) + half * (WARP * dim // 2)


@cute.jit
def await_turn(turns: cute.Tensor, counter: Int64, number: Int32) -> None:
    """Until `number` CTAs have added to this warp's part of the dQ tile."""
    pointer = turns.iterator + counter
    done = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")
    while done != number:
        done = cute.arch.load(pointer, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def release_turn(turns: cute.Tensor, counter: Int64) -> None:
    """The next CTA may add where this warp did last: its additions are done, not only read.

    They had the time of a whole query tile for that. A counter of -1 stands for none.
    """
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    if counter >= 0 and cute.arch.lane_idx() == 0:
        cute.arch.red(turns.iterator + counter, Int32(1), op="add", dtype="s32", sem="release",
                      scope="gpu")  # fmt: skip


def store_rows(values: list, address: Int32) -> None:
    """A thread's columns of a slice, 16 bytes at a time; lanes lie side by side."""
    code = PtxBlock()
    start, words = code.read(address), code.read_all(values)
    for number in range(0, len(words), VECTOR):
        place = f"[{start}+{number * WARP * FLOAT_BYTES}]"
        code.effect(f"st.shared.v4.f32 {place}, {{{', '.join(words[number : number + VECTOR])}}};")
    code.trace(effects=True)


def add_bulk(target: Int64, source: Int32, num_bytes: int) -> None:
    """Add float32 of shared memory to global memory (PTX ISA, cp.reduce.async.bulk)."""
    code = PtxBlock()
    code.effect(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
        f"[{code.read(target)}], [{code.read(source)}], {num_bytes};"
    )
    code.trace(effects=True)
