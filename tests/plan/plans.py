"""Plans that several tests share, ways to damage them, and runs on the event engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fa4.config import BackwardConfig, BackwardPipeline, ForwardConfig, ForwardPipeline
from fa4.hardware import B200
from fa4.plan import backward_plan, forward_plan
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Program, Work
from fa4.sim.code import EventCode
from fa4.sim.costs import MachineCosts
from fa4.sim.lower import lower
from fa4.sim.machine import find_machine

Step = Any


def forward(*, q_tiles: int = 2, tile_n: int = 128, **choices: Any) -> PipelinePlan:
    """A forward plan on a B200."""
    numerics = ForwardConfig(q_tiles=q_tiles, tile_n=tile_n)
    return forward_plan(ForwardPipeline(numerics=numerics, **choices), B200)


def backward(*, cta_group: int = 1, **choices: Any) -> PipelinePlan:
    """A backward plan on a B200."""
    numerics = BackwardConfig(cta_group=cta_group)
    return backward_plan(BackwardPipeline(numerics=numerics, **choices), B200)


def published(**choices: Any) -> PipelinePlan:
    """The plan of flash_attn.cute's backward kernel on a B200."""
    return backward(published=True, **choices)


FORWARD = {
    "one CTA": forward(),
    "pair": forward(cta_group=2),
    "one Q tile": forward(q_tiles=1),
    "inline correction": forward(correction="inline"),
    "one Q tile, inline": forward(q_tiles=1, correction="inline"),
    "no ping-pong": forward(ping_pong=False),
    "P in shared memory": forward(head_dim=64, p_space="smem"),
    "P at once": forward(split_p=1.0),
    "short tiles": forward(tile_n=32),
    "uneven ring": forward(head_dim=192, head_dim_v=128),
    "wide pair": forward(head_dim=192, head_dim_v=128, cta_group=2),
    "FP8": forward(element_bytes=1),
    "work stealing": forward(scheduler="clc"),
}
BACKWARD = {
    "one CTA": backward(),
    "pair": backward(cta_group=2),
    "deterministic": backward(deterministic=True),
    "deterministic pair": backward(cta_group=2, deterministic=True),
    "head dim 64": backward(head_dim=64),
    "causal": backward(causal=True),
    "wide pair": backward(cta_group=2, head_dim=192, head_dim_v=128),
    "deterministic wide pair": backward(
        cta_group=2, head_dim=192, head_dim_v=128, deterministic=True
    ),
}
PUBLISHED = {
    "one CTA": published(),
    "pair": published(cta_group=2),
    "deterministic": published(deterministic=True),
    "deterministic pair": published(cta_group=2, deterministic=True),
    "head dim 64": published(head_dim=64),
    "causal": published(causal=True),
}


def edit(program: Program, change: Callable[[Step], Sequence[Step]]) -> Program:
    """A program with each step replaced by what `change` makes of it, in loops too."""
    steps: list[Step] = []
    for step in program:
        if isinstance(step, Loop):
            steps.append(replace(step, body=edit(step.body, change)))
        else:
            steps += change(step)
    return tuple(steps)


def edit_role(
    plan: PipelinePlan, name: str, change: Callable[[Step], Sequence[Step]]
) -> PipelinePlan:
    """`plan` with the programs of one role edited."""

    def edited(role: Any) -> Any:
        names = ("prologue", "program", "closing")
        return replace(role, **{name: edit(getattr(role, name), change) for name in names})

    return with_role(plan, name, edited)


def with_role(plan: PipelinePlan, name: str, change: Callable[[Any], Any]) -> PipelinePlan:
    """`plan` with one role replaced."""
    plan.role(name)
    return replace(plan, roles=tuple(change(r) if r.name == name else r for r in plan.roles))


def with_signal(plan: PipelinePlan, name: str, **values: Any) -> PipelinePlan:
    """`plan` with fields of one signal changed."""
    plan.signal(name)
    signals = tuple(replace(s, **values) if s.name == name else s for s in plan.signals)
    return replace(plan, signals=signals)


def with_buffer(plan: PipelinePlan, name: str, **values: Any) -> PipelinePlan:
    """`plan` with fields of one buffer changed."""
    plan.buffer(name)
    buffers = tuple(replace(b, **values) if b.name == name else b for b in plan.buffers)
    return replace(plan, buffers=buffers)


def drop_arrives(plan: PipelinePlan, role: str, signal: str) -> PipelinePlan:
    """`plan` in which a role no longer arrives on a signal that still expects it."""
    return edit_role(
        plan, role, lambda s: () if isinstance(s, Arrive) and s.signal == signal else (s,)
    )


def change_work(plan: PipelinePlan, role: str, what: str, **values: Any) -> PipelinePlan:
    """`plan` in which fields of a role's work called `what` are changed."""

    def change(step: Step) -> Sequence[Step]:
        return (replace(step, **values) if isinstance(step, Work) and step.what == what else step,)

    return edit_role(plan, role, change)


def event_code(plan: PipelinePlan) -> EventCode:
    """The plan with B200's costs, for the engines."""
    machine = find_machine("b200")
    costs = MachineCosts(machine.gpu, machine.costs)
    return lower(plan, costs.work, costs.signal, {"rescale_rate": 0.1})


def trips(*totals: int, masked: int = 0) -> np.ndarray:
    """Trip counts of work tiles: total, masked, plain."""
    rows = [(total, min(masked, total), total - min(masked, total)) for total in totals]
    return np.array(rows, np.int64)
