"""This package's forward kernel on Hopper: warpgroups that multiply and exponentiate at once."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import WARPGROUP_ROWS, Problem, WarpgroupPipeline
from fa4.designs.amounts import element_bytes, forward_bytes, forward_count
from fa4.designs.design import CallWork, Compilation, Design, Explored, late, warpgroup_products
from fa4.hardware import Gpu

TAU = 8.0  # by which a maximum may rise; no choice


def default_warpgroups(problem: Problem, gpu: Gpu) -> WarpgroupPipeline:
    """Choices of this package's Hopper kernel, whose Q tiles pack the heads of a group."""
    from fa4.plan.warpgroup_tuned import WarpgroupProblem, tuned_warpgroups

    group = problem.heads_q // problem.heads_k
    packed = group if WARPGROUP_ROWS % group == 0 else 1
    wanted = WarpgroupProblem(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        rows=problem.seqlen_q * packed,
        keys=problem.seqlen_k,
        heads=problem.heads_q // packed,
        batch=problem.batch,
        masked=problem.window_size != (None, None),
        window=problem.window_size,
        queries=problem.seqlen_q,
        element_bytes=element_bytes(problem.dtype),
    )
    return tuned_warpgroups(wanted, gpu)


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> WarpgroupPipeline:
    """The tuned pipeline of a problem; work that is drawn is predicted as a CTA's for each tile."""
    tuned = default_warpgroups(problem, gpu)
    if tuned.scheduler == "queue":  # none is taken to be ahead of another's end
        return replace(tuned, scheduler="lpt", ahead=False)
    return tuned


def chosen(pipeline: WarpgroupPipeline) -> dict[str, str]:
    """What it chooses, as the explorer's controls have it."""
    turns = "-turns" if pipeline.ping_pong else ""
    return {
        "tile_n": str(pipeline.tile_n), "scheduler": pipeline.scheduler,
        "warpgroups": f"{pipeline.consumers}{turns}", "kv_pairs": str(pipeline.kv_stages),
    }  # fmt: skip


# Another scheduler is another plan: CTAs that stride over their work fetch ahead.
WORK = CallWork(
    tiles=late("fa4.designs.tiles:warpgroup_tiles"),
    count=forward_count,
    order=late("fa4.designs.tiles:forward_order"),
    traffic=forward_bytes,
    rescale_tau=lambda pipeline: TAU,
)
EXPLORED = Explored(
    label="Hopper", controls=("warpgroups", "tile_n", "kv_pairs", "scheduler"), chosen=chosen
)

DESIGN = Design(
    name="hopper_forward",
    kernel="hopper",
    about="this package's kernels: warpgroups that multiply and exponentiate at once",
    missing=warpgroup_products,
    pipeline="fa4.config:WarpgroupPipeline",
    traits={"published": False},
    choose=choose,
    plan=late("fa4.plan.warpgroup:warpgroup_plan"),
    work=WORK,
    compiled=Compilation(
        family="sm90",
        spec="fa4.sm90.forward.spec:WarpgroupSpec",
        tuned="fa4.compiled.variants:find_tuned",
        compiler="fa4.compiled.forward:compile_warpgroup",
        support="fa4.compiled.support:SM90",
        column="sm90",
    ),
    explored=EXPLORED,
    measured_as="own ",
)
