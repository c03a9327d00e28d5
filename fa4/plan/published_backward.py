"""The published backward kernel (flash_attn.cute) as a plan: one CTA, or pairs that exchange dS.

This package runs kernels of its own (`backward`); published throughput is of this one, and the
simulator's constants were fitted to that.

A CTA owns one KV tile and walks the query tiles m. Five products per m, on transposed scores:
S = K Q^T, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K. Tensor memory is full, so regions are
shared: P lies over S, dS over dP, and dQ over dP (one CTA) or over S (pairs), which fixes the issue
order:

    one CTA   S dP dV | S' dK dQ dP' dV' ... | dK dQ
    pair      S dP dV | S' dK dP' dQ dV' ... | dK dQ

In a pair, dQ needs the dS of both KV tiles for half of the query rows: each CTA pushes half of its
dS into its peer's shared memory. The reduce warps add dQ into global memory in float32.
"""

from __future__ import annotations

from fa4.config import BackwardPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.published_backward_roles import (
    compute_role,
    dq_slices,
    first_key_bytes,
    load_role,
    mma_role,
    reduce_role,
)
from fa4.plan.schema import Buffer, PipelinePlan, Signal, ring
from fa4.plan.work import WARPGROUP

TILE = 128  # rows and keys of a tile: the lanes of tensor memory


def published_plan(pipeline: BackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError with the sum where a memory is over-full."""
    buffers, group = _lay_out(pipeline, gpu), pipeline.numerics.cta_group
    return PipelinePlan(
        name=f"backward d{pipeline.head_dim} cta_group {group} of flash_attn.cute",
        roles=(
            reduce_role(pipeline),
            compute_role(pipeline),
            mma_role(pipeline),
            load_role(pipeline),
        ),
        signals=tuple(_signals(pipeline)),
        buffers=tuple(buffers),
        cta_group=group,
        trips=("q_tiles", "masked_tiles", "plain_tiles"),
    )


def _lay_out(pipeline: BackwardPipeline, gpu: Gpu) -> list[Buffer]:
    """Memory map; raises ValueError with the sum when something does not fit."""
    pair = pipeline.numerics.cta_group == 2
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    layout, tile = Layout(), TILE * size
    half = 2 if pair else 1
    layout.add("q", "smem", tile * d // half, stages=1 if pair else 2, align=1024)
    layout.add("k", "smem", tile * d, align=1024)
    layout.add("v", "smem", tile * dv, align=1024)
    layout.add("do", "smem", tile * dv // half, align=1024)
    if pair:
        layout.add("q_t", "smem", tile * d // 2, align=1024)
        layout.add("do_t", "smem", tile * dv // 2, align=1024)
        layout.add("k_t", "smem", 2 * tile * d // 2, align=1024)
        layout.add("ds_exchange", "smem", TILE * TILE * size // 2, align=1024)
    layout.add("ds", "smem", TILE * TILE * size, align=1024)
    slice_cols, slices = dq_slices(pipeline)
    layout.add("dq_staging", "smem", WARPGROUP * slice_cols * 4, stages=slices, align=1024)
    layout.add("row_stats", "smem", 2 * TILE * 4, stages=1 if pair else 2, align=16)
    layout.add("barriers", "smem", 8 * 40, align=8)
    _lay_out_tmem(layout, pipeline, pair)
    require_fit(layout.buffers, "tmem", gpu.tmem_cols, gpu.name)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    if d > TILE:
        raise ValueError(
            f"head_dim must be at most {TILE}: dQ lies over a tile of S or dP; got {d}"
        )
    return layout.buffers


def _lay_out_tmem(layout: Layout, pipeline: BackwardPipeline, pair: bool) -> None:
    """S and P, dV, dP with dS and dQ, dK; dQ moves into the free half of S in pairs."""
    d, dv, half = pipeline.head_dim, pipeline.head_dim_v, TILE // 2
    s = layout.add("s", "tmem", TILE)
    layout.add("dv", "tmem", dv)
    dp = layout.add("dp", "tmem", TILE)
    layout.add("dk", "tmem", d)
    layout.alias("p", "tmem", s.start, half, {"s": "compute has read S before it writes P"})
    layout.alias("ds_t", "tmem", dp.start, half, {"dp": "compute has read dP"})
    if pair:
        width = d * half // TILE
        safe = {"s": "dQ waits until S is read, the S after that until dQ is drained"}
        layout.alias("dq", "tmem", s.start + half, width, safe)
    else:
        safe = {"dp": "the next dP waits until dQ is drained", "ds_t": "dK has read dS"}
        layout.alias("dq", "tmem", dp.start, d, safe)


def _signals(pipeline: BackwardPipeline) -> list[Signal]:
    """Every signal with its arrive counts."""
    pair = pipeline.numerics.cta_group
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    stages = 1 if pair == 2 else 2
    signals = [
        # A tile's first Q brings K along and its first dO brings V.
        *ring("q", "load", "mma", stages, tx_bytes=TILE * d * size,
              first_tx_bytes=first_key_bytes(pipeline) * pair),
        *ring("do", "load", "mma", 1, tx_bytes=TILE * dv * size,
              first_tx_bytes=TILE * dv * size * pair),
        *ring("row_stats", "load", "compute", stages, tx_bytes=2 * TILE * 4, releases=8),
        Signal(name="s_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="p_full", arrivals={"compute": 8 * pair}, waiters=("mma",),
               remote=pair == 2),
        Signal(name="dp_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="ds_full", arrivals={"compute": 8 * pair}, waiters=("mma",),
               remote=pair == 2),
        Signal(name="ds_empty", arrivals={"mma": 1}, waiters=("compute",), free=1),
        Signal(name="dq_full", arrivals={"mma": 1}, waiters=("reduce",)),
        Signal(name="dq_empty", arrivals={"reduce": 4 * pair}, waiters=("mma",), free=1,
               remote=pair == 2),
        Signal(
            name="dq_slot_empty",
            arrivals={"reduce": 1},
            waiters=("reduce",),
            kind="named",
            free=dq_slices(pipeline)[1],
        ),
        Signal(name="dkv_full", arrivals={"mma": 1}, waiters=("compute",)),
        # dK and dV leave through operands' places: the next work tile's loads wait for them, and
        # with the loads its products.
        Signal(name="dkv_empty", arrivals={"compute": 8}, waiters=("load",), free=1),
    ]  # fmt: skip
    if pair == 2:
        exchange = TILE * TILE * size // 2
        signals += [
            *ring("q_t", "load", "mma", 1, tx_bytes=TILE * d * size),
            *ring("do_t", "load", "mma", 1, tx_bytes=TILE * dv * size),
            Signal(name="s_read", arrivals={"compute": 8 * pair}, waiters=("mma",), remote=True),
            Signal(name="ds_peer", arrivals={"compute": 1}, waiters=("mma",), tx_bytes=exchange),
        ]
    return signals
