"""After the backward kernel: dQ in 16 bits, scaled, and the gradient of the sink."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rowmath import store_rounded
from fa4.kit.units import WARP
from fa4.plan.warpgroup_backward import dq_columns
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward.fragment import QUAD, ROW_STEP, RUN
from fa4.sm100.backward.postprocess import add_up_sink
from fa4.sm100.backward.row_blocks import QueryRows, RowBlock, all_rows, this_block
from fa4.sm100.backward.workspace import VECTOR

WARP_ROWS = 2 * ROW_STEP  # of a warp's part
MOST_UNITS = 4  # that a thread loads at a time
# Threads of a block to a row: with one, units come in two turns (docs/hopper.md).
THREADS_PER_ROW = 2


@cute.jit
def postprocess(dq_accum, dq, dsink, sink_parts, softmax_scale, cu_seqlens_q,
                seqused_q, stream, spec: cutlass.Constexpr):  # fmt: skip
    """Launch as `fa4.sm100.backward.postprocess`, of dq_accum as `fa4.sm90.backward.reduce` has it.

    dq: as q. dsink: float32 (heads,), None without a sink.
    """
    rows = all_rows(dq, cu_seqlens_q, seqused_q, spec)
    kernel(dq_accum, dq, dsink, sink_parts, softmax_scale, rows).launch(
        grid=(rows.tiles * rows.heads, 1, 1), block=(threads_of(spec), 1, 1), stream=stream
    )


@cute.kernel
def kernel(dq_accum, dq, dsink, sink_parts, softmax_scale, rows: QueryRows):
    """One block of dQ; the CTA of a head's first block also adds up its dsink."""
    block = this_block(rows)
    if block.exists:
        store_units(dq_accum[block.head, block.tile, None], block, dq, softmax_scale)
    if cutlass.const_expr(rows.spec.sink):  # noqa: SIM102
        if block.tile == 0:
            add_up_sink(rows, block.head, sink_parts, dsink, threads_of(rows.spec))


def threads_of(spec: WarpgroupBackwardSpec) -> int:
    """Of a CTA."""
    return THREADS_PER_ROW * spec.block_rows


def unit_offset(spec: WarpgroupBackwardSpec, row: Int32 | int, run: Int32 | int) -> Int32 | int:
    """Where the unit of rows `row` and `row` + 8 and of columns from 8 `run` on starts in a tile.

    row: one of the first 8 of 16.
    """
    pipeline = spec.pipeline
    part_cols = dq_columns(pipeline)
    block, part = row // WARPGROUP_ROWS, run // (part_cols // RUN)
    warp = row % WARPGROUP_ROWS // WARP_ROWS
    parts = block * (WARPGROUP_ROWS * pipeline.dq_dim) + part * (WARPGROUP_ROWS * part_cols)
    vectors = run % (part_cols // RUN) * WARP + row % ROW_STEP * QUAD
    return parts + warp * (WARP_ROWS * part_cols) + vectors * VECTOR


@cute.jit
def store_units(tile: cute.Tensor, block: RowBlock, dq: cute.Tensor, scale: Float32) -> None:
    """A tile's rows that exist, two at a time: the vectors of a row lie side by side."""
    spec: cutlass.Constexpr = block.spec
    threads: cutlass.Constexpr = threads_of(spec)
    count: cutlass.Constexpr = spec.block_rows // 2 * (spec.head_dim // RUN)
    trips: cutlass.Constexpr = -(-count // (threads * MOST_UNITS))
    batch: cutlass.Constexpr = -(-count // (threads * trips))
    target, thread = block.of(dq), cute.arch.thread_idx()[0]
    for first in cutlass.range(thread, thread + trips * batch * threads, batch * threads, unroll=1):
        numbers = [first + i * threads for i in range(batch)]
        loaded = [load_unit(tile, spec, cutlass.min(number, count - 1)) for number in numbers]
        for i in cutlass.range_constexpr(batch):
            row, run = place_of_unit(spec, numbers[i])
            for half in cutlass.range_constexpr(2):
                if (numbers[i] < count) & (row + half * ROW_STEP < block.rows):
                    pairs = [vector[2 * half : 2 * half + 2] for vector in loaded[i]]
                    values = [x * scale for pair in pairs for x in pair]
                    place = cute.local_tile(target[row + half * ROW_STEP, None], (RUN,), (run,))
                    store_rounded(values, place, spec.dtype)


def place_of_unit(spec: WarpgroupBackwardSpec, number: Int32) -> tuple[Int32, Int32]:
    """(first row, run of columns) of a unit of a tile, counted along the rows."""
    runs: cutlass.Constexpr = spec.head_dim // RUN
    pair = number // runs
    return pair // ROW_STEP * WARP_ROWS + pair % ROW_STEP, number % runs


def load_unit(tile: cute.Tensor, spec: WarpgroupBackwardSpec, number: Int32) -> list[list[Float32]]:
    """The vectors of a unit."""
    start = unit_offset(spec, *place_of_unit(spec, number))
    return [load_vector(tile, start // VECTOR + i) for i in range(QUAD)]


def load_vector(tile: cute.Tensor, number: Int32) -> list[Float32]:
    """Four float32, by one load."""
    held = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    cute.autovec_copy(cute.local_tile(tile, (VECTOR,), (number,)), held)
    return [held[i] for i in range(VECTOR)]
