"""What the simulator says about the demo's own shapes, and about the paper's headline shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4.backends.request import Request
from fa4.config import Problem
from fa4.designs.forward import default_forward
from fa4.designs.tiles import Lengths
from fa4.sim.machine import find_machine
from fa4.sim.predict import Simulation, predict

if TYPE_CHECKING:
    from fa4.sm100.forward.spec import ForwardSpec
    from fa4.sm100.halves.spec import HalvesSpec

MACHINE = "b200"
# The FlashAttention-4 paper's fastest forward: 1613 TFLOP/s at 32k tokens, head dim 128.
HEADLINE = Problem(batch=1, seqlen_q=32768, seqlen_k=32768, heads_q=16, heads_k=16, head_dim=128)


def predict_request(
    request: Request,
    causal: bool,
    rescale_rate: float,
    kernel: ForwardSpec | HalvesSpec | None = None,
) -> dict[str, Any] | None:
    """Predicted B200 time of one attention call; None for a shape that no B200 kernel takes.

    `rescale_rate` is the share of rescales that the reference counted on these inputs. kernel: by
    the instruction counts of this compiled kernel; otherwise of FlashAttention-4's choices, by the
    plan's own estimates.
    """
    q, k = request.q, request.k
    if request.packing.cu_seqlens_q is not None and request.packing.cu_seqlens_k is not None:
        sides = (request.packing.cu_seqlens_q, request.packing.cu_seqlens_k)
        lengths = [Lengths(*pair) for pair in zip(*(np.diff(x).tolist() for x in sides),
                                                  strict=True)]  # fmt: skip
    else:
        lengths = [Lengths(q.shape[1], k.shape[1])] * q.shape[0]
    problem = Problem(
        batch=len(lengths),
        seqlen_q=max(length.q for length in lengths),
        seqlen_k=max(length.k for length in lengths),
        heads_q=q.shape[-2],
        heads_k=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=request.v.shape[-1],
        causal=causal,
    )
    try:
        simulation = Simulation(lengths=tuple(lengths), rescale_rate=rescale_rate)
        return _describe(problem, simulation, kernel)
    except ValueError:
        return None


def predict_headline() -> dict[str, Any]:
    """Predicted time of the paper's headline shape."""
    return _describe(HEADLINE, Simulation())


def _describe(
    problem: Problem, simulation: Simulation, kernel: ForwardSpec | HalvesSpec | None = None
) -> dict[str, Any]:
    machine, useful = find_machine(MACHINE), 1.0
    if kernel is None:
        prediction = predict(problem, default_forward(problem, machine.gpu), machine, simulation)
    else:
        from fa4.compiled.prediction import measured_plan

        pipeline, dims = kernel.pipeline, (problem.head_dim, problem.head_dim_v)
        padded = replace(problem, head_dim=pipeline.head_dim, head_dim_v=pipeline.head_dim_v)
        useful = sum(dims) / (pipeline.head_dim + pipeline.head_dim_v)
        prediction = predict(padded, pipeline, machine, simulation, measured_plan(kernel))
    return {
        "machine": prediction.machine,
        "batch": problem.batch,
        "seqlen": problem.seqlen_k,
        "heads": problem.heads_q,
        "head_dim": problem.head_dim,
        "microseconds": prediction.seconds * 1e6,
        "tflops": prediction.tflops * useful,
        "peak_share": prediction.peak_share * useful,
        "bottleneck": prediction.bottleneck,
    }
