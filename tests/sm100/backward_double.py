"""Three small kernels that stand for the backward kernels, to test how they are called.

`backward` has the real host function's parameters. Each output is filled with what tells from where
it came: dQ with -LSE log2(e), dK and dV with the largest lengths, dsink with the sink.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
SMEM_BYTES = (256, 1024, 512)  # of each kernel, so that they can be told apart


@cute.kernel
def prepare(lse, dlse, stats, packed: cutlass.Constexpr):
    """Thread r of CTA (tile, head, batch): the statistics of a row, as the real kernel keeps."""
    cutlass.memory.SmemAllocator().allocate(SMEM_BYTES[0], 16)
    tile, head, batch = cute.arch.block_idx()
    row = tile * 128 + cute.arch.thread_idx()[0]
    if row < lse.shape[-1]:
        value = lse[head, row] if cutlass.const_expr(packed) else lse[batch, head, row]
        stats[head, batch * cute.arch.grid_dim()[0] + tile, 0, row % 128] = -value * LOG2_E


@cute.kernel
def fill_keys(dk, dv, longest_q, longest_k):
    """Thread r of CTA (tile, head, batch): a row of dK and dV."""
    cutlass.memory.SmemAllocator().allocate(SMEM_BYTES[1], 16)
    tile, head, batch = cute.arch.block_idx()
    row = tile * 128 + cute.arch.thread_idx()[0]
    if row < dk.shape[-3]:
        for column in range(dk.shape[-1]):
            dk[batch, row, head, column] = Float32(longest_q).to(dk.element_type)
        for column in range(dv.shape[-1]):
            dv[batch, row, head, column] = Float32(longest_k).to(dv.element_type)


@cute.kernel
def fill_queries(dq, stats, sink, dsink):
    """Thread r of CTA (tile, head, batch): a row of dQ from its statistics; and dsink."""
    cutlass.memory.SmemAllocator().allocate(SMEM_BYTES[2], 16)
    tile, head, batch = cute.arch.block_idx()
    row = tile * 128 + cute.arch.thread_idx()[0]
    if row < dq.shape[-3]:
        value = stats[head, batch * cute.arch.grid_dim()[0] + tile, 0, row % 128]
        for column in range(dq.shape[-1]):
            dq[batch, row, head, column] = value.to(dq.element_type)
    if cutlass.const_expr(sink is not None):  # noqa: SIM102 - one is for the compiler
        if row == 0 and batch == 0:
            dsink[head] = sink[head]


@cute.jit
def backward(q, k, v, out, dout, lse, dlse, residual, dq, dk, dv, dsink, dq_accum, stats,
             sink_parts, turns, drawn, dq_parts, dk_parts, dv_parts, softmax_scale, softcap,
             window_left, window_right, max_seqlen_q, max_seqlen_k, sink, cu_seqlens_q,
             cu_seqlens_k, seqused_q, seqused_k, aux, stream, spec: cutlass.Constexpr,
             trace: cutlass.Constexpr):  # fmt: skip
    """Of dense calls: the three kernels one after the other."""
    batch = q.shape[0]
    rows = (cute.ceil_div(q.shape[1], 128), q.shape[2], batch)
    keys = (cute.ceil_div(k.shape[1], 128), k.shape[2], batch)
    block = (128, 1, 1)
    prepare(lse, dlse, stats, spec.packed_q).launch(grid=rows, block=block, stream=stream)
    fill_keys(dk, dv, max_seqlen_q, max_seqlen_k).launch(grid=keys, block=block, stream=stream)
    fill_queries(dq, stats, sink, dsink).launch(grid=rows, block=block, stream=stream)
