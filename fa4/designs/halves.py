"""Two softmax warpgroups for each Q tile: the first of the pieces of which a kernel is built."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import Problem
from fa4.designs import pieces
from fa4.designs.design import Compilation, Explored
from fa4.designs.forward import EXPS_PER_CLK, default_forward
from fa4.hardware import Gpu
from fa4.plan.halves import NAME, TRAITS, halves_numerics, halves_pipeline
from fa4.plan.pieces import PiecesPipeline


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> PiecesPipeline:
    """Pairs and work tiles as of the forward kernel; ValueError for types that it does not take."""
    other = default_forward(problem, gpu)
    if other.element_bytes != TRAITS["element_bytes"]:
        raise ValueError(f"kernel {NAME} takes bf16 and fp16; got dtype {problem.dtype}")
    masked = problem.window_size != (None, None)
    emulate = gpu.exp_per_clk <= EXPS_PER_CLK
    numerics = halves_numerics(problem.dtype, problem.head_dim, masked, emulate=emulate)
    return halves_pipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        numerics=numerics,
        cta_group=other.cta_group,
        scheduler=other.scheduler,
    )


def chosen(pipeline: PiecesPipeline) -> dict[str, str]:
    """What it chooses, as the explorer's controls have it."""
    return {
        "cta_group": str(pipeline.cta_group), "exp2": "tuned", "rescale_rate": "0",
        "scheduler": pipeline.scheduler,
    }  # fmt: skip


EXPLORED = Explored(
    label="halves", controls=("cta_group", "exp2", "rescale_rate", "scheduler"), chosen=chosen
)

DESIGN = replace(
    pieces.DESIGN,
    name=NAME,
    kernel=NAME,
    about="two softmax warpgroups a Q tile",
    traits=TRAITS,
    choose=choose,
    compiled=Compilation(
        family="sm100",
        spec="fa4.sm100.halves.spec:HalvesSpec",
        tuned="fa4.compiled.variants:tuned_halves_spec",
        compiler="fa4.compiled.forward:compile_halves",
        support="fa4.compiled.support:HALVES",
        column=NAME,
    ),
    explored=EXPLORED,
)
