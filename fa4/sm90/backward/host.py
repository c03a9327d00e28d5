"""The host function of the backward pass on Hopper: three kernels on one stream."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fa4.kit.scores import scales
from fa4.kit.units import TILE_ROWS, WARP
from fa4.kit.views import box_atoms, ending_views, rows_first, swizzled_layout
from fa4.sm90.backward.kernel import kernel, tile_shapes
from fa4.sm90.backward.postprocess import postprocess
from fa4.sm100.backward.preprocess import preprocess


@cute.jit
def backward(q, k, v, out, dout, lse, dlse, residual, dq, dk, dv, dsink, dq_accum, stats,
             sink_parts, turns, softmax_scale, softcap, window_left, window_right, max_seqlen_q,
             max_seqlen_k, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, stream,
             spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch on `fa4.compiled.launch.BackwardArguments`, tensors (batch, seqlen, heads, dim) or,
    where packed, (total, heads, dim)."""
    preprocess(out, dout, lse, dlse, residual, dq_accum, stats, sink_parts, turns, sink,
               cu_seqlens_q, seqused_q, stream, spec)  # fmt: skip
    gradients(q, k, v, dout, dk, dv, dq_accum, stats, turns, softmax_scale, softcap,
              (window_left, window_right), (max_seqlen_q, max_seqlen_k),
              (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, stream, spec,
              trace)  # fmt: skip
    postprocess(dq_accum, dq, dsink, sink_parts, softmax_scale, cu_seqlens_q, seqused_q, stream,
                spec)  # fmt: skip


@cute.jit
def gradients(q, k, v, dout, dk, dv, dq_accum, stats, turns, softmax_scale, softcap, window,
              longest, lengths, aux, stream, spec: cutlass.Constexpr,
              trace: cutlass.Constexpr):  # fmt: skip
    """Launch the main kernel: dK, dV, and dQ as sums in float32."""
    batch, seqlen_q, seqlen_k = k.shape[0], q.shape[-3], k.shape[-3]
    if cutlass.const_expr(spec.packed_q):
        batch, seqlen_q = lengths[0].shape[0] - 1, longest[0]
    if cutlass.const_expr(spec.packed_k):
        batch, seqlen_k = lengths[1].shape[0] - 1, longest[1]
    heads_k = k.shape[-2]
    group = q.shape[-2] // heads_k
    blocks, q_blocks = ((n + TILE_ROWS - 1) // TILE_ROWS for n in (seqlen_k, seqlen_q))
    shapes: cutlass.Constexpr = tile_shapes(spec)

    def atom(op, tensor, name):
        shape = shapes[name][:2]
        return cpasync.make_tiled_tma_atom(op, tensor, swizzled_layout(*shape), shape)

    def load_atoms(tensor, name, packed, ragged):
        loading = cpasync.CopyBulkTensorTileG2SOp()
        views = ending_views(rows_first(tensor, packed), 0, ragged)
        return box_atoms(lambda view: atom(loading, view, name), views)

    loads = (
        load_atoms(q, "q", spec.packed_q, spec.ragged_q),
        load_atoms(k, "k", spec.packed_k, spec.ragged_k),
        load_atoms(v, "v", spec.packed_k, spec.ragged_k),
        load_atoms(dout, "do", spec.packed_q, spec.ragged_q),
    )
    if cutlass.const_expr(spec.ragged_k):
        stores = (None, dv), (None, dk)
    else:
        storing = cpasync.CopyBulkTensorTileS2GOp()
        stores = tuple(
            atom(storing, rows_first(tensor, spec.packed_k), name)
            for tensor, name in ((dv, "v"), (dk, "k"))
        )
    sizes = (seqlen_q, seqlen_k, heads_k, group, blocks, q_blocks)
    kernel(
        loads, stores, stats, dq_accum, turns, scales(spec, softmax_scale, softcap), softmax_scale,
        aux, sizes, window, lengths, spec, trace,
    ).launch(
        grid=(blocks * heads_k * batch, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip
