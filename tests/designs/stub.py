"""A kernel that there is not: this file, and its name in `fa4.designs.NAMES`, are all of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fa4.compiled.support import Feature
from fa4.config import ForwardPipeline, Problem
from fa4.designs import forward
from fa4.designs.design import Compilation
from fa4.hardware import Gpu
from fa4.sm100.forward.spec import ForwardSpec


@dataclass(frozen=True, kw_only=True)
class StubPipeline(ForwardPipeline):
    """As the forward kernel's."""


@dataclass(frozen=True, kw_only=True)
class StubSpec(ForwardSpec):
    """As the forward kernel's."""


def choose(problem: Problem, gpu: Gpu, deterministic: bool = False) -> StubPipeline:
    """The forward kernel's choices."""
    found = forward.choose(problem, gpu)
    return StubPipeline(**{item.name: getattr(found, item.name) for item in fields(found)})


def tuned(head_dim: int, head_dim_v: int, gpu: Gpu, **features: Any) -> StubSpec:
    """With features as given."""
    return StubSpec(head_dim=head_dim, head_dim_v=head_dim_v, gpu=gpu, **features)


def compile_stub(spec: StubSpec, arch: str) -> Any:
    """The forward kernel's code."""
    from fa4.compiled.forward import compile_forward

    return compile_forward(spec, arch)


SUPPORT = (Feature("bf16, fp16", True, "as others"), Feature("stubs", True, "its own row"))

DESIGN = replace(
    forward.DESIGN,
    name="stub",
    kernel="stub",
    about="a kernel that there is not",
    pipeline="fa4.designs.stub:StubPipeline",
    traits={},
    choose=choose,
    compiled=Compilation(
        family="sm100",
        spec="fa4.designs.stub:StubSpec",
        tuned="fa4.designs.stub:tuned",
        compiler="fa4.designs.stub:compile_stub",
        support="fa4.designs.stub:SUPPORT",
        column="stub",
    ),
    explored=replace(forward.EXPLORED, label="Stub"),
)
