"""Hopper's backward kernels predicted, and held to what was measured of them; nothing is fitted."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa4 import cli
from fa4.config import Problem
from fa4.designs import design_of
from fa4.designs.gradients import BLOCK_ROWS, MainKernel, narrow_kernels, wide_kernels
from fa4.designs.tiles import Lengths, WorkTiles, divided
from fa4.hardware import H200
from fa4.plan.schema import Copy
from fa4.plan.warpgroup_backward import WarpgroupBackwardPipeline, warpgroup_backward_plan
from fa4.sim.chip import run_one_by_one
from fa4.sim.costs import MachineCosts
from fa4.sim.hopper_backward import MOST_NARROW, backward_pipeline, predict_hopper_backward
from fa4.sim.machine import Machine, find_machine
from fa4.sim.predict import Simulation, make_runner
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from lab.hardware.warpgroup_backward.predicted import (
    NARROW,
    WIDE,
    PredictedGradient,
    predicted_gradients,
    rank_correlation,
    summarised,
)

MACHINE = find_machine("h200")
SMALL = Problem(batch=2, seqlen_q=1000, seqlen_k=1500, heads_q=8, heads_k=2, head_dim=128)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dims", [(64, 64), (72, 40), (128, 64), (72, 128), (192, 128), (136, 136), (256, 256)]
)
def test_the_pipeline_is_the_kernels(dims: tuple[int, int], causal: bool) -> None:
    """Tiles, places and padding are those of the spec that is compiled."""
    problem = replace(SMALL, head_dim=dims[0], head_dim_v=dims[1], causal=causal)
    kind = WarpgroupBackwardSpec if max(dims) <= 128 else WideBackwardSpec
    spec = kind(head_dim=dims[0], head_dim_v=dims[1], causal=causal, deterministic=False)
    assert backward_pipeline(problem, H200) == spec.pipeline
    if max(dims) <= 128:
        fixed = replace(spec, deterministic=True)
        assert backward_pipeline(problem, H200, deterministic=True) == fixed.pipeline
        packed = replace(fixed, packed_q=True, packed_k=True)
        assert backward_pipeline(problem, H200, deterministic=True, ragged=True) == packed.pipeline


@pytest.mark.parametrize(("head_dim", "shares"), [(64, (0.84, 0.84)), (128, (0.84, 0.84)),
                                                  (200, (0.955,))])  # fmt: skip
def test_kernels_around_the_main_one_copy_or_read(head_dim: int, shares: tuple[float, ...]) -> None:
    """Seconds of their bytes at the rate of copies where they write about as much as they read."""
    problem = replace(SMALL, head_dim=head_dim, heads_k=8, batch=8)
    pipeline = backward_pipeline(problem, H200)
    mains_of = design_of(pipeline).mains
    assert mains_of is not None
    kernels = mains_of(problem, pipeline, H200, None)
    assert kernels.zeros == bool(kernels.behind) == (len(shares) == 2)
    found = predict_hopper_backward(problem, MACHINE).kernels
    around = [kernel for kernel in found if kernel.name in ("preprocess", "postprocess")]
    assert [kernel.hbm_seconds * H200.hbm_bytes_per_s for kernel in around] == pytest.approx(
        [
            x / share
            for x, share in zip((kernels.before, *kernels.behind.values()), shares, strict=True)
        ]
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_less_work_takes_less_time(head_dim: int) -> None:
    """Half the batch, a mask, a window; the kernels' seconds add up."""
    problem = replace(SMALL, head_dim=head_dim, batch=24, seqlen_q=1500)
    times = [
        predict_hopper_backward(one, MACHINE).seconds
        for one in (
            problem, replace(problem, causal=True), replace(problem, window_size=(100, 0)),
        )
    ]  # fmt: skip
    assert times[0] > times[1] > times[2]
    assert times[0] > predict_hopper_backward(replace(problem, batch=12), MACHINE).seconds
    found = predict_hopper_backward(problem, MACHINE)
    assert found.seconds == pytest.approx(sum(kernel.seconds for kernel in found.kernels))
    assert all(0 <= x <= 1 for kernel in found.kernels for x in kernel.unit_busy.values())


