"""This package's forward kernel on Blackwell: two Q tiles in turns, O corrected beside them."""

from __future__ import annotations

from dataclasses import replace

from fa4.config import ForwardConfig, ForwardPipeline, Problem
from fa4.designs.amounts import element_bytes, forward_bytes, forward_count
from fa4.designs.design import CallWork, Compilation, Design, Explored, late, tensor_memory
from fa4.designs.ideas import FORWARD_IDEAS
from fa4.hardware import Gpu

EXPS_PER_CLK = 16  # of the SMs for which a share of the exponentials is emulated


def default_forward(problem: Problem, gpu: Gpu, *, published: bool = False) -> ForwardPipeline:
    """Forward choices of flash_attn.cute; published: with its registers, too.

    Pairs without a mask, longest first with one.

    Two CTAs share operands for head dims of 128 and 192 (dv 128) without causal mask or window,
    when a sequence has more than one block of rows. B300's exponential units are twice as fast, so
    nothing is emulated there.
    """
    masked = problem.window_size != (None, None)
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_k)
    padded = 128 if 96 < problem.head_dim <= 128 else problem.head_dim
    pair = not masked and padded in (128, 192) and problem.head_dim_v == 128 and rows > 256
    numerics = ForwardConfig.tuned(problem.dtype, problem.head_dim, masked)
    if gpu.exp_per_clk > EXPS_PER_CLK:
        numerics = ForwardConfig(
            rescale_threshold_log2=numerics.rescale_threshold_log2,
            p_offset_log2=numerics.p_offset_log2,
        )
    return ForwardPipeline(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        element_bytes=element_bytes(problem.dtype),
        causal=masked,
        numerics=numerics,
        cta_group=2 if pair else 1,
        scheduler="lpt" if masked else "static",
        published=published,
    )


def one_tile_if_wide(pipeline: ForwardPipeline, gpu: Gpu) -> ForwardPipeline:
    """With one Q tile per CTA where two do not fit into tensor memory; no kernel here has that."""
    numerics = pipeline.numerics
    columns = numerics.tile_n + pipeline.head_dim_v
    if not columns <= gpu.tmem_cols < numerics.q_tiles * columns:
        return pipeline
    return replace(pipeline, numerics=replace(numerics, q_tiles=1))


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> ForwardPipeline:
    """The tuned pipeline of a problem, with one Q tile where two do not fit."""
    return one_tile_if_wide(default_forward(problem, gpu), gpu)


def chosen(pipeline: ForwardPipeline) -> dict[str, str]:
    """What it chooses, as the explorer's controls have it."""
    return {
        "tile_n": str(pipeline.tile_n), "scheduler": pipeline.scheduler,
        "q_tiles": str(pipeline.numerics.q_tiles), "cta_group": str(pipeline.cta_group),
        "kv_stages": "fit", "exp2": "tuned", "rescale_rate": "0",
    }  # fmt: skip


WORK = CallWork(
    tiles=late("fa4.designs.tiles:forward_tiles"),
    count=forward_count,
    order=late("fa4.designs.tiles:forward_order"),
    traffic=forward_bytes,
    plain_scheduler="static",
    rescale_tau=lambda pipeline: pipeline.numerics.rescale_threshold_log2,
)
EXPLORED = Explored(
    label="Blackwell",
    controls=(
        "tile_n", "q_tiles", "kv_stages", "cta_group", "exp2", "rescale_rate", "scheduler",
    ),
    chosen=chosen,
)  # fmt: skip

DESIGN = Design(
    name="forward",
    kernel="blackwell",
    about="this package's kernels",
    missing=tensor_memory,
    pipeline="fa4.config:ForwardPipeline",
    traits={"published": False},
    choose=choose,
    plan=late("fa4.plan.forward:forward_plan"),
    work=WORK,
    ideas=FORWARD_IDEAS,
    compiled=Compilation(
        family="sm100",
        spec="fa4.sm100.forward.spec:ForwardSpec",
        tuned="fa4.compiled.variants:find_tuned",
        compiler="fa4.compiled.forward:compile_forward",
        support="fa4.compiled.support:FORWARD",
        column="forward",
    ),
    explored=EXPLORED,
)
