"""FlashAttention-4's forward plan: its known numbers; it runs, and needs every arrive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.config import ForwardConfig, ForwardPipeline
from fa4.hardware import B200, H100
from fa4.plan import PipelinePlan, check_plan, forward_plan
from fa4.sim import engine, engine_python
from fa4.sim.code import PipelineDeadlock
from tests.plan.plans import FORWARD, drop_arrives, event_code, forward, trips

SMEM_BYTES = 232448  # of a CTA on B200: 227 KiB

# Slots of the K/V ring, as flash_attn.cute computes them.
KV_STAGES = [
    ({"head_dim": 16}, 32),  # the cap
    ({"head_dim": 32}, 24),
    ({"head_dim": 64}, 10),
    ({"head_dim": 80}, 7),
    ({"head_dim": 96}, 5),
    ({"head_dim": 128}, 3),
    ({"head_dim": 128, "cta_group": 2}, 6),
    ({"head_dim": 64, "head_dim_v": 128}, 4),
    ({"head_dim": 192, "head_dim_v": 128}, 3),
    ({"head_dim": 192, "head_dim_v": 128, "cta_group": 2}, 5),
    ({"head_dim": 64, "q_tiles": 1}, 12),
    ({"head_dim": 128, "q_tiles": 1}, 5),
    ({"head_dim": 64, "element_bytes": 1}, 22),
    ({"head_dim": 128, "element_bytes": 1}, 8),
    ({"head_dim": 128, "element_bytes": 1, "cta_group": 2}, 16),
]


@pytest.mark.parametrize(("choices", "stages"), KV_STAGES)
def test_kv_stages(choices: dict, stages: int) -> None:
    """As many K/V slots as flash_attn.cute has, and they fit."""
    plan = forward(**choices)
    assert plan.buffer("kv").stages == plan.signal("kv_full").stages == stages
    assert plan.bytes_used("smem") <= SMEM_BYTES


def test_uneven_ring() -> None:
    """(192, 128): three slots of alternating size in the space of 2.67 large ones."""
    plan = forward(head_dim=192, head_dim_v=128)
    ring, tail = plan.buffer("kv"), plan.buffer("kv_tail")
    assert ring.size == 160 * 128 * 2
    assert tail.start == ring.stop and tail.size == 32 * 128 * 2
    assert ring.size * 3 + tail.size == (192 + 128 + 192) * 128 * 2
    assert (
        forward(head_dim=192, head_dim_v=128, q_tiles=1, tile_n=64).buffer("kv").size == 192 * 128
    )


def columns(plan: PipelinePlan) -> dict[str, tuple[int, int]]:
    """Buffer -> [start, stop) in tensor memory."""
    return {b.name: (b.start, b.stop) for b in plan.buffers if b.space == "tmem"}


@pytest.mark.parametrize("dv", [64, 128])
def test_tensor_memory(dv: int) -> None:
    """S0 S1 O0 O1 side by side, P_i in the upper half of its S_i."""
    assert columns(forward(head_dim=dv)) == {
        "s0": (0, 128), "s1": (128, 256), "o0": (256, 256 + dv), "o1": (256 + dv, 256 + 2 * dv),
        "p0": (64, 128), "p1": (192, 256),
    }  # fmt: skip


def test_tensor_memory_of_fp8() -> None:
    """P of 8-bit elements needs 32 columns."""
    assert columns(forward(element_bytes=1))["p1"] == (224, 256)


@pytest.mark.parametrize("group", [1, 2])
def test_arrive_counts(group: int) -> None:
    """The counts that the barriers are initialised with."""
    plan = forward(cta_group=group)
    counts = {signal.name: signal.arrive_count for signal in plan.signals}
    one_each = ("kv_full", "kv_empty", "q1_full", "q1_empty", "s1_full", "o1_full")
    assert {counts[name] for name in one_each} == {1}
    assert counts["p1_full_o1_scaled"] == 256 * group
    assert counts["p1_last"] == 4 * group
    assert counts["stats1_full"] == counts["stats1_empty"] == counts["epi1_full"] == 128
    assert counts["epi1_empty"] == 32
    assert plan.signal("q0_full").tx_bytes == 128 * 128 * 2 * group
    assert plan.signal("kv_full").tx_bytes == 128 * 128 * 2


@pytest.mark.parametrize(
    ("choices", "registers"),
    [
        ({"head_dim": 64}, (200, 64, 48)),
        ({"head_dim": 64, "element_bytes": 1}, (168, 96, 80)),
        ({"head_dim": 128}, (184, 80, 64)),
        ({"head_dim": 128, "causal": True}, (184, 80, 64)),
        ({"head_dim": 128, "cta_group": 2}, (184, 80, 64)),
        ({"head_dim": 128, "cta_group": 2, "element_bytes": 1}, (160, 72, 120)),
        ({"head_dim": 192, "head_dim_v": 128, "cta_group": 2}, (184, 80, 64)),
        ({"head_dim": 192, "head_dim_v": 128, "causal": True}, (184, 80, 64)),
    ],
)
def test_registers(choices: dict, registers: tuple[int, int, int]) -> None:
    """Softmax, correction and other warps, from the tuning table."""
    plan = forward(**choices)
    assert (
        tuple(plan.role(name).registers for name in ("softmax0", "correction", "mma")) == registers
    )


def test_warps() -> None:
    """Two softmax groups, correction, then one warp each for products, stores and loads."""
    warps = {role.name: (role.warps[0], len(role.warps)) for role in forward().roles}
    assert warps == {"softmax0": (0, 4), "softmax1": (4, 4), "correction": (8, 4), "mma": (12, 1),
                     "epilogue": (13, 1), "load": (14, 1)}  # fmt: skip
    assert (forward().warps, forward().idle_warps) == (16, {15: 64})
    single = forward(q_tiles=1)
    assert single.idle_warps == {4: 24, 5: 24, 6: 24, 7: 24, 15: 64}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"head_dim_v": 192}, "TMEM plan needs 640 columns: s0 128 + s1 128 + o0 192 + o1 192; "
                              "B200 has 512"),
        ({"kv_stages": 4}, "shared memory plan needs 264512 bytes: q 2x32768 + o 2x32768 + "
                           "kv 4x32768 + row_stats 2048 + barriers 320; B200 has 232448"),
        ({"tile_n": 48}, "tile_n must be a multiple of 32; got 48"),
    ],
)  # fmt: skip
def test_what_does_not_fit(choices: dict, message: str) -> None:
    """The sum is spelled out."""
    with pytest.raises(ValueError) as raised:
        forward(**choices)
    assert str(raised.value) == message


def test_other_refusals() -> None:
    """No plan without tensor memory, none for other than 128 rows."""
    with pytest.raises(ValueError, match="needs tensor memory; H100 has none"):
        forward_plan(ForwardPipeline(), H100)
    with pytest.raises(ValueError, match=r"tile_m must be 128.*got 64"):
        forward_plan(ForwardPipeline(numerics=ForwardConfig(tile_m=64)), B200)


@pytest.mark.parametrize("dv", [16, 48, 56, 64, 128])
def test_a_narrow_output_has_a_place_of_its_own(dv: int) -> None:
    """Only an O of 64 columns or more takes the place of wide Q tiles, as in flash-attn-4."""
    plan = forward(head_dim=192, head_dim_v=dv)
    places = {buffer.name: buffer.start for buffer in plan.buffers}
    assert (places["o"] == places["q"]) == (dv >= 64)


def test_output_in_the_place_of_queries() -> None:
    """With wide Q tiles, the next Q is loaded only when O has left."""
    plan = FORWARD["wide pair"]
    assert plan.buffer("o").start == plan.buffer("q").start
    assert plan.signal("o_stored").waiters == ("load",)
    assert "o_stored" not in {signal.name for signal in FORWARD["one CTA"].signals}


def arrivals(plan: PipelinePlan) -> list[tuple[str, str]]:
    """Every (role, signal) with an arrive."""
    return [(role, signal.name) for signal in plan.signals for role in signal.arrivals]


@pytest.mark.parametrize("name", FORWARD)
def test_every_arrive_is_needed(name: str) -> None:
    """Without any one role's arrives on a signal, two work tiles end in a deadlock that says so."""
    plan, tiles = FORWARD[name], trips(9, 9)
    engine.execute(event_code(plan), tiles)
    for role, signal in arrivals(plan):
        with pytest.raises(PipelineDeadlock) as raised:
            engine.execute(event_code(drop_arrives(plan, role, signal)), tiles)
        text = str(raised.value)
        assert any(f"{waiter} waits on {signal} phase " in text
                   for waiter in plan.signal(signal).waiters)  # fmt: skip
        assert f" for {role}" in text or f" and {role}" in text


