"""Predictions of whole calls: bounds, and how time has to move when the problem or machine does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import BackwardConfig, BackwardPipeline, ForwardConfig, ForwardPipeline, Problem
from fa4.designs.tiles import Lengths
from fa4.plan.counted_math import PIPES, loop_math, with_measured_math
from fa4.plan.forward import forward_plan
from fa4.plan.schema import Math
from fa4.sim.machine import Machine, find_machine
from fa4.sim.options import build
from fa4.sim.predict import Prediction, Simulation, predict
from fa4.sim.roofline import problem_roofline, roofline_terms
from tests.sim.choices import default_backward, default_forward

FEW = settings(max_examples=40)
B200 = find_machine("b200")


def problem(seqlen: int, **changes: object) -> Problem:
    """A bf16 call of head dim 128 with 32k tokens in all, or one sequence."""
    sizes: dict[str, object] = {
        "batch": max(1, 32768 // max(1, seqlen)),
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "heads_q": 16,
        "heads_k": 16,
        "head_dim": 128,
    }
    return Problem(**(sizes | changes))  # type: ignore[arg-type]


def forward(call: Problem, machine: Machine = B200, **options: object) -> Prediction:
    """The forward kernel that FlashAttention-4 would choose."""
    return predict(call, default_forward(call, machine.gpu), machine, Simulation(**options))  # type: ignore[arg-type]


def backward(call: Problem, machine: Machine = B200, deterministic: bool = False) -> Prediction:
    """The backward kernels that FlashAttention-4 would choose."""
    return predict(call, default_backward(call, deterministic=deterministic), machine)


calls = st.builds(
    lambda batch, q, k, heads, dim, causal: Problem(
        batch=batch, seqlen_q=q, seqlen_k=k, heads_q=heads[0], heads_k=heads[1], head_dim=dim,
        causal=causal,
    ),
    st.integers(1, 4),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from(((1, 1), (8, 8), (8, 2), (5, 1))),
    st.sampled_from((64, 128)),
    st.booleans(),
)  # fmt: skip


def check_shares(prediction: Prediction) -> None:
    """Shares are shares, and nothing is faster than its bound."""
    assert 0.0 < prediction.bound_seconds <= prediction.seconds
    assert all(-1e-12 <= busy <= 1.0 + 1e-9 for busy in prediction.unit_busy.values())
    assert 0.0 <= prediction.imbalance < 1.0
    for stalls in prediction.role_stalls.values():
        assert 0.0 <= sum(stalls.values()) <= 1.0 + 1e-9
    assert prediction.seconds >= prediction.cycles / B200.clock_hz
    assert 0.0 < prediction.peak_share < 1.0
    assert prediction.bottleneck


@FEW
@given(calls)
def test_forward_predictions_keep_their_bounds(call: Problem) -> None:
    """Also the roofline of the whole call; every step equals the shortcut within 0.5%."""
    pipeline = default_forward(call, B200.gpu)
    quick, exact = (predict(call, pipeline, B200, Simulation(exact=e)) for e in (False, True))
    check_shares(quick)
    assert quick.cycles == pytest.approx(exact.cycles, rel=0.005)
    assert quick.seconds >= problem_roofline(call, pipeline, B200).seconds


@FEW
@given(calls, st.booleans())
def test_backward_predictions_keep_their_bounds(call: Problem, deterministic: bool) -> None:
    """The same for the three backward kernels; a fixed order of sums is never faster."""
    pipeline = default_backward(call, deterministic=deterministic)
    prediction = predict(call, pipeline, B200)
    check_shares(prediction)
    assert prediction.seconds >= problem_roofline(call, pipeline, B200).seconds
    assert [kernel.name for kernel in prediction.kernels] == [
        "preprocess", "backward", "postprocess",
    ]  # fmt: skip
    loose = predict(call, replace(pipeline, deterministic=False), B200)
    assert prediction.seconds >= loose.seconds * (1 - 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("run", [forward, backward])
def test_longer_takes_longer(run: object, causal: bool) -> None:
    """Time grows with length, and between doublings at long lengths about fourfold."""
    lengths = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    times = [
        run(problem(n, batch=4, causal=causal)).seconds  # type: ignore[operator]
        for n in lengths
    ]
    assert all(b > a for a, b in pairwise(times))
    assert 3.6 < times[-1] / times[-2] < 4.1


@FEW
@given(st.integers(2, 200), st.integers(2, 40), st.booleans())
def test_more_sms_are_not_slower(count: int, more: int, causal: bool) -> None:
    """A chip with more SMs, all else equal, but for what each has of L2 and HBM."""
    call = problem(4096, batch=2, causal=causal)
    slow, fast = (
        forward(call, replace(B200, gpu=replace(B200.gpu, sm_count=n))).cycles
        for n in (count, count + more)
    )
    assert fast <= slow * 1.01  # 0.5% by another queueing order was seen


@pytest.mark.parametrize("run", [forward, backward])
def test_causal_is_half_at_long_lengths(run: object) -> None:
    """Half the tiles, and those on the diagonal."""
    call = problem(32768)
    full, causal = (run(replace(call, causal=c)).seconds for c in (False, True))  # type: ignore[operator]
    assert 0.45 < causal / full < 0.55


def test_kv_heads_do_not_change_dense_work() -> None:
    """Packing query heads of a group: the same tiles, whoever owns K and V."""
    times = {forward(problem(8192, heads_k=heads)).cycles for heads in (16, 8, 4, 1)}
    assert len(times) == 1


def test_deterministic_backward_costs_what_is_reported() -> None:
    """75% (the paper's) to 90% (others') of the throughput without a fixed order of sums."""
    call = problem(8192)
    free, fixed = (
        predict(call, default_backward(call, deterministic=d, published=True), B200)
        for d in (False, True)
    )
    assert 0.75 <= free.seconds / fixed.seconds <= 0.90


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [8192, 32768])
def test_pairs_speed_up_backward(seqlen: int, causal: bool) -> None:
    """Two CTAs share operands: faster than one, by less than the rooflines' ratio of 1.24."""
    call = problem(seqlen, causal=causal)
    base = BackwardPipeline(causal=causal, published=True)
    one, pair = (
        predict(call, replace(base, numerics=BackwardConfig(cta_group=g)), B200) for g in (1, 2)
    )
    assert 1.0 < one.seconds / pair.seconds < 3328 / 2688


