"""The published backward plan: its known numbers; it runs, and needs every arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.config import BackwardConfig, BackwardPipeline
from fa4.hardware import B200
from fa4.plan import PipelinePlan, backward_plan, check_plan
from fa4.plan.schema import Arrive, Mma, Wait, Work, unroll
from fa4.sim import engine, engine_python
from fa4.sim.code import PipelineDeadlock
from tests.plan.plans import PUBLISHED, drop_arrives, event_code, published, trips

ONE, PAIR = PUBLISHED["one CTA"], PUBLISHED["pair"]


def columns(plan: PipelinePlan) -> dict[str, tuple[int, int]]:
    """Buffer -> [start, stop) in tensor memory."""
    return {b.name: (b.start, b.stop) for b in plan.buffers if b.space == "tmem"}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (ONE, {"s": (0, 128), "p": (0, 64), "dv": (128, 256), "dp": (256, 384),
               "ds_t": (256, 320), "dq": (256, 384), "dk": (384, 512)}),
        (PUBLISHED["head dim 64"], {"s": (0, 128), "p": (0, 64), "dv": (128, 192),
                                   "dp": (192, 320), "ds_t": (192, 256), "dq": (192, 256),
                                   "dk": (320, 384)}),
        (PAIR, {"s": (0, 128), "p": (0, 64), "dq": (64, 128), "dv": (128, 256),
                "dp": (256, 384), "ds_t": (256, 320), "dk": (384, 512)}),
    ],
)  # fmt: skip
def test_tensor_memory(plan: PipelinePlan, expected: dict) -> None:
    """P over S, dS over dP, dQ over dP in one CTA and over half of S in a pair."""
    assert columns(plan) == expected


@pytest.mark.parametrize(("plan", "theirs"), [(ONE, 232448), (PAIR, 231424)])
def test_shared_memory(plan: PipelinePlan, theirs: int) -> None:
    """224 KiB of tiles as in flash_attn.cute; 704 bytes less for barriers and alignment."""
    tiles = sum(
        b.size * b.stages
        for b in plan.buffers
        if b.space == "smem" and b.name not in ("row_stats", "barriers")
    )
    assert tiles == 224 * 1024
    assert theirs - plan.bytes_used("smem") == 704


@pytest.mark.parametrize(
    ("choices", "registers"),
    [
        ({}, (152, 136, 88)),
        ({"causal": True}, (136, 144, 88)),
        ({"causal": True, "deterministic": True}, (152, 136, 88)),
        ({"cta_group": 2}, (136, 136, 104)),
        ({"cta_group": 2, "causal": True}, (136, 136, 104)),
    ],
)
def test_registers(choices: dict, registers: tuple[int, int, int]) -> None:
    """Reduce, compute, and the load and MMA warps."""
    plan = published(**choices)
    assert tuple(plan.role(name).registers for name in ("reduce", "compute", "mma")) == registers


@pytest.mark.parametrize(("plan", "group"), [(ONE, 1), (PAIR, 2)])
def test_arrive_counts(plan: PipelinePlan, group: int) -> None:
    """One arrival per warp of compute and reduce, of both CTAs where the leader waits."""
    counts = {signal.name: signal.arrive_count for signal in plan.signals}
    assert counts["p_full"] == counts["ds_full"] == 8 * group
    assert counts["dq_empty"] == 4 * group
    assert counts["row_stats_empty"] == 8
    assert {
        counts[n] for n in ("q_full", "q_empty", "do_full", "s_full", "dp_full", "dq_full")
    } == {1}


@pytest.mark.parametrize(("plan", "extra"), [(ONE, 32768), (PAIR, 131072)])
def test_first_loads_carry_keys_and_values(plan: PipelinePlan, extra: int) -> None:
    """K comes with the first Q (twice in each CTA of a pair), V with the first dO."""
    assert plan.signal("q_full").tx_bytes == 32768
    assert plan.signal("q_full").first_tx_bytes == extra
    assert plan.signal("do_full").first_tx_bytes == 32768 * plan.cta_group


def products(plan: PipelinePlan, count: int) -> str:
    """Names of the products in the order in which they are issued."""
    steps = unroll(plan.role("mma").program, dict.fromkeys(plan.trips, count))
    return " ".join(s.what for s in steps if isinstance(s, Work) and isinstance(s.amount, Mma))


def test_issue_order() -> None:
    """The orders that the shared regions of tensor memory allow."""
    assert products(ONE, 1) == products(PAIR, 1) == "S dP dV dK dQ"
    assert products(ONE, 2) == "S dP dV S dK dQ dP dV dK dQ"
    assert products(PAIR, 2) == "S dP dV S dK dP dQ dV dK dQ"


def test_dq_and_s_take_turns_in_a_pair() -> None:
    """dQ is issued only when the S under it was read, an S only when the dQ under it is drained."""
    steps = list(unroll(PAIR.role("mma").program, dict.fromkeys(PAIR.trips, 4)))
    read = drained = scores = gradients = 0
    for step in steps:
        read += step == Wait("s_read")
        drained += step == Wait("dq_empty")
        if isinstance(step, Work) and step.what == "S":
            scores += 1
            assert drained > gradients - 1  # the first wait is free
        elif isinstance(step, Work) and step.what == "dQ":
            gradients += 1
            assert read == scores
    assert Arrive("dq_full", after="tensor") in steps


@pytest.mark.parametrize(
    ("choices", "slices"),
    [
        ({}, (32, 2, 4)),
        ({"head_dim": 64}, (32, 2, 2)),
        ({"head_dim": 16}, (16, 2, 1)),
        ({"head_dim": 48}, (16, 2, 3)),
        ({"cta_group": 2}, (8, 4, 8)),
        ({"cta_group": 2, "deterministic": True}, (16, 2, 4)),
        ({"cta_group": 2, "head_dim": 48, "deterministic": True}, (8, 2, 3)),
    ],
)
def test_dq_leaves_whole(choices: dict, slices: tuple[int, int, int]) -> None:
    """The slices of dQ (columns, buffers, slices per tile) cover all of its columns."""
    plan, (cols, stages, count) = published(**choices), slices
    staging = plan.buffer("dq_staging")
    assert (staging.size, staging.stages) == (128 * cols * 4, stages)
    steps = unroll(plan.role("reduce").program, dict.fromkeys(plan.trips, 1))
    assert sum(isinstance(s, Work) and s.what == "add dQ" for s in steps) == count
    assert cols * count == choices.get("head_dim", 128) // choices.get("cta_group", 1)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"head_dim": 192, "head_dim_v": 128}, "TMEM plan needs 576 columns: s 128 + dv 128 + "
                                               "dp 128 + dk 192; B200 has 512"),
        ({"head_dim": 144, "head_dim_v": 16}, "head_dim must be at most 128: dQ lies over a tile "
                                              "of S or dP; got 144"),
    ],
)  # fmt: skip
def test_what_does_not_fit(choices: dict, message: str) -> None:
    """The sum is spelled out."""
    with pytest.raises(ValueError) as raised:
        published(**choices)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_arrive_is_needed(name: str) -> None:
    """Without any one role's arrives on a signal, two work tiles end in a deadlock that says so."""
    plan, tiles = PUBLISHED[name], trips(3, 3)
    engine.execute(event_code(plan), tiles)
    for signal in plan.signals:
        for role in signal.arrivals:
            with pytest.raises(PipelineDeadlock) as raised:
                engine.execute(event_code(drop_arrives(plan, role, signal.name)), tiles)
            assert any(f"{waiter} waits on {signal.name} phase " in str(raised.value)
                       for waiter in signal.waiters)  # fmt: skip
            assert f" for {role}" in str(raised.value)


