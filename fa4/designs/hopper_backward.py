"""This package's backward kernels on Hopper, up to head dim 128 (`fa4.sim.hopper_backward`)."""

from __future__ import annotations

from fa4.designs.backward import LAUNCHES
from fa4.designs.design import Compilation, Design, late, warpgroup_products
from fa4.plan.warpgroup_backward import WarpgroupBackwardPipeline, warpgroup_backward_plan

DESIGN = Design(
    name="hopper_backward",
    kernel="hopper",
    about="this package's kernels",
    backward=True,
    missing=warpgroup_products,
    pipeline=WarpgroupBackwardPipeline,
    plan=warpgroup_backward_plan,
    mains=late("fa4.designs.gradients:narrow_kernels"),
    compiled=Compilation(
        family="sm90",
        spec="fa4.sm90.backward.spec:WarpgroupBackwardSpec",
        tuned="fa4.compiled.variants:find_tuned_backward",
        compiler="fa4.compiled.backward:compile_warpgroup_backward",
        support="fa4.compiled.support:SM90_BACKWARD",
        column="sm90 backward",
        launches=LAUNCHES,
    ),
)
