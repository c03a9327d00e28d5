"""This package's backward kernels on Blackwell: a CTA, or a pair, for each KV tile."""

from __future__ import annotations

from fa4.config import BackwardConfig, BackwardPipeline, Problem
from fa4.designs.amounts import backward_bytes, backward_count
from fa4.designs.design import CallWork, Compilation, Design, Explored, late, tensor_memory
from fa4.designs.ideas import BACKWARD_IDEAS
from fa4.hardware import Gpu

PAIR_DIMS = (128, 128)
LAUNCHES = ("pre-process: statistics of rows", "main kernel", "post-process: dQ in 16 bits")


def backward_choice(
    problem: Problem, *, pair: bool, last_first: bool, deterministic: bool, published: bool
) -> BackwardPipeline:
    """A pipeline of a problem; last_first: the last keys come first in a fixed order of sums."""
    last_first = deterministic and last_first
    numerics = BackwardConfig(
        cta_group=2 if pair else 1, dq_order="descending" if last_first else "ascending"
    )
    return BackwardPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.window_size != (None, None),
        numerics=numerics,
        deterministic=deterministic,
        scheduler="spt" if last_first else "naive",
        published=published,
    )


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> BackwardPipeline:
    """Its choices for a problem.

    Pairs at (128, 128), with keys for both CTAs, and at (192, 128); in a fixed order of sums the
    last keys first where a mask hides them from the first rows.
    """
    from fa4.plan.backward_serial import SERIAL_DIMS

    dims = problem.head_dim, problem.head_dim_v
    return backward_choice(
        problem,
        pair=dims == SERIAL_DIMS or (dims == PAIR_DIMS and problem.seqlen_k > 128),
        last_first=hides_last(problem, None),
        deterministic=deterministic,
        published=False,
    )


def hides_last(problem: Problem, pipeline: BackwardPipeline | None) -> bool:
    """Are the last keys hidden from the first rows?"""
    return problem.window_size[1] is not None


def chosen(pipeline: BackwardPipeline) -> dict[str, str]:
    """What it chooses, as the explorer's controls have it."""
    return {"cta_group": str(pipeline.numerics.cta_group), "order": "any"}


EXPLORED = Explored(label="Blackwell", controls=("cta_group", "order"), chosen=chosen)

DESIGN = Design(
    name="backward",
    kernel="blackwell",
    about="this package's kernels",
    backward=True,
    missing=tensor_memory,
    pipeline="fa4.config:BackwardPipeline",
    traits={"published": False},
    choose=choose,
    plan=late("fa4.plan.backward:backward_plan"),
    work=CallWork(
        tiles=late("fa4.designs.tiles:backward_tiles"),
        count=backward_count,
        order=late("fa4.designs.tiles:launched"),
        traffic=backward_bytes,
        plain_scheduler="naive",
        last_first=hides_last,
    ),
    ideas=BACKWARD_IDEAS,
    compiled=Compilation(
        family="sm100",
        spec="fa4.sm100.backward.spec:BackwardSpec",
        tuned="fa4.compiled.variants:find_tuned_backward",
        compiler="fa4.compiled.backward:compile_backward",
        support="fa4.compiled.support:BACKWARD",
        column="backward",
        launches=LAUNCHES,
    ),
    explored=EXPLORED,
)
