"""The plan of the Hopper backward kernel: sound, and faults in it are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fa4.config import WARPGROUP_ROWS
from fa4.hardware import H200
from fa4.plan.checks import check_plan
from fa4.plan.memory_rules import whole_runs
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Program, Role, Step, Wait
from fa4.plan.warpgroup_backward import (
    CONSUMERS,
    NARROW,
    TALL,
    WarpgroupBackwardPipeline,
    dq_columns,
    fewest_dq_cols,
    warpgroup_backward_plan,
)

PIPELINES = (
    WarpgroupBackwardPipeline(),
    WarpgroupBackwardPipeline(cols=96, cols_v=80),
    WarpgroupBackwardPipeline(cols=96, cols_v=80, dq_cols=96),
    WarpgroupBackwardPipeline(head_dim=64, tile_m=128, cols=48, dq_cols=48, head_dim_v=64),
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
            (Wait("met"), Arrive("met")),
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
    if "met" in names:  # nobody names it any more
        plan = replace(plan, signals=tuple(s for s in plan.signals if s.name not in names))
    assert found in "; ".join(map(str, check_plan(plan, H200)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 96}, "head_dim must be 64 or 128; got 96"),
        ({"tile_m": 80}, "tile_m must be 64 or 128; got 80"),
        ({"cols": 104}, "cols must be a multiple of 16, at most 128; got 104"),
        ({"head_dim_v": 64, "cols_v": 80}, "cols_v must be a multiple of 16, at most 64; got 80"),
        ({"dq_cols": 72}, "dq_cols must be a multiple of 16, at most 128; got 72"),
        ({"scheduler": "lpt"}, "scheduler must be one of naive, spt; got 'lpt'"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarpgroupBackwardPipeline(**fields)  # type: ignore[arg-type]


@given(st.integers(1, 16), st.sampled_from([NARROW, TALL]), st.booleans())
def test_columns_of_dq(eighths: int, tile_m: int, ragged: bool) -> None:
    """All there are, no more than the tile's, and as many for each warpgroup as wgmma takes."""
    head_dim = 8 * eighths
    assume(tile_m == NARROW or head_dim <= 64)
    cols = fewest_dq_cols(head_dim, tile_m, ragged=ragged)
    pipeline = WarpgroupBackwardPipeline(
        head_dim=whole_runs(head_dim), tile_m=tile_m, dq_cols=cols,
        head_dim_v=64 if tile_m == TALL else 128,
    )  # fmt: skip
    assert head_dim <= cols <= pipeline.head_dim and pipeline.key_dim >= cols
    assert CONSUMERS * WARPGROUP_ROWS * dq_columns(pipeline) == cols * tile_m
    assert dq_columns(pipeline) % 8 == 0
    run = pipeline.key_run_bytes // 2
    halves = cols // CONSUMERS
    # A half begins with a run, or ends inside the only one.
    assert tile_m != NARROW or halves % run == 0 or cols <= run
    # Of sequences with lengths of their own no run is loaded that lies behind all columns.
    assert not ragged or pipeline.key_dim - run < head_dim


@given(st.integers(1, 300))
def test_whole_runs(cols: int) -> None:
    found = whole_runs(cols)
    assert found % 64 == 0 and cols <= found < cols + 64
    assert whole_runs(cols, 1) == -(-cols // 128) * 128
