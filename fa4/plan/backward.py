"""The backward pass on Blackwell as a plan: by one CTA, or by pairs.

A CTA owns one KV tile and walks the query tiles m. Five products per m, on transposed scores:
S = K Q^T, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K. Tensor memory is full, so regions are
shared: P lies over S, dS over dP, and dQ over dP (`backward_single`) or S (`backward_pair`), which
fixes the order of the products. The reduce warps add dQ into global memory in float32.

`BackwardPipeline.published` chooses between this package's kernels and the published ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fa4.config import BackwardPipeline
from fa4.hardware import Gpu
from fa4.plan.backward_pair import pair_plan
from fa4.plan.backward_serial import SERIAL_DIMS, serial_plan
from fa4.plan.backward_single import TILE, single_plan
from fa4.plan.published_backward import published_plan
from fa4.plan.schema import PipelinePlan, Turns


def backward_plan(pipeline: BackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan of a backward kernel. Raises ValueError if it does not fit the machine."""
    if gpu.tmem_cols == 0:
        raise ValueError(f"this plan needs tensor memory; {gpu.name} has none")
    numerics = pipeline.numerics
    if (numerics.tile_m, numerics.tile_n) != (TILE, TILE):
        raise ValueError(
            f"backward tiles must be {TILE} x {TILE}, the lanes of tensor memory; "
            f"got {numerics.tile_m} x {numerics.tile_n}"
        )
    return replace(_kernel(pipeline)(pipeline, gpu), turns=_turns(pipeline))


def _kernel(pipeline: BackwardPipeline) -> Callable[[BackwardPipeline, Gpu], PipelinePlan]:
    if pipeline.published:
        return published_plan
    if pipeline.numerics.cta_group == 1:
        return single_plan
    serial = (pipeline.head_dim, pipeline.head_dim_v) == SERIAL_DIMS
    return serial_plan if serial else pair_plan


def _turns(pipeline: BackwardPipeline) -> Turns | None:
    """The order of sums and of launches; the published kernels' turns go as they are launched.

    "lpt" starts with the KV tiles that most queries see: without a mask all are alike, and start in
    their order; which they are under a mask depends on its sides.
    """
    if not pipeline.deterministic:
        return None
    launches = {"naive": ("ascending",), "spt": ("descending",)}.get(
        pipeline.scheduler, ("ascending", "descending") if pipeline.causal else ("ascending",)
    )
    order = launches[0] if pipeline.published else pipeline.numerics.dq_order
    return Turns(order=order, launches=launches)
