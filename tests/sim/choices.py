"""What kernels choose for a problem, by the records of `fa4.designs`."""

from __future__ import annotations

from fa4.config import BackwardPipeline, ForwardPipeline, Problem, WarpgroupPipeline
from fa4.designs import backward, hopper_forward, published_backward, published_hopper
from fa4.designs.forward import default_forward
from fa4.hardware import B200, H200, Gpu


def default_backward(
    problem: Problem, *, deterministic: bool = False, published: bool = False
) -> BackwardPipeline:
    """On Blackwell."""
    choose = published_backward.choose if published else backward.choose
    return choose(problem, B200, deterministic)


def default_hopper(
    problem: Problem, gpu: Gpu = H200, *, published: bool = False
) -> WarpgroupPipeline:
    """On Hopper, forward."""
    return (published_hopper.choose if published else hopper_forward.choose)(problem, gpu)


__all__ = ["ForwardPipeline", "default_backward", "default_forward", "default_hopper"]