def test_a_deadlock_names_the_cycle() -> None:
    """Roles, signals and phases, and who waits for whom in a circle."""
    plan = drop_arrives(FORWARD["one CTA"], "correction", "stats0_empty")
    with pytest.raises(PipelineDeadlock) as raised:
        engine.execute(event_code(plan), trips(3, 3))
    text = str(raised.value)
    assert "softmax0 waits on stats0_empty phase 0 for correction" in text
    assert text.endswith("cycle: softmax0 -(stats0_empty)-> correction -(stats0_full)-> softmax0")


@pytest.mark.parametrize(("kib", "stages"), [(327, 12), (227, 6), (170, 2)])
def test_shared_memory_of_a_cta_decides_the_ring(kib: int, stages: int) -> None:
    """What if it had more, or less: slots come and go, and nothing is refused that fits."""
    gpu = replace(B200, smem_bytes_per_cta=1024 * kib, smem_bytes_per_sm=1024 * (kib + 1))
    plan = forward_plan(ForwardPipeline(cta_group=2), gpu)
    assert plan.buffer("kv").stages == plan.signal("kv_full").stages == stages
    assert plan.bytes_used("smem") <= 1024 * kib
    assert check_plan(plan, gpu) == []


@pytest.mark.parametrize("name", ["pair", "one Q tile", "wide pair"])
def test_a_deep_ring_hides_a_missing_release(name: str) -> None:
    """Two tiles of one KV tile fill four slots: in a deeper ring no release is ever waited for."""
    plan, tiles = FORWARD[name], trips(1, 1)
    assert plan.buffer("kv").stages > 4
    for role, signal in arrivals(plan):
        if (role, signal) == ("mma", "kv_empty"):
            engine.execute(event_code(drop_arrives(plan, role, signal)), tiles)
            continue
        with pytest.raises(PipelineDeadlock):
            engine.execute(event_code(drop_arrives(plan, role, signal)), tiles)


