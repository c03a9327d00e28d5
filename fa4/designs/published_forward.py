"""flash-attn-4's forward kernel on Blackwell: pairs of CTAs with registers of their own."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import ForwardPipeline, Problem
from fa4.designs import forward
from fa4.designs.forward import default_forward, one_tile_if_wide
from fa4.hardware import Gpu


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> ForwardPipeline:
    """Its choices for a problem."""
    return one_tile_if_wide(default_forward(problem, gpu, published=True), gpu)


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
