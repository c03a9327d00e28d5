"""A finished O tile: divided by its row sums, to shared memory, and from there to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.plan.warpgroup import output_over_queries
from fa4.sm100.forward.correction import LN_2, add_sink, store_lse
from fa4.sm100.kit.descriptors import swizzle_bytes
from fa4.sm100.kit.rowmath import rounded
from fa4.sm100.kit.signals import CTA_BARRIER, Signals, named_numbers
from fa4.sm100.kit.tiles import WorkTile
from fa4.sm100.kit.units import WARP, WARPGROUP
from fa4.sm90.forward import fragment

VECTOR = 8  # elements of a 16-byte store


@dataclass(frozen=True)
class Output:
    """O in shared memory, (rows, cols) of this warpgroup, and in global memory.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    packed tensor, atom None and the plain tensor. lse, sink: global tensors or None.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: cute.Tensor
    scale_log2: Float32
    lse: cute.Tensor | None
    sink: Any


@cute.jit
def finish(
    signals: Signals, work: Any, tile: WorkTile, output: Output, rows: tuple, state: Any
) -> None:
    """O / l of this warpgroup's rows, and LSE."""
    spec: cutlass.Constexpr = tile.spec
    over: cutlass.Constexpr = output_over_queries(spec.pipeline, spec.gpu)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    if cutlass.const_expr(not over):
        signals.arrive_once("q_empty")
    totals = state.totals
    sums = [totals[2 * row] + totals[2 * row + 1] for row in range(fragment.ROWS_OF_THREAD)]
    factors = divisors(output, tile, rows, fragment.quad_sums(sums), state.highest)
    words = rounded(fragment.multiplied_rows(state.sums, factors), spec.dtype)
    if cutlass.const_expr(not over):
        if thread < WARP:
            signals.wait("stored#")
        meet_warpgroup(signals)
    share(words, output.shared)
    if cutlass.const_expr(output.atom is not None):
        cute.arch.fence_proxy("async.shared", space="cta")
    meet_warpgroup(signals)
    if cutlass.const_expr(output.atom is not None):
        if thread < WARP:
            store_by_tma(output, tile, work.number)
            signals.arrive("stored#", after="tma")
    else:
        store_rows(output, tile, work.number, thread)
        if cutlass.const_expr(over):
            cute.arch.fence_proxy("async.shared", space="cta")
        signals.arrive("stored#", after="tma")
    if cutlass.const_expr(over):
        if thread < WARP:
            signals.wait("stored#")
        meet_warpgroup(signals)
        signals.arrive_once("q_empty")


def share(words: list[Int32], shared: cute.Tensor) -> None:
    """A warpgroup's words of two elements to its (rows, cols) of shared memory."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    width = swizzle_bytes(cute.size(shared.shape[1]))
    fragment.store_matrices(words, shared.iterator.toint().to(Int32), thread, width)


@cute.jit
def close(signals: Signals, spec: cutlass.Constexpr) -> None:
    """The last store has read shared memory, before the CTA gives it back."""
    if cutlass.const_expr(not output_over_queries(spec.pipeline, spec.gpu)):  # noqa: SIM102
        if cute.arch.thread_idx()[0] % WARPGROUP < WARP:
            signals.wait("stored#")


def meet_warpgroup(signals: Signals) -> None:
    """The warps of this warpgroup meet, at the named barriers behind the plan's."""
    first = CTA_BARRIER + 1 + len(named_numbers(signals.plan))
    cute.arch.barrier(barrier_id=first + signals.number, number_of_threads=WARPGROUP)


@cute.jit
def divisors(
    output: Output, tile: WorkTile, rows: tuple, totals: list, highest: list
) -> list[Float32]:
    """Each row's factor 1 / l; stores its LSE."""
    quad_thread = cute.arch.thread_idx()[0] % fragment.QUAD
    factors = []
    for i in cutlass.range_constexpr(fragment.ROWS_OF_THREAD):
        total, peak, shrink = totals[i], highest[i] * output.scale_log2, Float32(1.0)
        if cutlass.const_expr(output.sink is not None):
            total, peak, shrink = add_sink(output.sink[tile.query_head(rows[i])], total, peak)
        empty = (total == 0.0) | (total != total)
        factors.append(shrink * cute.arch.rcp_approx(cutlass.select_(empty, Float32(1.0), total)))
        if cutlass.const_expr(output.lse is not None):
            lse = (peak + cute.math.log2(total, fastmath=True)) * LN_2
            if quad_thread == 0:
                store_lse(output.lse, tile, rows[i], cutlass.select_(empty, -Float32.inf, lse))
    return factors


def store_by_tma(output: Output, tile: WorkTile, number: Int32) -> None:
    """O; TMA leaves out rows and columns that the tensor does not have."""
    shape = tuple(cute.size(mode) for mode in output.shared.shape)
    tensor = output.tensor[None, None, tile.head, tile.batch]
    target = cute.local_tile(tensor, shape, (tile.tile_number(number), 0))
    source, target = cpasync.tma_partition(
        output.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(output.shared, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(output.atom, source, target)


@cute.jit
def store_rows(output: Output, tile: WorkTile, number: Int32, thread: Int32) -> None:
    """O with 16-byte stores, a row's vectors side by side; rows beyond the sequence stay out."""
    spec: cutlass.Constexpr = tile.spec
    vectors: cutlass.Constexpr = spec.head_dim_v // VECTOR
    first = tile.tile_row(number)
    for i in cutlass.range(thread, spec.tile_rows * vectors, WARPGROUP, unroll=1):
        row, vector = i // vectors, i % vectors
        packed = first + row
        if packed < tile.seqlen_q * spec.group:
            position, head = tile.start_q + tile.position(packed), tile.query_head(packed)
            if cutlass.const_expr(spec.packed_q):
                target = output.tensor[position, head, None]
            else:
                target = output.tensor[tile.batch, position, head, None]
            source = cute.local_tile(output.shared, (1, VECTOR), (row, vector))
            cute.autovec_copy(
                cute.make_tensor(source.iterator, cute.make_layout(VECTOR)),
                cute.local_tile(target, (VECTOR,), (vector,)),
            )