@pytest.mark.parametrize(
    ("without", "cta_group"),
    [
        ({"ping_pong": False}, 1),
        ({"split_p": 1.0}, 1),
        ({"p_space": "smem"}, 2),  # which fits only in a pair
        ({"numerics": ForwardConfig(q_tiles=1)}, 1),
    ],
)
def test_ideas_of_the_paper_help(without: dict[str, object], cta_group: int) -> None:
    """Taking one back costs time.

    A correction warpgroup is not among them: without rescales it only adds a barrier, and with them
    its gain is as small as what an unlucky order of requests costs.
    """
    call, simulation = problem(16384), Simulation(rescale_rate=0.0)
    full = ForwardPipeline(numerics=ForwardConfig.tuned("bf16", 128, False), cta_group=cta_group)
    lacking = replace(full, **without)  # type: ignore[arg-type]
    best, worse = (predict(call, p, B200, simulation).seconds for p in (full, lacking))
    assert worse > 1.02 * best


def test_fp8_products_take_half_the_time() -> None:
    """16384 FLOP per clock instead of 8192; the exponentials then bind."""
    from fa4.plan.forward import forward_plan

    terms = {}
    for size in (1, 2):
        plan = forward_plan(ForwardPipeline(element_bytes=size), B200.gpu)
        terms[size] = roofline_terms(plan, B200).totals
    statistics = 8  # cycles of float32 scales, of either type
    assert terms[1]["smem"] - statistics == (terms[2]["smem"] - statistics) / 2
    assert terms[1]["mufu"] == terms[2]["mufu"]
    assert terms[1]["tensor"] == terms[2]["tensor"] / 2
    eight, sixteen = (forward(problem(8192, dtype=dtype), rescale_rate=0.0).seconds
                      for dtype in ("e4m3", "bf16"))  # fmt: skip
    assert eight < sixteen