def test_a_deadlock_names_the_cycle() -> None:
    """Roles, signals and phases, and who waits for whom in a circle."""
    with pytest.raises(PipelineDeadlock) as raised:
        engine.execute(event_code(drop_arrives(PAIR, "compute", "ds_peer")), trips(2, 2))
    assert "mma waits on ds_peer phase 0 for compute" in str(raised.value)
    assert "cycle: " in str(raised.value)
    assert "mma -(ds_peer)-> compute" in str(raised.value)


def test_two_slots_hide_a_missing_release() -> None:
    """Two tiles of one query tile fill two slots: their release is never waited for."""
    for role, signal in (("mma", "q_empty"), ("compute", "row_stats_empty")):
        assert ONE.signal(signal).stages == 2
        engine.execute(event_code(drop_arrives(ONE, role, signal)), trips(1, 1))


@settings(max_examples=40)
@given(
    st.builds(
        BackwardPipeline,
        head_dim=st.integers(1, 10).map(lambda x: 16 * x),
        head_dim_v=st.none() | st.integers(1, 10).map(lambda x: 16 * x),
        causal=st.booleans(),
        numerics=st.builds(BackwardConfig, cta_group=st.integers(1, 2)),
        deterministic=st.booleans(),
        published=st.just(True),
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_every_plan_that_builds_is_sound_and_runs(
    pipeline: BackwardPipeline, totals: list[int], masked: int
) -> None:
    """It passes the checks, ends, and both engines agree on every event."""
    try:
        plan = backward_plan(pipeline, B200)
    except ValueError as error:
        assert "needs" in str(error) or "at most 128" in str(error)
        assume(False)
    assert check_plan(plan, B200) == []
    code, tiles = event_code(plan), trips(*totals, masked=masked)
    compiled, readable = engine.execute(code, tiles, log=True), engine_python.execute(code, tiles)
    assert compiled.end == readable.end > 0
    assert np.array_equal(compiled.log, readable.log)
