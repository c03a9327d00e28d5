"""The plan of the Hopper backward kernel: sound, and faults in it are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4.hardware import H200
from fa4.plan.checks import check_plan
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Program, Role, Step, Wait
from fa4.plan.warpgroup_backward import WarpgroupBackwardPipeline, warpgroup_backward_plan

PIPELINES = (
    WarpgroupBackwardPipeline(),
    WarpgroupBackwardPipeline(tile_m=80),
    WarpgroupBackwardPipeline(cols=96, cols_v=80),
    WarpgroupBackwardPipeline(head_dim=64, head_dim_v=64, tile_m=128, causal=True),
    WarpgroupBackwardPipeline(head_dim=64, deterministic=True, scheduler="spt"),
)


def without(program: Program, gone: tuple[Step, ...]) -> Program:
    """A program without some steps, in its loops too."""
    kept: list[Step] = []
    for step in program:
        if isinstance(step, Loop):
            kept.append(replace(step, body=without(step.body, gone)))
        elif step not in gone:
            kept.append(step)
    return tuple(kept)


def changed(plan: PipelinePlan, gone: tuple[Step, ...]) -> PipelinePlan:
    """A plan without some steps of all roles."""

    def shorter(role: Role) -> Role:
        return replace(role, program=without(role.program, gone))

    return replace(plan, roles=tuple(map(shorter, plan.roles)))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_sound(pipeline: WarpgroupBackwardPipeline) -> None:
    plan = warpgroup_backward_plan(pipeline, H200)
    assert check_plan(plan, H200) == []
    assert all(role.spilled_registers == 0 for role in plan.roles)


@pytest.mark.parametrize(
    ("gone", "found"),
    [
        (
            (Wait("meet0"), Arrive("meet0")),
            "write dS1 of consumer1 may come before dq0 of consumer0",
        ),
        ((Wait("q_empty"),), "q_empty"),
        ((Wait("dk0_done"), Arrive("dk0_done", after="tensor")), "dk0"),
        ((Arrive("do_empty"),), "do_empty"),
    ],
)
def test_a_fault_is_found(gone: tuple[Step, ...], found: str) -> None:
    """Steps that are left out, of all roles."""
    plan = changed(warpgroup_backward_plan(WarpgroupBackwardPipeline(), H200), gone)
    names = {step.signal for step in gone if isinstance(step, (Wait, Arrive))}
    if "meet0" in names:  # nobody names it any more
        plan = replace(plan, signals=tuple(s for s in plan.signals if s.name not in names))
    assert found in "; ".join(map(str, check_plan(plan, H200)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 96}, "head_dim must be 64 or 128; got 96"),
        ({"tile_m": 96}, "tile_m must be 64, 80 or 128 at head_dim 128; got 96"),
        ({"tile_m": 80, "head_dim": 64}, "tile_m must be 64 or 128 at head_dim 64; got 80"),
        ({"cols": 104}, "cols must be a multiple of 16, at most 128; got 104"),
        ({"head_dim_v": 64, "cols_v": 80}, "cols_v must be a multiple of 16, at most 64; got 80"),
        ({"scheduler": "lpt"}, "scheduler must be one of naive, spt; got 'lpt'"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarpgroupBackwardPipeline(**fields)  # type: ignore[arg-type]
