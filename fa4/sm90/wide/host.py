"""The host function of the backward pass of wide heads: kernels on one stream."""

import cutlass
import cutlass.cute as cute

from fa4.sm90.backward.parts import add_up_parts
from fa4.sm90.wide.keys_kernel import key_gradients
from fa4.sm90.wide.queries_kernel import query_gradients
from fa4.sm100.backward.postprocess import add_up_sink
from fa4.sm100.backward.preprocess import preprocess
from fa4.sm100.backward.row_blocks import QueryRows, all_rows


@cute.jit
def backward(q, k, v, out, dout, lse, dlse, residual, dq, dk, dv, dsink, dq_accum, stats,
             sink_parts, turns, drawn, dq_parts, dk_parts, dv_parts, softmax_scale, softcap,
             window_left, window_right, max_seqlen_q, max_seqlen_k, sink, cu_seqlens_q,
             cu_seqlens_k, seqused_q, seqused_k, aux, stream, spec: cutlass.Constexpr,
             trace: cutlass.Constexpr):  # fmt: skip
    """Launch on `fa4.compiled.launch.BackwardArguments`, tensors (batch, seqlen, heads, dim) or,
    where packed, (total, heads, dim)."""
    preprocess(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, drawn,
               sink, cu_seqlens_q, seqused_q, stream, spec)  # fmt: skip
    sum_q = dq_parts if spec.query_parts else dq
    sums = (dk_parts, dv_parts) if spec.key_parts else (dk, dv)
    gradients(q, k, v, dout, sum_q, *sums, stats, softmax_scale, softcap,
              (window_left, window_right), (max_seqlen_q, max_seqlen_k),
              (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, stream, spec,
              trace)  # fmt: skip
    if cutlass.const_expr(spec.key_parts):
        add_up_parts(sums, (dk, dv), stream, spec.packed_k, spec.dtype)
    if cutlass.const_expr(spec.query_parts):
        add_up_parts((dq_parts,), (dq,), stream, spec.packed_q, spec.dtype)
    if cutlass.const_expr(spec.sink):
        rows = all_rows(dq, cu_seqlens_q, seqused_q, spec)
        sink_kernel(dsink, sink_parts, rows).launch(
            grid=(rows.heads, 1, 1), block=(spec.block_rows, 1, 1), stream=stream
        )


@cute.jit
def gradients(q, k, v, dout, dq, dk, dv, stats, softmax_scale, softcap, window, longest, lengths,
              aux, stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch both main kernels."""
    key_gradients(q, k, v, dout, dk, dv, stats, softmax_scale, softcap, window, longest, lengths,
                  aux, stream, spec, trace)  # fmt: skip
    query_gradients(q, k, v, dout, dq, stats, softmax_scale, softcap, window, longest, lengths,
                    aux, stream, spec, trace)  # fmt: skip


@cute.kernel
def sink_kernel(dsink, sink_parts, rows: QueryRows):
    """The gradient of a head's sink."""
    add_up_sink(rows, cute.arch.block_idx()[0], sink_parts, dsink, rows.spec.block_rows)
