"""What the first work tile waits for: by hand, and by what a prediction gains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import ForwardPipeline, Problem, WarpgroupPipeline
from fa4.designs import plan_of
from fa4.designs.hopper_forward import choose
from fa4.hardware import B200, H200
from fa4.plan.warpgroup_packing import query_bytes
from fa4.sim.first_round import first_round_cycles
from fa4.sim.machine import Machine, find_machine
from fa4.sim.predict import predict

MACHINE = find_machine("h200")
KIB = 1024


def with_costs(**changed: float) -> Machine:
    return replace(MACHINE, costs=replace(MACHINE.costs, **changed))


def late_of(problem: Problem, pipeline: WarpgroupPipeline) -> float:
    """Cycles that a prediction has for the first round."""
    of_none = with_costs(first_round_share=0.0)
    return predict(problem, pipeline, MACHINE).cycles - predict(problem, pipeline, of_none).cycles


def test_by_hand() -> None:
    """64 KiB of each of 132 CTAs at 0.61 of HBM's 19.5 bytes per cycle, not what L2 gives."""
    pipeline = WarpgroupPipeline(head_dim=256, tile_n=80)
    plan, costs = plan_of(pipeline, H200), MACHINE.costs
    rate = costs.hbm_efficiency * H200.hbm_bytes_per_s / H200.clock_hz / costs.sustained_clock
    hbm = costs.hbm_latency_cycles + 64 * KIB / (0.61 * rate / 132)
    # Two loads of 32 KiB, simulated as cold ones: the second has to wait for HBM's queue only once.
    l2 = H200.l2_bytes_per_s / H200.clock_hz / costs.sustained_clock / 132
    queue = costs.hbm_queue_share * 32 * KIB / (rate / 132)
    simulated = costs.tma_load_latency_cycles + costs.hbm_latency_cycles + queue + 64 * KIB / l2
    found = first_round_cycles(plan, MACHINE, 132, 132 * 64 * KIB)
    assert found == pytest.approx(hbm - simulated) and 1000 < found < 3000


@given(st.integers(1, 400), st.sampled_from((64, 104, 128, 192)), st.booleans(), st.integers(0, 64))
def test_fewer_ctas_and_fewer_rows_wait_less(
    ctas: int, head_dim: int, ahead: bool, kib: int
) -> None:
    """CTAs of whole tiles share HBM; more than there are SMs begin no sooner."""
    pipeline = WarpgroupPipeline(head_dim=head_dim, tile_n=64, ahead=ahead, ping_pong=False)
    plan, whole = plan_of(pipeline, H200), query_bytes(pipeline)[1]

    def late(count: int, size: int = whole) -> float:
        return first_round_cycles(plan, MACHINE, count, count * size)

    assert 0.0 <= late(ctas) <= late(ctas + 40)
    assert late(132 + ctas) == pytest.approx(late(132))
    assert late(ctas, kib * KIB) <= late(ctas, (kib + 1) * KIB)


@pytest.mark.parametrize("seqlen_k", [4096, 100_000])
def test_rows_that_a_call_does_not_have_are_not_waited_for(seqlen_k: int) -> None:
    """One query of each head is in tiles of 64 rows and more, in parts of the keys too."""
    problem = Problem(batch=8, seqlen_q=1, seqlen_k=seqlen_k, heads_q=16, heads_k=4, head_dim=128)
    pipeline = choose(problem, H200)
    assert pipeline.num_splits > 1 and pipeline.block_rows >= 64
    assert late_of(problem, pipeline) == pytest.approx(0.0, abs=300)


@pytest.mark.parametrize("batch", [8, 64])
def test_it_is_added_once(batch: int) -> None:
    """To a call of one work tile for each SM as to one of several."""
    problem = Problem(batch=batch, seqlen_q=512, seqlen_k=512, heads_q=4, heads_k=4, head_dim=64)
    pipeline = WarpgroupPipeline(head_dim=64, tile_n=64)
    num_bytes = batch * 512 * 4 * 64 * 2
    late = first_round_cycles(plan_of(pipeline, H200), MACHINE, 16 * batch, num_bytes)
    assert late_of(problem, pipeline) == pytest.approx(late) and late > 400


def test_not_where_it_is_not_known() -> None:
    plan = plan_of(ForwardPipeline(head_dim=128), B200)
    assert first_round_cycles(plan, find_machine("b200"), 148, 1 << 24) == 0.0
    none = Problem(batch=0, seqlen_q=512, seqlen_k=512, heads_q=4, heads_k=4, head_dim=64)
    assert predict(none, WarpgroupPipeline(head_dim=64), MACHINE).cycles == 0.0
