"""The host function of the backward pass: three kernels on one stream."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import CTA_GROUPS
from fa4.kit.scores import scales
from fa4.kit.units import TILE_ROWS, WARP
from fa4.kit.views import box_atoms, ending_views, rows_first, swizzled_layout
from fa4.sm100.backward.kernel import kernel, tile_shapes
from fa4.sm100.backward.postprocess import postprocess
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
    sizes, work_tiles = call_sizes(q, k, longest, lengths, TILE_ROWS * spec.cta_group)
    shapes: cutlass.Constexpr = tile_shapes(spec)

    def atom(tensor, shape, of_keys, op):
        packed = spec.packed_k if of_keys else spec.packed_q
        ragged = spec.ragged_k if of_keys else spec.ragged_q
        view, from_start = ending_views(rows_first(tensor, packed), 0, ragged)
        if cutlass.const_expr(spec.cta_group == 1):  # each of its tiles holds some rows
            from_start = None
        return box_atoms(lambda x: make(op, x, swizzled_layout(*shape), shape), (view, from_start))

    make = cpasync.make_tiled_tma_atom
    loading = cpasync.CopyBulkTensorTileG2SOp(CTA_GROUPS[spec.cta_group])
    loads: tuple = (
        atom(q, shapes["q"], False, loading),
        atom(k, shapes["k"], True, loading),
        atom(v, shapes["v"], True, loading),
        atom(dout, shapes["do"], False, loading),
    )
    if cutlass.const_expr(spec.cta_group == 2):
        loads = (
            *loads,
            atom(q, shapes["q_t"], False, loading),
            atom(dout, shapes["do_t"], False, loading),
            atom(k, shapes["k_t"], True, loading),
        )
    if cutlass.const_expr(spec.ragged_k):
        stores = (None, dv), (None, dk)
    else:
        storing = cpasync.CopyBulkTensorTileS2GOp()
        stores = tuple(
            make(storing, rows_first(tensor, spec.packed_k), swizzled_layout(*shape), shape)
            for tensor, shape in ((dv, shapes["v"]), (dk, shapes["k"]))
        )
    kernel(
        loads, stores, stats, dq_accum, turns, scales(spec, softmax_scale, softcap), softmax_scale,
        aux, sizes, window, lengths, spec, trace,
    ).launch(
        grid=(work_tiles * spec.cta_group, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        cluster=(2, 1, 1) if spec.cta_group == 2 else None,
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip
