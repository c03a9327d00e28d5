"""Before the backward kernel: statistics of each query row, and accumulators of zeros."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.rowmath import LOG2_E, dot
from fa4.sm100.backward.row_blocks import QueryRows, all_rows, store_sum, this_block
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import VECTOR

WIDTH = 8  # elements of a 16-byte load
BATCH = 4  # rows whose loads a thread has under way at a time
THREADS_PER_ROW = 4  # of a block: with one, rows come in four turns (docs/hopper.md)


@cute.jit
def preprocess(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink,
               cu_seqlens_q, seqused_q, stream, spec: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors as `fa4.sm100.backward.workspace` and `LaunchArguments` describe them.

    out, dout and, or None, residual, what rounding took from out: (batch, seqlen, heads, dim), or
    (total, heads, dim) where packed, with rows of any stride of whole 16 bytes. lse, dlse: (batch,
    heads, seqlen) or (heads, total), of any strides.
    """
    rows = all_rows(out, cu_seqlens_q, seqused_q, spec)
    kernel(
        out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink, rows
    ).launch(
        grid=(rows.tiles * rows.heads, 1, 1),
        block=(Readers.of(spec).threads, 1, 1),
        stream=stream,
    )  # fmt: skip


@dataclass(frozen=True)
class Readers:
    """Who reads the rows of a block: groups of lanes side by side, each some rows in turn.

    lanes: of a group, as many as a row has vectors, or the next power of two. rows: of a group, one
    of each of its first lanes.
    """

    vectors: int
    lanes: int
    rows: int
    threads: int

    @classmethod
    def of(cls, spec: BackwardSpec) -> "Readers":
        """Of a kernel's blocks."""
        vectors = spec.head_dim_v // WIDTH
        lanes = 1 << (vectors - 1).bit_length()
        rows = max(lanes // THREADS_PER_ROW, 1)
        return cls(vectors, lanes, rows, spec.block_rows // rows * lanes)


@cute.kernel
def kernel(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn, sink,
           rows: QueryRows):  # fmt: skip
    """One block: D = rowsum(dO (O + residual)) - dLSE, LSE to base 2, its part of dsink, and zeros.

    Rows beyond the sequence get -inf in place of -LSE, so that their P is 0.
    """
    block = this_block(rows)
    thread = cute.arch.thread_idx()[0]
    readers: cutlass.Constexpr = Readers.of(rows.spec)
    if cutlass.const_expr(drawn is not None):  # noqa: SIM102
        if cute.arch.block_idx()[0] == 0 and thread == 0:
            drawn[(0, 0)] = Int32(0)
    if block.exists:
        lane = thread % readers.lanes
        number = thread // readers.lanes * readers.rows + lane
        owns = lane < readers.rows
        exists = owns & (number < block.rows)
        row = cutlass.min(number, block.rows - 1)
        outs = [block.of(out)]
        if cutlass.const_expr(rows.spec.out_residual):
            outs = [*outs, block.of(residual)]
        d = row_products(outs, block.of(dout), block.rows, readers)
        if cutlass.const_expr(rows.spec.lse_gradient):
            d -= block.of_lse(dlse)[row]
        lse_of_row = block.of_lse(lse)[row]
        blind = lse_of_row == -Float32.inf
        base = cutlass.select_(blind, Float32(0.0), -(lse_of_row * LOG2_E))
        at = (block.head, block.tile)
        if owns:
            stats[(*at, 0, number)] = cutlass.select_(exists, base, -Float32.inf)
            stats[(*at, 1, number)] = cutlass.select_(exists, -d, Float32(0.0))
        if cutlass.const_expr(dq_accum is not None):
            zero(dq_accum[(*at, None)], rows.spec.block_rows * rows.spec.dq_dim, readers.threads)
        if cutlass.const_expr(rows.spec.deterministic):  # noqa: SIM102
            if thread < rows.spec.dq_counters:
                turns[(*at, thread)] = Int32(0)
        if cutlass.const_expr(rows.spec.sink):
            share = sink_share(sink[block.head], lse_of_row, blind)
            part = cutlass.select_(exists, -(share * d), Float32(0.0))
            store_sum(part, sink_parts, at, readers.threads)


def sink_share(sink: Float32, lse: Float32, blind: Any) -> Float32:
    """The probability of the sink in a row; 1 in a row that sees no key."""
    share = cute.math.exp2((sink - lse) * LOG2_E, fastmath=True)
    return cutlass.select_(blind, Float32(1.0), share)


@cute.jit
def row_products(
    outs: list[cute.Tensor], dout: cute.Tensor, rows: Int32, readers: cutlass.Constexpr
) -> Float32:
    """rowsum(dO O) of this thread's row, if it has one; rows beyond the sequence repeat its last.

    outs: O, or O and its residual, of which O is the sum: exact in float32 but for its last bits.
    """
    vectors: cutlass.Constexpr = readers.vectors
    lanes: cutlass.Constexpr = readers.lanes
    batch: cutlass.Constexpr = min(BATCH, readers.rows)
    lane = cute.arch.thread_idx()[0] % lanes
    first_row = cute.arch.thread_idx()[0] // lanes * readers.rows
    vector = cutlass.min(lane, vectors - 1)
    mine = Float32(0.0)
    for first in cutlass.range(0, readers.rows, batch, unroll=1):
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
def zero(tile: cute.Tensor, count: cutlass.Constexpr, threads: cutlass.Constexpr) -> None:
    """`count` zeros in a tile of float32, by all threads of the CTA."""
    zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    zeros.fill(0.0)
    vectors: cutlass.Constexpr = count // VECTOR
    for first in cutlass.range(0, vectors, threads, unroll_full=True):
        number = first + cute.arch.thread_idx()[0]
        if (first + threads <= vectors) | (number < vectors):
            cute.autovec_copy(zeros, cute.local_tile(tile, (VECTOR,), (number,)))