def test_sequences_of_a_batch_and_a_fixed_order() -> None:
    """Given one by one they are the batch; a fixed order of sums costs time."""
    lengths = tuple(Lengths(1000, 1500) for _ in range(2))
    whole, parts = (predict_hopper_backward(SMALL, MACHINE, lengths=x) for x in (None, lengths))
    assert whole == parts
    fixed = predict_hopper_backward(SMALL, MACHINE, deterministic=True)
    assert fixed.seconds > whole.seconds


@settings(max_examples=40)
@given(
    st.lists(st.builds(Lengths, st.sampled_from([0, 1, 7, 300, 1500]),
                       st.sampled_from([0, 0, 0, 9, 3000])), min_size=1, max_size=3),
    st.sampled_from([40, 64, 128, 200, 256]), st.booleans(), st.booleans(),
)  # fmt: skip
@example([Lengths(100, 0)], 256, False, False)
def test_sequences_may_be_empty(
    lengths: list[Lengths], head_dim: int, causal: bool, deterministic: bool
) -> None:
    """Of queries, of keys or of both: it takes some time, and no unit more than all of it."""
    problem = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    found = predict_hopper_backward(
        problem, MACHINE, lengths=tuple(lengths), deterministic=deterministic
    )
    assert 0 < found.seconds < 1 and found.tflops >= 0
    assert all(0 <= x <= 1 for kernel in found.kernels for x in kernel.unit_busy.values())


