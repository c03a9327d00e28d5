"""This package's backward kernels on Hopper for head dims above 128 (`fa4.sim.hopper_backward`)."""

from __future__ import annotations

from dataclasses import replace

from fa4.designs import hopper_backward
from fa4.designs.backward import LAUNCHES
from fa4.designs.design import late
from fa4.hardware import Gpu
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup_wide import WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import wide_keys_plan
from fa4.plan.warpgroup_wide_queries import wide_queries_plan

_BESIDE = hopper_backward.DESIGN.compiled
assert _BESIDE is not None


def larger_plan(pipeline: WideBackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """Of the plans of dK and dV, and of dQ, that with more shared memory."""
    plans = (wide_keys_plan(pipeline, gpu), wide_queries_plan(pipeline, gpu))
    return max(plans, key=lambda plan: plan.bytes_used("smem"))


DESIGN = replace(
    hopper_backward.DESIGN,
    name="hopper_wide",
    about="this package's kernels: dK and dV in one, dQ in another",
    pipeline=WideBackwardPipeline,
    plan=larger_plan,
    mains=late("fa4.designs.gradients:wide_kernels"),
    compiled=replace(
        _BESIDE,
        spec="fa4.sm90.wide.spec:WideBackwardSpec",
        compiler="fa4.compiled.backward:compile_wide_backward",
        launches=(LAUNCHES[0], "dK and dV", "dQ", "gradient of the sink"),
    ),
)
