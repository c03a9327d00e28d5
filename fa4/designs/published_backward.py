"""flash-attn-4's backward kernels on Blackwell."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import BackwardPipeline, Problem
from fa4.designs import backward
from fa4.designs.amounts import backward_bytes, backward_count_of_heads
from fa4.designs.backward import backward_choice
from fa4.designs.design import CallWork, late
from fa4.hardware import Gpu


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> BackwardPipeline:
    """Its choices: pairs from head dim 128 on; last keys first in a fixed order under any mask."""
    return backward_choice(
        problem,
        pair=problem.head_dim >= 128,
        last_first=problem.window_size != (None, None),
        deterministic=deterministic,
        published=True,
    )


DESIGN = replace(
    backward.DESIGN,
    name="published_backward",
    kernel="published",
    about="flash-attn-4's kernels",
    traits={"published": True},
    choose=choose,
    work=CallWork(
        tiles=late("fa4.designs.tiles:backward_tiles_of_heads"),
        count=backward_count_of_heads,
        order=late("fa4.designs.tiles:launched"),
        traffic=backward_bytes,
        plain_scheduler="naive",
        last_first=lambda problem, pipeline: pipeline.scheduler == "spt",
    ),
    compiled=None,
    explored=replace(backward.EXPLORED, label="Published"),
)
