"""The pipelines of the kernels, described once as data.

`forward_plan` and `backward_plan` build a `PipelinePlan` for a machine; `check_plan` looks for what
is wrong with one; `render_plan` writes it as Markdown. The vocabulary is in `schema`.
"""

from __future__ import annotations

from fa4.plan.backward import backward_plan
from fa4.plan.checks import Finding, check_plan, require_sound
from fa4.plan.forward import forward_plan
from fa4.plan.render import (
    render_graph,
    render_memory,
    render_plan,
    render_program,
    render_roles,
    render_signals,
)
from fa4.plan.schema import PipelinePlan

__all__ = [
    "Finding",
    "PipelinePlan",
    "backward_plan",
    "check_plan",
    "forward_plan",
    "render_graph",
    "render_memory",
    "render_plan",
    "render_program",
    "render_roles",
    "render_signals",
    "require_sound",
]
