"""The host function of the backward pass on Hopper: kernels on one stream."""

import cutlass
import cutlass.cute as cute

from fa4.kit.scores import scales
from fa4.kit.units import TILE_ROWS, WARP
from fa4.sm90.backward.kernel import kernel, tile_shapes
from fa4.sm90.backward.operands import load_atoms, store_atoms
from fa4.sm90.backward.parts import add_up_parts
from fa4.sm90.backward.postprocess import postprocess
from fa4.sm100.backward.preprocess import preprocess
from fa4.sm100.backward.tiles import call_sizes


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
    sums = (dk_parts, dv_parts) if spec.key_parts else (dk, dv)
    gradients(q, k, v, dout, *sums, dq_accum, stats, turns, drawn, softmax_scale, softcap,
              (window_left, window_right), (max_seqlen_q, max_seqlen_k),
              (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, stream, spec,
              trace)  # fmt: skip
    if cutlass.const_expr(spec.key_parts):
        add_up_parts(sums, (dk, dv), stream, spec.packed_k, spec.dtype)
    postprocess(dq_accum, dq, dsink, sink_parts, softmax_scale, cu_seqlens_q, seqused_q, stream,
                spec)  # fmt: skip


@cute.jit
def gradients(q, k, v, dout, dk, dv, dq_accum, stats, turns, drawn, softmax_scale, softcap,
              window, longest, lengths, aux, stream, spec: cutlass.Constexpr,
              trace: cutlass.Constexpr):  # fmt: skip
    """Launch the main kernel: dK, dV, and dQ as sums in float32."""
    shapes: cutlass.Constexpr = tile_shapes(spec)
    sizes, count = call_sizes(q, dk, longest, lengths, TILE_ROWS, spec.block_rows)
    loads = load_atoms(spec, shapes, (q, k, v, dout))
    stores = store_atoms(spec, shapes, dv, dk)
    kernel(
        loads, stores, (dv, dk), stats, dq_accum, turns, drawn,
        scales(spec, softmax_scale, softcap), softmax_scale, aux, (sizes, count), window, lengths,
        spec, trace,
    ).launch(
        grid=(cutlass.min(count, spec.gpu.sm_count), 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip
