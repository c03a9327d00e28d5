"""The host function of the backward pass: three kernels on one stream."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from fa4.sm100.backward.kernel import kernel
from fa4.sm100.forward.mods import scales
from fa4.sm100.kit.units import TILE_ROWS, WARP, padded_dim
from fa4.sm100.kit.views import ending_view, rows_first, swizzled_layout


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
    d, dim_v = padded_dim(spec.head_dim), padded_dim(spec.head_dim_v)

    def atom(tensor, dim, packed, ragged, op):
        view = ending_view(rows_first(tensor, packed), 0, ragged)
        return cpasync.make_tiled_tma_atom(
            op, view, swizzled_layout(TILE_ROWS, dim), (TILE_ROWS, dim)
        )

    loading = cpasync.CopyBulkTensorTileG2SOp()
    loads = (
        atom(q, d, spec.packed_q, spec.ragged_q, loading),
        atom(k, d, spec.packed_k, spec.ragged_k, loading),
        atom(v, dim_v, spec.packed_k, spec.ragged_k, loading),
        atom(dout, dim_v, spec.packed_q, spec.ragged_q, loading),
    )
    if cutlass.const_expr(spec.ragged_k):
        stores = (None, dv), (None, dk)
    else:
        storing = cpasync.CopyBulkTensorTileS2GOp()
        stores = atom(dv, dim_v, False, False, storing), atom(dk, d, False, False, storing)
    sizes = (seqlen_q, seqlen_k, heads_k, group, blocks, q_blocks)
    kernel(
        loads, stores, stats, dq_accum, turns, scales(spec, softmax_scale, softcap), softmax_scale,
        aux, sizes, window, lengths, spec, trace,
    ).launch(
        grid=(blocks * heads_k * batch, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        stream=stream,
    )  # fmt: skip
