"""The order of sums: fixed where that is asked for, under every schedule and order of launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4.emulator import EmulationFailed
from fa4.sm100.backward import tiles
from fa4.sm100.backward.spec import BackwardSpec
from fa4.testing import Case, assert_within_budget
from fa4.testing.inputs import Inputs
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import (
    REDUCE_WARPS,
    BackwardKernel,
    Workspace,
    build,
    kernel,
    prepare,
)
from tests.sm100.forward_kernel import make_inputs

RUNS: tuple[dict[str, Any], ...] = (
    {},
    {"resident_clusters": 1},
    {"schedule": "random", "seed": 1, "resident_clusters": 6, "ordered_sums": True},
    {"schedule": "adversarial", "seed": 2, "resident_clusters": 3},
)
MANY_RUNS = tuple(
    {"schedule": schedule, "seed": seed, "resident_clusters": resident, "ordered_sums": True}
    for schedule in ("random", "adversarial")
    for seed, resident in enumerate((1, 2, 3, 6))
)
SMALL = BackwardSpec(head_dim=16, head_dim_v=16, causal=True, deterministic=True)
STEPS_LIMIT = 60_000  # a run of `problem` takes a quarter
WRONG_ORDER = Edit(
    tiles, "if spec.deterministic and spec.hides_first_rows:", "if spec.hides_last_rows:"
)
LAST_FIRST = Edit(
    tiles,
    "index = cute.arch.block_idx()[0]",
    "index = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]",
)


def problem(run: BackwardKernel) -> Inputs:
    """Three KV tiles with as many query tiles each or fewer, two heads that share them."""
    spec = run.spec
    case = Case(
        layout="packed", lengths=((300, 300),), heads_k=1, group=2, seed=4, causal=spec.causal,
        head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype,
        window_size=(150 if spec.window_left else None, 40 if spec.window_right else None),
    )  # fmt: skip
    return make_inputs(spec, case)


def bits(run: BackwardKernel, inputs: Inputs, how: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """dQ as it was summed, dK and dV. All within budget, and every CTA has had its turn."""
    space = prepare(run.spec, inputs)
    _, found = run.launch(inputs, space, **how)
    assert_within_budget(inputs, found, gradients_alone=True)
    assert found.dk is not None and found.dv is not None
    if run.spec.deterministic:
        check_turns(run.spec, inputs, space)
    return space.dq_accum.tobytes(), found.dk.tobytes(), found.dv.tobytes()


def check_turns(spec: BackwardSpec, inputs: Inputs, space: Workspace) -> None:
    """Each warp's counter tells how many CTAs, or pairs, have a key that a row of the tile sees."""
    keys, warps = 128 * spec.cta_group, REDUCE_WARPS * spec.cta_group
    for seq, (first, rows) in zip(inputs.sequences, space.places, strict=True):
        for tile in range(-(-rows // 128)):
            seen = seq.visible[:, tile * 128 : (tile + 1) * 128].any(axis=1)
            tiles_seen = [seen[:, n : n + keys].any(axis=1) for n in range(0, seen.shape[1], keys)]
            count = np.sum(tiles_seen, axis=0)[:, None]
            turns = space.turns[:, first + tile]
            assert (turns[:, :warps] == count).all() and not turns[:, warps:].any()


def test_sums_without_an_order_are_seen() -> None:
    """The reductions of two CTAs race where no turns order them."""
    run = kernel("plain")
    with pytest.raises(EmulationFailed) as failure:
        bits(run, problem(run), {"ordered_sums": True})
    assert {finding.kind for finding in failure.value.report.findings} == {"race"}


def check_same_bits(run: BackwardKernel, runs: tuple[dict[str, Any], ...]) -> None:
    inputs = problem(run)
    first, *others = (bits(run, inputs, how) for how in runs)
    assert all(other == first for other in others)


def test_the_same_bits_under_every_schedule() -> None:
    check_same_bits(kernel("causal"), RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal", "window", "chunked", "biased_window", "pair", "wide_pair"]
)
def test_the_same_bits_under_many_schedules(name: str) -> None:
    check_same_bits(kernel(name), (*RUNS, *MANY_RUNS))


def test_any_order_is_within_budget() -> None:
    """Without turns dQ depends on the schedule, dK and dV never do: a CTA sums them alone."""
    run = build(BackwardSpec(head_dim=16, head_dim_v=16))
    inputs = problem(run)
    found = [bits(run, inputs, {**how, "ordered_sums": False}) for how in RUNS]
    assert len({dq for dq, _, _ in found}) > 1
    assert len({(dk, dv) for _, dk, dv in found}) == 1


def test_launched_in_another_order(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, where all CTAs are resident; else nobody's turn comes."""
    run = build(SMALL)
    inputs = problem(run)
    wanted = bits(run, inputs, {})
    put_in_place([LAST_FIRST], tmp_path, monkeypatch)
    run = build(SMALL)
    for how in ({"resident_clusters": 3}, {"resident_clusters": 3, "schedule": "random"}):
        assert bits(run, inputs, how) == wanted
    with pytest.raises(EmulationFailed) as failure:
        bits(run, inputs, {"clusters_limit": 1, "max_steps": STEPS_LIMIT})
    assert {finding.kind for finding in failure.value.report.findings} == {"step-limit"}
