"""A finished O tile: divided by its row sums, to shared memory, and from there to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.plan.warpgroup import output_over_queries
from fa4.sm90.forward import fragment, held, narrow
from fa4.sm90.forward.held import meet_warpgroup
from fa4.sm100.forward.correction import LN_2, add_sink, store_lse
from fa4.sm100.kit.descriptors import swizzle_bytes
from fa4.sm100.kit.rowmath import rounded
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.tiles import WorkTile
from fa4.sm100.kit.units import WARP, WARPGROUP

VECTOR = 8  # elements of a 16-byte store


@dataclass(frozen=True)
class OutputTile:
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
    signals: Signals, work: Any, tile: WorkTile, output: OutputTile, rows: tuple, state: Any
) -> None:
    """O / l of this warpgroup's rows, and LSE."""
    spec: cutlass.Constexpr = tile.spec
    over: cutlass.Constexpr = output_over_queries(spec.pipeline, spec.gpu)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    totals = fragment.quad_sums(state.totals)
    peaks = [highest * work.scale_log2 for highest in state.highest]
    if cutlass.const_expr(spec.numerics.p_offset_log2):
        peaks = [peak - spec.numerics.p_offset_log2 for peak in peaks]
    totals, peaks, factors = normalisers(output, tile, rows, totals, peaks)
    given = narrow.factor_of(work.descales[2:], tile)
    if cutlass.const_expr(given is not None):
        factors = [factor * given for factor in factors]
    sums = state.sums
    if cutlass.const_expr(spec.promote):
        sums = held.taken(work, state)
    values = fragment.multiplied_rows(sums, factors)
    if cutlass.const_expr(spec.pipeline.transposes):
        values = narrow.in_column_pairs(values)
    words = rounded(values, spec.out_dtype)
    if cutlass.const_expr(not over):
        if cutlass.const_expr(not spec.promote):  # noqa: SIM102
            if thread < WARP:
                signals.wait("stored#")
        meet_warpgroup(signals)
    if cutlass.const_expr(spec.pipeline.transposes):
        narrow.store_column_pairs(words, output.shared)
    else:
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
    if cutlass.const_expr(output.lse is not None):  # noqa: SIM102
        if thread % fragment.QUAD == 0:
            for row, total, peak in zip(rows, totals, peaks, strict=True):
                lse = (peak + cute.math.log2(total, fastmath=True)) * LN_2
                store_lse(
                    output.lse, tile, row, cutlass.select_(is_empty(total), -Float32.inf, lse)
                )


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


def normalisers(
    output: OutputTile, tile: WorkTile, rows: tuple, totals: list, peaks: list
) -> tuple[list[Float32], list[Float32], list[Float32]]:
    """Each row's l and m in powers of 2, with its sink, and the factor of O."""
    found = []
    for row, total, peak in zip(rows, totals, peaks, strict=True):
        shrink = Float32(1.0)
        if output.sink is not None:
            total, peak, shrink = add_sink(output.sink[tile.query_head(row)], total, peak)
        divisor = cutlass.select_(is_empty(total), Float32(1.0), total)
        found.append((total, peak, shrink * cute.arch.rcp_approx(divisor)))
    totals, peaks, factors = ([one[i] for one in found] for i in range(3))
    return totals, peaks, factors


def is_empty(total: Float32) -> Boolean:
    """Has a row with this sum seen no key, or only NaN?"""
    return (total == 0.0) | (total != total)


def store_by_tma(output: OutputTile, tile: WorkTile, number: Int32) -> None:
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
def store_rows(output: OutputTile, tile: WorkTile, number: Int32, thread: Int32) -> None:
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
