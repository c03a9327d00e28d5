"""flash-attn-4's forward kernel on Blackwell: pairs of CTAs with registers of their own."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import ForwardPipeline, Problem, require
from fa4.designs import forward
from fa4.designs.forward import default_forward
from fa4.hardware import Gpu

WIDEST = 192


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> ForwardPipeline:
    """Its choices for a problem. Raises ValueError for head dims that have another pipeline."""
    widest = max(problem.head_dim, problem.head_dim_v)
    rule = "as its one for 256 is another pipeline; kernel blackwell is predicted"
    require(widest <= WIDEST, f"kernel published must have head dims to {WIDEST}, {rule}", widest)
    return default_forward(problem, gpu, published=True)


DESIGN = replace(
    forward.DESIGN,
    name="published_forward",
    kernel="published",
    about="flash-attn-4's kernels",
    traits={"published": True},
    choose=choose,
    compiled=None,
    explored=replace(forward.EXPLORED, label="Published"),
)
