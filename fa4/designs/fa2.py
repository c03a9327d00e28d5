"""A kernel like FlashAttention-2's: products and softmax in turn, on any machine."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import Problem, WarpgroupPipeline
from fa4.designs import hopper_forward
from fa4.designs.amounts import element_bytes
from fa4.designs.design import anything
from fa4.hardware import Gpu


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> WarpgroupPipeline:
    """A FlashAttention-2-like kernel: 128 rows, products and softmax of a warpgroup alternate."""
    return WarpgroupPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=element_bytes(problem.dtype),
        causal=problem.window_size != (None, None),
        tile_n=64,
        ping_pong=False,
        overlap=False,
        scheduler="naive",
        published=True,
    )


DESIGN = replace(
    hopper_forward.DESIGN,
    name="fa2",
    kernel="fa2",
    about="products and softmax in turn",
    missing=anything,
    traits={"published": True, "overlap": False, "ping_pong": False},
    choose=choose,
    compiled=None,
    explored=replace(hopper_forward.EXPLORED, label="FA2"),
    measured_as=None,
)
