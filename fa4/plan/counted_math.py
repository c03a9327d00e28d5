"""A plan with the instruction counts of a real kernel in place of its own estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from fa4.plan.schema import FOLLOWING, Loop, Math, PipelinePlan, Program, Role, Work

PIPES = tuple(item.name for item in fields(Math) if item.name != "chain")


def with_measured_math(plan: PipelinePlan, measured: Mapping[str, Math]) -> PipelinePlan:
    """The plan with the arithmetic of some roles' main loops scaled to what was counted.

    measured: role -> instructions per thread of one pass through the role's last loop (whole KV
    tiles), without work that only a share of the passes does. The parts of the loop keep their
    proportions; a pipe that the plan does not use there is charged to the first part. Work of the
    same name in other loops changes alike; everything else stays. Raises KeyError for a role that
    is not in the plan, ValueError for one without arithmetic in a loop.
    """
    changed = {name: _measured_role(plan.role(name), amount) for name, amount in measured.items()}
    return replace(plan, roles=tuple(changed.get(role.name, role) for role in plan.roles))


def loop_math(role: Role) -> dict[str, Math]:
    """The arithmetic of a role's last loop by name of the work; without shares."""
    loops = [step for step in role.program if isinstance(step, Loop) and step.trip != FOLLOWING]
    return {
        step.what: step.amount
        for step in (loops[-1].body if loops else ())
        if isinstance(step, Work) and isinstance(step.amount, Math) and step.share is None
    }


def _measured_role(role: Role, measured: Math) -> Role:
    parts = loop_math(role)
    if not parts:
        raise ValueError(f"{role.name} has no arithmetic in a loop; nothing to scale")
    totals = {pipe: sum(getattr(part, pipe) for part in parts.values()) for pipe in PIPES}
    first = next(iter(parts))
    scaled: dict[str, Math] = {}
    for what, part in parts.items():
        amounts = {
            pipe: getattr(part, pipe) * getattr(measured, pipe) / total
            if total
            else getattr(measured, pipe) * (what == first)
            for pipe, total in totals.items()
        }
        scaled[what] = replace(part, **amounts)
    return replace(role, program=tuple(_with_amounts(role.program, scaled)))


def _with_amounts(program: Program, amounts: Mapping[str, Math]) -> Iterator:
    for step in program:
        if isinstance(step, Loop):
            yield replace(step, body=tuple(_with_amounts(step.body, amounts)))
        elif isinstance(step, Work) and step.what in amounts:
            yield replace(step, amount=amounts[step.what])
        else:
            yield step
