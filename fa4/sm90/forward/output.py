"""A finished O tile: divided by its row sums, to shared memory, and from there to global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARP, WARPGROUP
from fa4.plan.warpgroup import output_over_queries
from fa4.sm90.forward import fragment, held, narrow
from fa4.sm90.forward.direct import store_direct
from fa4.sm90.forward.held import meet_warpgroup
from fa4.sm90.forward.places import in_rows, store_all
from fa4.sm90.forward.sectors import shift_of
from fa4.sm90.forward.spec import query_box
from fa4.sm100.forward.correction import LN_2, add_sink, store_lse

VECTOR = 8  # elements of a 16-byte store


@dataclass(frozen=True)
class OutputTile:
    """O in shared memory, (rows, cols) of this warpgroup, and in global memory.

    With split keys there is none in shared memory, and tensor and lse are of all parts.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    packed tensor, atom None and the plain tensor. lse, sink: global tensors or None. halves: as of
    `sectors.shift_of`.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: Any
    scale_log2: Float32
    lse: cute.Tensor | None
    sink: Any
    halves: Any


@cute.jit
def finish(
    signals: Signals, work: Any, tile: WorkTile, output: OutputTile, rows: tuple, state: Any
) -> None:
    """O / l of this warpgroup's rows, and LSE."""
    spec: cutlass.Constexpr = tile.spec
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
    if cutlass.const_expr(spec.split):
        for i in cutlass.range_constexpr(fragment.ROWS_OF_THREAD):
            store_part(output, tile, rows[i], fragment.of_row(values, i), thread % fragment.QUAD)
    elif cutlass.const_expr(spec.stores_directly and spec.pipeline.transposes):
        store_all(in_rows(tile, output.tensor, rows), values)
    elif cutlass.const_expr(spec.stores_directly):
        shift = shift_of(output.halves, tile)
        store_direct(tile, output.tensor, rows, rounded(values, spec.out_dtype), shift)
    else:
        if cutlass.const_expr(spec.pipeline.transposes):
            values = narrow.in_column_pairs(values)
        store_tile(signals, work, tile, output, rounded(values, spec.out_dtype))
    if cutlass.const_expr(output.lse is not None):  # noqa: SIM102
        if thread % fragment.QUAD == 0:
            target = output.lse
            if cutlass.const_expr(spec.split):
                target = part_of(output.lse, tile)
            for row, total, peak in zip(rows, totals, peaks, strict=True):
                lse = (peak + cute.math.log2(total, fastmath=True)) * LN_2
                store_lse(target, tile, row, cutlass.select_(is_empty(total), -Float32.inf, lse))


def part_of(tensor: cute.Tensor, tile: WorkTile) -> cute.Tensor:
    """A work tile's part of O or LSE."""
    return tensor[(tile.split, *[None] * (cute.rank(tensor) - 1))]


@cute.jit
def store_part(
    output: OutputTile, tile: WorkTile, row: Int32, values: list, quad_thread: Int32
) -> None:
    """A thread's elements of a row in float32, two columns by two."""
    spec: cutlass.Constexpr = tile.spec
    if tile.has_row(row):
        place: tuple[Any, ...] = (tile.start_q + tile.position(row), tile.query_head(row), None)
        if cutlass.const_expr(not spec.packed_q):
            place = (tile.batch, *place)
        target = part_of(output.tensor, tile)[place]
        for run in cutlass.range_constexpr(spec.head_dim_v // fragment.RUN):
            pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            pair[0], pair[1] = values[2 * run], values[2 * run + 1]
            column = run * fragment.QUAD + quad_thread
            cute.autovec_copy(pair, cute.local_tile(target, (2,), (column,)))


@cute.jit
def store_tile(
    signals: Signals, work: Any, tile: WorkTile, output: OutputTile, words: list
) -> None:
    """O through shared memory, by TMA or, where sequences end inside a tile, row by row."""
    spec: cutlass.Constexpr = tile.spec
    over: cutlass.Constexpr = output_over_queries(spec.pipeline, spec.gpu)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
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


def share(words: list[Int32], shared: cute.Tensor) -> None:
    """A warpgroup's words of two elements to its (rows, cols) of shared memory."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    width = 2 * cute.size(shared.shape[1][0])  # of a run
    fragment.store_matrices(words, shared.iterator.toint().to(Int32), thread, width)


@cute.jit
def close(signals: Signals, spec: cutlass.Constexpr) -> None:
    """The last store has read shared memory, before the CTA gives it back."""
    over: cutlass.Constexpr = output_over_queries(spec.pipeline, spec.gpu)
    if cutlass.const_expr(not over and spec.pipeline.stages_output):  # noqa: SIM102
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
    target = cute.local_tile(tensor, query_box(tile.spec, shape), (tile.tile_number(number), 0))
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
        if tile.has_row(packed):
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
