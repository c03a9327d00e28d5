"""This package's forward kernel on Hopper: warpgroups that multiply and exponentiate at once."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import Problem, WarpgroupPipeline
from fa4.designs.amounts import (
    element_bytes,
    forward_bytes,
    warpgroup_count,
)
from fa4.designs.design import CallWork, Compilation, Design, Explored, late, warpgroup_products
from fa4.hardware import Gpu
from fa4.plan.warpgroup_packing import packings

TAU = 8.0  # by which a maximum may rise; no choice


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> WarpgroupPipeline:
    """What a call of this package's Hopper kernel gets.

    A CTA that draws its work tiles is taken to be as far ahead as its load warp: warpgroups that
    pass over tiles are not simulated ahead of their output.
    """
    from fa4.plan.warpgroup_tuned import WarpgroupProblem, tuned_warpgroups

    size = element_bytes(problem.dtype)
    wanted = WarpgroupProblem(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        rows=problem.seqlen_q,
        keys=problem.seqlen_k,
        heads=problem.heads_q,
        batch=problem.batch,
        masked=problem.window_size != (None, None),
        window=problem.window_size,
        kv_heads=problem.heads_k,
        queries=problem.seqlen_q,
        num_splits=0 if size == 2 else 1,
        element_bytes=size,
        packings=packings(problem.heads_q // problem.heads_k),
    )
    tuned = tuned_warpgroups(wanted, gpu)
    return replace(tuned, ahead=False) if tuned.scheduler == "queue" else tuned


def chosen(pipeline: WarpgroupPipeline) -> dict[str, str]:
    """What it chooses, as the explorer's controls have it: of a queue, its order."""
    turns = "-turns" if pipeline.ping_pong else ""
    scheduler = "lpt" if pipeline.scheduler == "queue" else pipeline.scheduler
    return {
        "tile_n": str(pipeline.tile_n), "scheduler": scheduler,
        "warpgroups": f"{pipeline.consumers}{turns}", "kv_pairs": str(pipeline.kv_stages),
    }  # fmt: skip


def beside(problem: Problem, pipeline: WarpgroupPipeline) -> dict[str, float]:
    """Seconds of what sets the counter of a queue to zero, and of what adds up divided keys."""
    from fa4.plan.warpgroup_tuned import QUEUE_SECONDS, combining_seconds

    rows = problem.batch * problem.seqlen_q * problem.heads_q
    found = {"counter": QUEUE_SECONDS} if pipeline.scheduler == "queue" else {}
    if pipeline.num_splits > 1:
        found["combine"] = combining_seconds(pipeline.num_splits * rows * problem.head_dim_v)
    return found


# Another scheduler is another plan: CTAs that stride over their work fetch ahead.
WORK = CallWork(
    tiles=late("fa4.designs.tiles:warpgroup_tiles"),
    count=warpgroup_count,
    order=late("fa4.designs.tiles:forward_order"),
    traffic=forward_bytes,
    rescale_tau=lambda pipeline: TAU,
    beside=beside,
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
