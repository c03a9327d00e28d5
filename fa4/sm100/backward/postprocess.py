"""After the backward kernel: dQ in 16 bits, scaled, and the gradient of the sink."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.rowmath import store_rounded
from fa4.kit.units import WARP, padded_dim
from fa4.sm100.backward.row_blocks import (
    QueryRows,
    RowBlock,
    all_rows,
    block_at,
    store_sum,
    this_block,
)
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import VECTOR, dq_offset

WIDTH = 2 * VECTOR  # elements of a 16-byte store
QUAD = 4  # rows that are read side by side: 64 bytes of dq_accum, and 128 of each row of dQ
BATCH = 4  # stores whose loads a thread has under way at a time


@cute.jit
def postprocess(dq_accum, dq, dsink, sink_parts, softmax_scale, cu_seqlens_q,
                seqused_q, stream, spec: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors as `fa4.sm100.backward.workspace` and `LaunchArguments` describe them.

    dq: as q. dsink: float32 (heads,), None without a sink.
    """
    rows = all_rows(dq, cu_seqlens_q, seqused_q, spec)
    kernel(dq_accum, dq, dsink, sink_parts, softmax_scale, rows).launch(
        grid=(rows.tiles * rows.heads, 1, 1), block=(spec.block_rows, 1, 1), stream=stream
    )


@cute.kernel
def kernel(dq_accum, dq, dsink, sink_parts, softmax_scale, rows: QueryRows):
    """One block of dQ; the CTA of a head's first block also adds up its dsink."""
    block = this_block(rows)
    if block.exists:
        store_rows(dq_accum[block.head, block.tile, None], block, dq, softmax_scale)
    if cutlass.const_expr(rows.spec.sink):  # noqa: SIM102
        if block.tile == 0:
            add_up_sink(rows, block.head, sink_parts, dsink, rows.spec.block_rows)


@cute.jit
def store_rows(tile: cute.Tensor, block: RowBlock, dq: cute.Tensor, scale: Float32) -> None:
    """A tile's rows that exist; 32 for each warp."""
    vectors: cutlass.Constexpr = block.spec.head_dim // WIDTH
    whole: cutlass.Constexpr = vectors // BATCH * BATCH
    target = block.of(dq)
    for first in cutlass.range(0, whole, BATCH, unroll_full=True):
        store_batch(tile, block, target, scale, first, BATCH)
    if cutlass.const_expr(whole < vectors):
        store_batch(tile, block, target, scale, whole, vectors - whole)


@cute.jit
def store_batch(
    tile: cute.Tensor, block: RowBlock, target: cute.Tensor, scale: Float32, first: Int32,
    count: cutlass.Constexpr,
) -> None:  # fmt: skip
    """`count` vectors of each lane from its `first` on: all are loaded before one is stored."""
    spec: cutlass.Constexpr = block.spec
    vectors: cutlass.Constexpr = spec.head_dim // WIDTH
    first_row = cute.arch.thread_idx()[0] // WARP * WARP
    places = [place(first + i, vectors) for i in range(count)]
    loaded = [load(tile, first_row + row, vector, spec) for row, vector in places]
    for i in cutlass.range_constexpr(count):
        row, vector = places[i]
        if first_row + row < block.rows:
            vector_of_row = cute.local_tile(target[first_row + row, None], (WIDTH,), (vector,))
            store_rounded([x * scale for x in loaded[i]], vector_of_row, spec.dtype)


def place(number: Int32, vectors: int) -> tuple[Int32, Int32]:
    """(row of 32, vector of the row) that is this lane's vector `number`.

    Lanes go over the rows of a quad, then over the vectors of a row, then over quads.
    """
    index = cute.arch.lane_idx() + number * WARP
    quad, rest = index // (QUAD * vectors), index % (QUAD * vectors)
    return quad * QUAD + rest % QUAD, rest // QUAD


def load(tile: cute.Tensor, row: Int32, vector: Int32, spec: BackwardSpec) -> list[Float32]:
    """Eight float32 of a row of a dQ tile, by two loads."""
    values: list[Float32] = []
    for column in (vector * WIDTH, vector * WIDTH + VECTOR):
        offset = dq_offset(row, column, padded_dim(spec.head_dim))
        held = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        cute.autovec_copy(cute.local_tile(tile, (VECTOR,), (offset // VECTOR,)), held)
        values += [held[i] for i in range(VECTOR)]
    return values


@cute.jit
def add_up_sink(
    rows: QueryRows, head: Int32, parts: cute.Tensor, dsink: cute.Tensor, threads: cutlass.Constexpr
) -> None:
    """dsink of a head: its parts of all tiles that sequences have. threads: of the CTA."""
    total = Float32(0.0)
    for tile in cutlass.range(cute.arch.thread_idx()[0], rows.tiles, threads, unroll=1):
        if block_at(rows, head, tile).exists:
            total += parts[head, tile]
    store_sum(total, dsink, head, threads)