def test_faster_exponentials_help() -> None:
    """B300's exponential units are twice as fast."""
    call = problem(16384)
    plain = ForwardPipeline()
    fast = replace(B200, gpu=replace(B200.gpu, exp_per_clk=32))
    assert predict(call, plain, fast).cycles < predict(call, plain, B200).cycles


def test_equal_lengths_are_the_dense_problem() -> None:
    """Packed sequences of one length: the same tiles, cycles and FLOPs."""
    call = problem(2048, batch=3)
    packed = forward(call, lengths=(Lengths(2048, 2048),) * 3)
    dense = forward(call)
    assert (packed.cycles, packed.tflops) == (dense.cycles, dense.tflops)
    mixed = forward(call, lengths=(Lengths(4096, 2048), Lengths(2048, 2048)))
    assert mixed.work_tiles == dense.work_tiles


def test_nothing_to_do_is_only_a_launch() -> None:
    """No queries: no tiles, no cycles."""
    empty = forward(problem(128, seqlen_q=0))
    assert empty.work_tiles == 0 and empty.cycles == 0
    assert empty.seconds >= B200.costs.launch_ns * 1e-9


def test_head_dims_must_agree() -> None:
    """The error names both."""
    with pytest.raises(ValueError, match="got 128, 128 and 64, 64"):
        predict(problem(128), ForwardPipeline(head_dim=64), B200)


def test_prediction_is_the_same_twice() -> None:
    """No hidden state."""
    assert forward(problem(4096)) == forward(problem(4096))


def test_splitting_keys_pays_for_a_few_long_rows_and_costs_a_combine() -> None:
    """Decoding against 128k keys fills the chip only when the keys are split."""
    decode = {"seqlen_q": "1", "seqlen_k": "128k", "heads": "16", "heads_k": "2"}
    whole, split = (build({**decode, "num_splits": n}).predict() for n in ("1", "32"))
    assert [kernel.name for kernel in whole.kernels] == ["forward"]
    assert [kernel.name for kernel in split.kernels] == ["forward", "combine"]
    assert split.work_tiles == 32 * whole.work_tiles
    assert split.seconds < whole.seconds / 8
    full = {"seqlen": "8k", "batch": "4", "scheduler": "static"}
    assert build({**full, "num_splits": "4"}).predict().seconds > build(full).predict().seconds


def test_stealing_work_saves_the_start_of_every_cta() -> None:
    """CLC beats one CTA per tile in the same order."""
    call = {"seqlen": "4k", "batch": "4", "causal": "yes"}
    stolen, fresh = (build({**call, "scheduler": s}).predict() for s in ("clc", "naive"))
    assert stolen.seconds < fresh.seconds


def test_another_plan_of_the_same_shape() -> None:
    """Twice the exponentials take longer; the plan of another kernel is refused."""
    call = problem(2048)
    pipeline = default_forward(call, B200.gpu)
    own = forward_plan(pipeline, B200.gpu)
    parts = loop_math(own.role("softmax0")).values()
    amount = Math(**{pipe: 2 * sum(getattr(part, pipe) for part in parts) for pipe in PIPES})
    slower = with_measured_math(own, {"softmax0": amount, "softmax1": amount})
    plain, same, slow = (predict(call, pipeline, B200, plan=p) for p in (None, own, slower))
    assert plain == same and slow.seconds > 1.3 * plain.seconds
    inline = forward_plan(replace(pipeline, correction="inline"), B200.gpu)
    with pytest.raises(ValueError, match="plan must have the roles of forward d128x128"):
        predict(call, pipeline, B200, plan=inline)
