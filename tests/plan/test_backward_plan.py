"""This package's backward plans: memory, counts, orders; they run, and need every arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.config import BackwardConfig, BackwardPipeline
from fa4.hardware import B200, H200
from fa4.plan import PipelinePlan, backward_plan, check_plan
from fa4.plan.schema import Sync, TmemAccess, Wait, Work, unroll, walk
from fa4.sim import engine, engine_python
from fa4.sim.code import PipelineDeadlock
from tests.plan.plans import BACKWARD, backward, drop_arrives, event_code, trips
from tests.plan.test_published_plan import columns, products

ONE, PAIR, WIDE = BACKWARD["one CTA"], BACKWARD["pair"], BACKWARD["wide pair"]
KIB = 1024


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (ONE, {"s": (0, 128), "p0": (0, 32), "p1": (64, 96), "dp": (128, 256), "ds0": (128, 160),
               "ds1": (192, 224), "dq": (128, 256), "dv": (256, 384), "dk": (384, 512)}),
        (BACKWARD["head dim 64"], {"s": (0, 128), "p0": (0, 32), "p1": (64, 96),
                                   "dp": (128, 256), "ds0": (128, 160), "ds1": (192, 224),
                                   "dv": (256, 320), "dk": (320, 384), "dq": (384, 448)}),
        (PAIR, {"s": (0, 128), "p0": (0, 32), "p1": (32, 64), "dq": (64, 128), "dp": (128, 256),
                "ds0": (128, 160), "ds1": (160, 192), "dv": (256, 384), "dk": (384, 512)}),
        (WIDE, {"dv": (0, 128), "dk": (128, 320), "s": (320, 448), "p0": (320, 352),
                "p1": (352, 384), "dp": (384, 512), "ds0": (384, 416), "ds1": (416, 448),
                "dq": (416, 512)}),
    ],
)  # fmt: skip
def test_tensor_memory(plan: PipelinePlan, expected: dict) -> None:
    """P over S, dS over dP; dQ over dP, over half of S in a pair, or apart where there is room."""
    assert columns(plan) == expected


@pytest.mark.parametrize(
    ("head_dim", "cols", "over"),
    [(16, 304, False), (64, 448, False), (80, 496, False), (96, 448, True), (128, 512, True)],
)
def test_dq_lies_apart_where_there_is_room(head_dim: int, cols: int, over: bool) -> None:
    """S, dP, dV, dK and dQ of up to 85 columns fit beside each other."""
    plan = backward(head_dim=head_dim)
    assert plan.bytes_used("tmem") == cols
    assert ("dp" in plan.buffer("dq").overlaps) is over


@pytest.mark.parametrize(
    ("choices", "kib"),
    [
        # Q twice, K, V, dO, dS, two slices of dQ
        ({}, (64, 32, 32, 32, 32, 32)),
        ({"head_dim": 64}, (32, 16, 16, 16, 32, 32)),
        # Q, K, V, dO, Q and dO by columns, K by columns of both, dS, two slices of dQ
        ({"cta_group": 2}, (16, 32, 32, 16, 16, 16, 32, 32, 32)),
        # Q, dO, K, V, K by columns, dS, two slices of dQ; Q and dO by columns in their places
        ({"cta_group": 2, "head_dim": 192, "head_dim_v": 128}, (24, 16, 48, 32, 48, 32, 16)),
    ],
)
def test_shared_memory(choices: dict, kib: tuple[int, ...]) -> None:
    """Tiles one behind the other, two stages of statistics, the barriers; nothing between."""
    plan = backward(**choices)
    smem = [b for b in plan.buffers if b.space == "smem" and not b.overlaps]
    assert tuple(b.size * b.stages // KIB for b in smem[:-2]) == kib
    assert (smem[-2].name, smem[-2].size, smem[-2].stages) == ("row_stats", 2 * 128 * 4, 2)
    assert plan.bytes_used("smem") == sum(kib) * KIB + 2 * KIB + smem[-1].size


def test_registers() -> None:
    """All of the register file, whatever the variant."""
    for plan in BACKWARD.values():
        counts = {role.name: role.registers for role in plan.roles}
        mains = counts.pop("compute"), counts.pop("reduce")
        (others,) = set(counts.values())
        assert (*mains, others) in ((144, 144, 80), (152, 112, 96))
        assert B200.registers_per_sm == 128 * (2 * mains[0] + mains[1] + others)


@pytest.mark.parametrize(("plan", "group"), [(ONE, 1), (PAIR, 2)])
def test_arrive_counts(plan: PipelinePlan, group: int) -> None:
    """One arrival per warp of compute and reduce, of both CTAs where the leader waits."""
    counts = {signal.name: signal.arrive_count for signal in plan.signals}
    assert counts["p_full"] == counts["ds_full"] == 8 * group
    assert counts["dq_empty"] == 4 * group
    assert counts["row_stats_empty"] == 8
    remote = (counts.get("s_read"), counts.get("ds_relayed"))
    assert remote == ((16, 2) if group == 2 else (None, None))
    assert {counts[n] for n in ("q_full", "q_empty", "do_full", "s_full", "dp_full", "dq_full",
                                "dv_full", "dk_full")} == {1}  # fmt: skip


def test_first_loads_carry_keys_and_values() -> None:
    """K comes with the first Q and V with the first dO; in a pair K again, by columns."""
    extra = {name: 32768 for name in ("q_full", "do_full")}
    first = {s.name: s.first_tx_bytes for s in ONE.signals if s.first_tx_bytes}
    assert first == extra
    first = {s.name: s.first_tx_bytes for s in PAIR.signals if s.first_tx_bytes}
    assert first == {name: 65536 for name in (*extra, "q_t_full")}
    assert PAIR.signal("q_full").tx_bytes == 32768  # of both CTAs, half each


def test_stores_fill_their_columns() -> None:
    """Each warpgroup writes its half of P and of dS, as many columns as the half has."""
    for plan in BACKWARD.values():
        steps = [s for s in walk(plan.role("compute").program) if isinstance(s, Work)]
        stores = [s for s in steps if isinstance(s.amount, TmemAccess) and s.writes]
        assert {name for s in stores for name in s.writes} == {"p0", "p1", "ds0", "ds1"}
        for step in stores:
            assert {plan.buffer(name).size for name in step.writes} == {step.amount.cols}


def test_issue_order() -> None:
    """The orders that the shared regions of tensor memory allow."""
    assert products(ONE, 1) == products(PAIR, 1) == "S dP dV dK dQ"
    assert products(ONE, 2) == "S dP dV S dK dQ dP dV dK dQ"
    assert products(PAIR, 2) == "S dP dV S dK dP dQ dV dK dQ"
    assert products(WIDE, 2) == "S dP dK dV dQ S dP dK dV dQ"


def test_no_barrier_among_compute_warps_per_tile() -> None:
    """They meet twice at the end, before dV and dK are stored."""
    for plan in BACKWARD.values():
        steps = list(walk(plan.role("compute").program))
        met = [i for i, s in enumerate(steps) if isinstance(s, Work) and isinstance(s.amount, Sync)]
        assert len(met) == 2 and min(met) > steps.index(Wait("dv_full"))


@pytest.mark.parametrize(
    ("choices", "cols", "count"),
    [({}, 32, 4), ({"head_dim": 64}, 32, 2), ({"head_dim": 16}, 16, 1), ({"head_dim": 48}, 16, 3),
     ({"cta_group": 2, "head_dim": 192, "head_dim_v": 128}, 16, 6),
     ({"cta_group": 2}, 32, 2), ({"cta_group": 2, "deterministic": True}, 32, 2)],
)  # fmt: skip
def test_dq_leaves_whole(choices: dict, cols: int, count: int) -> None:
    """The slices of dQ cover all of its columns; two of them are on the way at a time."""
    plan = backward(**choices)
    staging = plan.buffer("dq_staging")
    assert (staging.size, staging.stages) == (128 * cols * 4, 2)
    assert plan.signal("dq_slot_empty").free == 2
    steps = unroll(plan.role("reduce").program, dict.fromkeys(plan.trips, 1))
    assert sum(isinstance(s, Work) and s.what == "add dQ" for s in steps) == count
    assert cols * count == choices.get("head_dim", 128) // choices.get("cta_group", 1)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"head_dim_v": 144}, "TMEM plan needs 528 columns: s 128 + dp 128 + dv 144 + dk 128; "
                              "B200 has 512"),
        ({"head_dim": 144, "head_dim_v": 16}, "head_dim must be at most 128: dQ lies over a tile "
                                              "of dP; got 144"),
        ({"head_dim": 192, "head_dim_v": 128}, "head_dim must be at most 128: dQ lies over a tile "
                                               "of dP; got 192"),
        ({"cta_group": 2, "head_dim": 64}, "a pair's head_dim and head_dim_v must be 128: dQ lies "
                                           "over half of S; got 64 and 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit(choices: dict, message: str) -> None:
    """The sum is spelled out."""
    with pytest.raises(ValueError) as raised:
        backward(**choices)
    assert str(raised.value) == message


def test_other_refusals() -> None:
    """No plan without tensor memory, none for other tiles, no other order."""
    for published in (False, True):
        with pytest.raises(ValueError, match="needs tensor memory; H200 has none"):
            backward_plan(BackwardPipeline(published=published), H200)
        with pytest.raises(ValueError, match=r"must be 128 x 128.*got 128 x 64"):
            numerics = BackwardConfig(tile_n=64)
            backward_plan(BackwardPipeline(numerics=numerics, published=published), B200)
    with pytest.raises(ValueError, match=r"scheduler must be one of naive, lpt, spt; got 'x'"):
        BackwardPipeline(scheduler="x")


@pytest.mark.parametrize("name", BACKWARD)
def test_every_arrive_is_needed(name: str) -> None:
    """Without any one role's arrives on a signal, two work tiles end in a deadlock that says so."""
    plan, tiles = BACKWARD[name], trips(3, 3)
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
    assert "relay waits on ds_peer phase 0 for compute" in str(raised.value)
    assert "cycle: " in str(raised.value)
    assert "mma -(ds_relayed)-> relay" in str(raised.value)


@settings(max_examples=40)
@given(
    st.builds(
        BackwardPipeline,
        head_dim=st.integers(1, 10).map(lambda x: 16 * x),
        head_dim_v=st.none() | st.integers(1, 10).map(lambda x: 16 * x),
        causal=st.booleans(),
        numerics=st.builds(BackwardConfig, cta_group=st.integers(1, 2)),
        deterministic=st.booleans(),
    )
    | st.builds(
        BackwardPipeline,
        head_dim=st.sampled_from((128, 192)),
        head_dim_v=st.just(128),
        causal=st.booleans(),
        numerics=st.just(BackwardConfig(cta_group=2)),
        deterministic=st.booleans(),
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
        assert "needs" in str(error) or "must be" in str(error)
        assume(False)
    assert check_plan(plan, B200) == []
    code, tiles = event_code(plan), trips(*totals, masked=masked)
    compiled, readable = engine.execute(code, tiles, log=True), engine_python.execute(code, tiles)
    assert compiled.end == readable.end > 0
    assert np.array_equal(compiled.log, readable.log)
