"""Before the backward kernel: statistics of each query row, and accumulators of zeros."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.rowmath import LOG2_E, dot
from fa4.sm100.backward.row_blocks import QueryRows, all_rows, store_sum, this_block
from fa4.sm100.backward.workspace import VECTOR

WIDTH = 8  # elements of a 16-byte load
BATCH = 4  # rows whose loads a thread has under way at a time


@cute.jit
def preprocess(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink,
               cu_seqlens_q, seqused_q, stream, spec: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors as `fa4.sm100.backward.workspace` and `LaunchArguments` describe them.

    out, dout and, or None, residual, what rounding took from out: (batch, seqlen, heads, dim), or
    (total, heads, dim) where packed, with rows of any stride of whole 16 bytes. lse, dlse: (batch,
    heads, seqlen) or (heads, total), of any strides.
    """
    rows = all_rows(out, cu_seqlens_q, seqused_q, spec)
    grid = (rows.tiles * rows.heads, 1, 1)
    kernel(
        out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink, rows
    ).launch(grid=grid, block=(spec.block_rows, 1, 1), stream=stream)  # fmt: skip


@cute.kernel
def kernel(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink,
           rows: QueryRows):  # fmt: skip
    """One block: D = rowsum(dO (O + residual)) - dLSE, LSE to base 2, its part of dsink, and zeros.

    Rows beyond the sequence get -inf in place of -LSE, so that their P is 0.
    """
    block = this_block(rows)
    thread = cute.arch.thread_idx()[0]
    threads: cutlass.Constexpr = rows.spec.block_rows
    if cutlass.const_expr(drawn is not None):  # noqa: SIM102
        if cute.arch.block_idx()[0] == 0 and thread == 0:
            drawn[(0, 0)] = Int32(0)
    if block.exists:
        exists = thread < block.rows
        row = cutlass.min(thread, block.rows - 1)
        outs = [block.of(out)]
        if cutlass.const_expr(rows.spec.out_residual):
            outs = [*outs, block.of(residual)]
        d = row_products(outs, block.of(dout), block.rows, rows.spec.head_dim_v)
        if cutlass.const_expr(rows.spec.lse_gradient):
            d -= block.of_lse(dlse)[row]
        lse_of_row = block.of_lse(lse)[row]
        blind = lse_of_row == -Float32.inf
        base = cutlass.select_(blind, Float32(0.0), -(lse_of_row * LOG2_E))
        at = (block.head, block.tile)
        stats[(*at, 0, thread)] = cutlass.select_(exists, base, -Float32.inf)
        stats[(*at, 1, thread)] = cutlass.select_(exists, -d, Float32(0.0))
        if cutlass.const_expr(dq_accum is not None):
            zero(dq_accum[(*at, None)], rows.spec.dq_dim, threads)
        if cutlass.const_expr(rows.spec.deterministic):  # noqa: SIM102
            if thread < rows.spec.dq_counters:
                turns[(*at, thread)] = Int32(0)
        if cutlass.const_expr(rows.spec.sink):
            share = sink_share(sink[block.head], lse_of_row, blind)
            part = cutlass.select_(exists, -(share * d), Float32(0.0))
            store_sum(part, sink_parts, at, threads)


def sink_share(sink: Float32, lse: Float32, blind: Any) -> Float32:
    """The probability of the sink in a row; 1 in a row that sees no key."""
    share = cute.math.exp2((sink - lse) * LOG2_E, fastmath=True)
    return cutlass.select_(blind, Float32(1.0), share)


@cute.jit
def row_products(
    outs: list[cute.Tensor], dout: cute.Tensor, rows: Int32, dim: cutlass.Constexpr
) -> Float32:
    """rowsum(dO O) of this thread's row; rows beyond the sequence repeat its last one.

    outs: O, or O and its residual, of which O is the sum: exact in float32 but for its last bits.
    A row is read by as many lanes as it has vectors, or by the next power of two; these lanes read
    as many rows one after the other, and each keeps the sum of its own.
    """
    vectors: cutlass.Constexpr = dim // WIDTH
    lanes: cutlass.Constexpr = 1 << (vectors - 1).bit_length()
    batch: cutlass.Constexpr = min(BATCH, lanes)
    lane = cute.arch.thread_idx()[0] % lanes
    first_row = cute.arch.thread_idx()[0] - lane
    vector = cutlass.min(lane, vectors - 1)
    mine = Float32(0.0)
    for first in cutlass.range(0, lanes, batch, unroll=1):
        numbers = [cutlass.min(first_row + first + i, rows - 1) for i in range(batch)]
        loaded = [(load_sum(outs, n, vector), load(dout, n, vector)) for n in numbers]
        for i in cutlass.range_constexpr(batch):
            part = cutlass.select_(lane < vectors, dot(*loaded[i]), Float32(0.0))
            total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
            mine = cutlass.select_(first + i == lane, total, mine)
    return mine


def load_sum(tensors: list[cute.Tensor], row: Int32, vector: Int32) -> list[Float32]:
    """Eight elements of a row of the sum of one or two tensors."""
    parts = [load(tensor, row, vector) for tensor in tensors]
    return parts[0] if len(parts) == 1 else [a + b for a, b in zip(*parts, strict=True)]


def load(tensor: cute.Tensor, row: Int32, vector: Int32) -> list[Float32]:
    """Eight elements of a row, by one load."""
    source = cute.local_tile(tensor[row, None], (WIDTH,), (vector,))
    held = cute.make_rmem_tensor(cute.make_layout(WIDTH), tensor.element_type)
    cute.autovec_copy(source, held)
    values = held.load().to(Float32)
    return [values[i] for i in range(WIDTH)]


@cute.jit
def zero(tile: cute.Tensor, columns: cutlass.Constexpr, threads: cutlass.Constexpr) -> None:
    """Zeros in a tile of float32, by all threads of the CTA, as many as it has rows."""
    zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    zeros.fill(0.0)
    for first in cutlass.range(0, threads * columns // VECTOR, threads, unroll_full=True):
        number = first + cute.arch.thread_idx()[0]
        cute.autovec_copy(zeros, cute.local_tile(tile, (VECTOR,), (number,)))
