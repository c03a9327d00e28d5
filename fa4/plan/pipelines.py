"""Every pipeline that a plan can be made of."""

from __future__ import annotations

from fa4.config import BackwardPipeline, ForwardPipeline, WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.plan.pieces import PiecesPipeline
from fa4.plan.pieces_plan import pieces_plan
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup import warpgroup_plan

AnyForwardPipeline = ForwardPipeline | WarpgroupPipeline | PiecesPipeline
AnyPipeline = AnyForwardPipeline | BackwardPipeline


def build_plan(pipeline: AnyPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan of any pipeline. Raises ValueError if it does not fit the machine."""
    if isinstance(pipeline, ForwardPipeline):
        return forward_plan(pipeline, gpu)
    if isinstance(pipeline, BackwardPipeline):
        return backward_plan(pipeline, gpu)
    if isinstance(pipeline, PiecesPipeline):
        return pieces_plan(pipeline, gpu)
    return warpgroup_plan(pipeline, gpu)