@st.composite
def pipelines(draw: st.DrawFn) -> ForwardPipeline:
    """Any forward pipeline."""
    numerics = ForwardConfig(
        tile_n=draw(st.sampled_from([32, 64, 96, 128, 160])), q_tiles=draw(st.integers(1, 2))
    )
    return ForwardPipeline(
        head_dim=8 * draw(st.integers(1, 32)),
        head_dim_v=draw(st.none() | st.integers(1, 32).map(lambda x: 8 * x)),
        element_bytes=draw(st.sampled_from([1, 2])),
        causal=draw(st.booleans()),
        numerics=numerics,
        cta_group=draw(st.integers(1, 2)),
        kv_stages=draw(st.none() | st.integers(2, 8)),
        ping_pong=draw(st.booleans()),
        correction=draw(st.sampled_from(["warpgroup", "inline"])),
        p_space=draw(st.sampled_from(["tmem", "smem"])),
        split_p=draw(st.floats(0.01, 1.0)),
    )


@settings(max_examples=60)
@given(pipelines(), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 5))
def test_every_plan_that_builds_is_sound_and_runs(
    pipeline: ForwardPipeline, totals: list[int], masked: int
) -> None:
    """It passes the checks, ends, and both engines agree on every event."""
    try:
        plan = forward_plan(pipeline, B200)
    except ValueError as error:
        assert "needs" in str(error)
        assume(False)
    assert check_plan(plan, B200) == []
    code, tiles = event_code(plan), trips(*totals, masked=masked)
    compiled, readable = engine.execute(code, tiles, log=True), engine_python.execute(code, tiles)
    assert compiled.end == readable.end > 0
    assert np.array_equal(compiled.log, readable.log)
