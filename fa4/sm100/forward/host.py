"""The host's half of a forward kernel: views and copies of its tensors, and its launch."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import CTA_GROUPS
from fa4.kit.scores import scales
from fa4.kit.tiles import block_rows, heads_per_section
from fa4.kit.units import WARP
from fa4.kit.views import box_atoms, columns_first, ending_views, rows_first
from fa4.sm100.forward.operands import (
    output_tile,
    product_tiles,
    query_view,
    shared_layouts,
    tiled_mmas,
)


class CallArguments(NamedTuple):
    """What a call gives: `fa4.compiled.launch.LaunchArguments`, traced.

    Tensors are (batch, seqlen, heads, dim), or (total, heads, dim) where packed; None where the
    spec has no use for them.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32 | None
    window_left: Int32 | None
    window_right: Int32 | None
    max_seqlen_q: Int32
    sink: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    aux: tuple | None
    num_sms: Int32


def launch(kernel: Any, call: CallArguments, stream: Any, spec: Any, trace: list) -> None:
    """Start a kernel whose operands are those of `fa4.sm100.forward.operands`."""
    q, k, v, o = call[:4]
    batch, seqlen_q = q.shape[0], q.shape[-3]
    if call.cu_seqlens_q is not None:
        batch, seqlen_q = call.cu_seqlens_q.shape[0] - 1, call.max_seqlen_q
    heads = q.shape[-2] // spec.group
    rows = block_rows(spec)
    blocks = (seqlen_q * spec.group + rows - 1) // rows
    num_tiles = blocks * heads * batch
    width = (spec.head_dim + spec.head_dim_v) * q.element_type.width // 8
    section = heads_per_section(k.shape[-3] * width, heads * batch)
    sizes = (seqlen_q, k.shape[-3], heads, heads // k.shape[-2], blocks, num_tiles, section)
    mmas = tiled_mmas(spec)
    layouts = shared_layouts(spec, mmas)
    qk_tile, pv_tile = product_tiles(spec)
    op = cpasync.CopyBulkTensorTileG2SOp(CTA_GROUPS[spec.cta_group])
    atom = cute.nvgpu.make_tiled_tma_atom_A(op, query_view(q, spec), layouts[0], qk_tile, mmas[0])
    make = cute.nvgpu.make_tiled_tma_atom_B
    loads = (
        ((atom[0], None), atom[1]),
        box_atoms(
            lambda view: make(op, view, layouts[1], qk_tile, mmas[0]),
            ending_views(rows_first(k, spec.packed_k), 0, spec.ragged_k),
        ),
        box_atoms(
            lambda view: make(op, view, layouts[2], pv_tile, mmas[1]),
            ending_views(columns_first(v, spec.packed_k), 1, spec.ragged_k),
        ),
    )
    if spec.ragged_q:
        store = (None, o)
    else:
        store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            query_view(o, spec),
            cute.select(layouts[3], [0, 1]),
            output_tile(spec),
        )
    clusters = num_tiles
    if spec.scheduler == "static":
        clusters = cutlass.min(call.num_sms // spec.cta_group, num_tiles)
    factors = scales(spec, call.softmax_scale, call.softcap)
    window = call.window_left, call.window_right
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
    kernel(
        mmas, loads, store, layouts, call.lse, factors, call.aux, sizes, window, call.sink, lengths,
        spec, trace,
    ).launch(
        grid=(clusters * spec.cta_group, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        cluster=(2, 1, 1) if spec.cta_group == 2 else None,
        stream=stream,
    )  # fmt: skip