@pytest.mark.parametrize(
    ("problem", "machine", "said"),
    [
        (SMALL, "b200", "must be an H100 or H200; got .*200"),
        (replace(SMALL, dtype="e4m3"), "h200", "bf16 or fp16 for gradients; got e4m3"),
        (replace(SMALL, head_dim=264), "h200", "at most 256; got 264"),
    ],
)
def test_what_no_kernel_has(problem: Problem, machine: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict_hopper_backward(problem, find_machine(machine))


def test_another_pipeline_has_another_time() -> None:
    """64 queries in a tile instead of 128 at head dim 64."""
    problem = replace(SMALL, head_dim=64, batch=24, seqlen_q=1500)
    narrow = WarpgroupBackwardPipeline(head_dim=64, head_dim_v=64, tile_m=64)
    other = predict_hopper_backward(problem, MACHINE, pipeline=narrow)
    assert other.seconds != predict_hopper_backward(problem, MACHINE).seconds


@pytest.mark.parametrize(
    ("record", "bias", "error", "rank"),
    [(NARROW, (1.0, 1.07), 0.13, 0.96), (WIDE, (0.98, 1.03), 0.06, 0.95)],
)
def test_what_was_measured(
    record: str, bias: tuple[float, float], error: float, rank: float
) -> None:
    """To 6% in the mean; at most 13% off in short calls up to head dim 128, else 6%."""
    found = summarised(list(predicted_gradients(record)))
    assert bias[0] <= found["times"] <= bias[1]
    assert found["largest error"] <= error and found["rank"] >= rank
    assert found["mean error"] <= 0.06


def changed(**figures: float) -> Machine:
    """The machine with other figures."""
    return replace(MACHINE, costs=replace(MACHINE.costs, **figures))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_what_products_leave_of_shared_memory_costs_time(head_dim: int) -> None:
    """More for threads is faster, but at head dim 64, whose products lose by it; and so are shorter
    waits behind full ports."""
    problem = replace(SMALL, head_dim=head_dim, heads_k=8, batch=24, seqlen_q=1500)
    now = predict_hopper_backward(problem, MACHINE).seconds
    every_other = changed(port_least_share=0.0, bulk_read_bytes=0.0)
    without = [changed(**{f"full_port_{name}_cycles": 0.0}) for name in ("fence", "latency")]
    more = [changed(port_least_share=0.5)] if head_dim > 64 else []
    for faster in (*more, every_other, *without):
        assert predict_hopper_backward(problem, faster).seconds < now


def test_sums_read_what_products_leave() -> None:
    """Bulk copies have 32 bytes in a cycle of the port in which no product reads, or the least."""
    plan = warpgroup_backward_plan(WarpgroupBackwardPipeline(), H200)
    costs = MachineCosts(H200, MACHINE.costs, plan=plan)
    full, half = 3 * 8 * 32, 2 * 4 * 64  # of a step's cycles, with all of the port or half of it
    gaps = 0.05  # a lone warpgroup's, between instructions
    assert 0 < costs.port.free - half / 2 / (full + half) < gaps
    assert costs.port.threads > costs.port.free and 0.5 < costs.port.full < 0.7
    sums = costs.amount(Copy(kind="reduce", num_bytes=16384), 1)
    rate = 32 * costs.port.free
    assert sums.under == "tensor" and sums.stretch["reduce"] == pytest.approx(15.8 / rate - 1)
    alone = MachineCosts(H200, MACHINE.costs).amount(Copy(kind="reduce", num_bytes=16384), 1)
    assert alone.stretch["reduce"] == 0.0
    assert sums.occupancy_cycles == alone.occupancy_cycles


@pytest.mark.parametrize(("head_dim", "names"), [(128, ["sums of parts"]), (256, ["sums of parts"]),
                                                 (64, ["sums of parts"])])  # fmt: skip
def test_sums_of_few_heads_are_divided(head_dim: int, names: list[str]) -> None:
    """As the kernels divide them, and faster than by CTAs that have all heads of a group."""
    problem = replace(SMALL, batch=1, heads_q=16, heads_k=1, head_dim=head_dim, seqlen_q=1500)
    found = predict_hopper_backward(problem, MACHINE)
    assert [x.name for x in found.kernels if x.name == "sums of parts"] == names
    assert found.tflops > 2 * predict_hopper_backward(problem, one_part()).tflops


def one_part() -> Machine:
    """A GPU that has its SMs' figures and plans for one alone, for which nothing is divided."""
    return replace(MACHINE, gpu=replace(H200, sm_count=1))


def test_the_second_kernel_fills_what_the_first_leaves() -> None:
    """CTAs of dQ begin where there are no more of the other kernel's: together they take less than
    one after the other, and no less than either."""
    problem = replace(SMALL, head_dim=256, heads_k=8, seqlen_q=1500)
    keys, queries = (x for x in predict_hopper_backward(problem, MACHINE).kernels if x.cycles)
    (alone,) = (x for x in mains(problem) if x.name == "dQ")
    runner = make_runner(alone.plan, MACHINE, Simulation(rescale_rate=0.0))
    start = MACHINE.costs.cta_start_cycles
    by_itself = run_one_by_one(runner, alone.tiles, H200.sm_count, start).cycles
    behind = run_one_by_one(runner, alone.tiles, H200.sm_count, start, behind=np.full(132, 1e5))
    assert behind.cycles == pytest.approx(by_itself + 1e5)
    assert 0 < queries.cycles < 1.001 * by_itself < keys.cycles + queries.cycles
    few = replace(problem, batch=1, heads_q=3, heads_k=3)  # no SM has two CTAs of dK and dV
    keys, queries = (x for x in predict_hopper_backward(few, MACHINE).kernels if x.cycles)
    (alone,) = (x for x in mains(few) if x.name == "dQ")
    by_itself = run_one_by_one(runner, alone.tiles, H200.sm_count, start).cycles
    assert 0 < queries.cycles < by_itself / 2


def mains(problem: Problem) -> list[MainKernel]:
    """The main kernels of a call."""
    pipeline = backward_pipeline(problem, H200)
    mains_of = design_of(pipeline).mains
    assert mains_of is not None
    kernels: list[MainKernel] = mains_of(problem, pipeline, H200, None).mains
    return kernels


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_parts_of_a_tile_have_its_steps(masked: int, plain: int, parts: int) -> None:
    """As even as can be, the masked ones last; a part has one step at least."""
    total = max(masked + plain, 1)
    trips = np.array([[total, total - plain, plain]])
    zeros = np.zeros(1, np.int64)
    found = divided(
        WorkTiles(trips=trips, batch=zeros, head=zeros, block=zeros, first=zeros), parts
    )
    steps = found.trips
    assert len(steps) == len(found.batch) == parts and (steps[:, 0] == steps[:, 1:].sum(1)).all()
    assert steps[:, 0].min() >= 1 and np.ptp(steps[:, 0]) <= 1
    if total >= parts:
        assert steps.sum(0).tolist() == trips[0].tolist()
        assert (np.diff(np.sign(steps[:, 1])) >= 0).all()


@pytest.mark.parametrize(
    ("head_dim", "slower"), [(216, True), (208, False), (72, True), (80, False)]
)
def test_rows_within_sectors_are_loaded_more_slowly(head_dim: int, slower: bool) -> None:
    """Of head dims that are odd multiples of 8, by what was measured."""
    problem = replace(SMALL, head_dim=head_dim, head_dim_v=head_dim, heads_k=8, batch=8)
    now = predict_hopper_backward(problem, MACHINE).seconds
    whole = predict_hopper_backward(problem, changed(half_sector_share=1.0)).seconds
    assert (whole < now) == slower


def test_ranks() -> None:
    """Of three calls in order, in the other order, and with two exchanged."""

    def calls(*predicted: float) -> list[PredictedGradient]:
        return [PredictedGradient(SMALL, False, n, x) for n, x in enumerate(predicted, 1)]

    assert rank_correlation(calls(5, 6, 9)) == pytest.approx(1)
    assert rank_correlation(calls(9, 6, 5)) == pytest.approx(-1)
    assert rank_correlation(calls(6, 5, 9)) == pytest.approx(0.5)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each kernel, the same as JSON; what it has not is refused in one line."""
    asked = ["predict", "--pass", "bwd", "--machine", "h200", "--seqlen", "1k"]

    def run(*more: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*asked, *more])
        return ended.value.code, *capsys.readouterr()

    code, shown, _ = run("--head-dim", "256")
    assert not code and "dK, dV" in shown and "not fitted to any backward kernel" in shown
    code, text, _ = run("--json", "--deterministic")
    found = predict_hopper_backward(
        Problem(seqlen_q=1024, seqlen_k=1024, heads_q=16, heads_k=16, head_dim=128), MACHINE,
        deterministic=True,
    )  # fmt: skip
    assert not code and json.loads(text)["seconds"] == found.seconds
    for more, said in (
        (("--tile-m", "64"), "tile_m is no setting of Hopper's backward kernels; got 64"),
        (("--why",), "--why is not of the backward pass of Hopper; got True"),
    ):
        assert run(*more) == (2, "", f"fa4: error: {said}\n")


@given(st.integers(1, 3), st.integers(1, 700), st.integers(1, 700), st.sampled_from((64, 192)))
def test_equal_lengths_are_those_of_the_problem(batch: int, rows: int, keys: int, dim: int) -> None:
    """Bytes of all kernels and their work tiles; a part of one more sequence adds to each."""
    problem = replace(
        SMALL, batch=batch, seqlen_q=rows, seqlen_k=keys, head_dim=dim, head_dim_v=dim
    )
    pipeline = backward_pipeline(problem, H200)
    kernels = narrow_kernels if dim <= MOST_NARROW else wide_kernels
    plain, *others = (
        kernels(problem, pipeline, H200, lengths)  # type: ignore[arg-type]
        for lengths in (None, (Lengths(rows, keys),) * batch, (Lengths(rows, keys),) * (batch + 1))
    )
    same, more = others
    assert (same.before, same.behind) == (plain.before, plain.behind)
    assert [x.num_bytes for x in same.mains] == [x.num_bytes for x in plain.mains]
    assert more.before * batch == plain.before * (batch + 1)


@given(st.integers(1, BLOCK_ROWS), st.integers(0, 4))
def test_dq_is_added_up_in_whole_blocks(rows: int, blocks: int) -> None:
    """The kernels before and behind move as many bytes of it for one row of a block as for all."""
    moved = []
    assert WarpgroupBackwardSpec(head_dim=64, head_dim_v=64).block_rows == BLOCK_ROWS
    for count in (rows, BLOCK_ROWS):
        length = BLOCK_ROWS * blocks + count
        problem = replace(SMALL, batch=1, seqlen_q=length, head_dim=64, head_dim_v=64)
        pipeline = WarpgroupBackwardPipeline(head_dim=64, head_dim_v=64)
        found = narrow_kernels(problem, pipeline, H200, None)
        own = problem.heads_q * problem.seqlen_q * 64 * 2
        moved.append((found.before - 2 * own, found.behind["postprocess"] - own))
    assert moved[0] == moved[1] == (moved[0][0],) * 2
