"""Faults planted in the Hopper backward kernel are caught in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.plan import warpgroup_backward
from fa4.sm90.backward import consumer, load, reduce
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import build, prepare
from tests.sm100.forward_kernel import make_inputs

WRONG = "wrong result"
STEPS_LIMIT = 100_000
SPEC = {"head_dim": 16, "head_dim_v": 16, "causal": True, "deterministic": True}
RUNS: tuple[dict[str, Any], ...] = (
    {"schedule": "fifo", "resident_clusters": 1},
    {"schedule": "adversarial", "seed": 1, "resident_clusters": 2},
)
# What is caught, and by what kind of finding.
FAULTS: dict[str, tuple[Edit, str]] = {
    "no fence between dS and its product": (
        Edit(consumer, '    cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        "missing-proxy-fence",
    ),
    "dQ's product before the warpgroups have met": (
        Edit(consumer, "    meet(signals)\n    dq = products", "    dq = products"),
        "race",
    ),
    "dQ is read while its product runs": (
        Edit(consumer, "dq = wait_products(1, dq)", "dq = wait_products(2, dq)"),
        "missing-wait",
    ),
    "Q given back while dK's product reads it": (
        Edit(
            consumer,
            """    dk = wait_products(0, state.dk)
    signals.arrive_once("q_empty", state.queries)
""",
            """    signals.arrive_once("q_empty", state.queries)
    dk = wait_products(0, state.dk)
""",
        ),
        "race",
    ),
    "one place for dS of two tiles": (
        Edit(consumer, "work.ds + grads.slot * (rows * DS_ROW_BYTES)", "work.ds"),
        WRONG,
    ),
    "-D of the other tile": (
        Edit(load, "numbers.shared + stage * rows", "numbers.shared + (1 - stage) * rows"),
        WRONG,
    ),
    "a turn is not given on": (
        Edit(reduce, "    release_turn(work.turns, held)\n            held", "    held"),
        "step-limit",
    ),
    "dQ left where the last one may not be read yet": (
        Edit(reduce, '    signals.wait("dq#_empty", turn)\n', ""),
        "race",
    ),
    "no fence between dQ and its copy": (
        Edit(reduce, '    cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        "missing-proxy-fence",
    ),
    "columns of dK as keys": (
        Edit(consumer, "tile.first_key + work.number * WARPGROUP_ROWS", "tile.first_key"),
        WRONG,
    ),
}
FEW = ("no fence between dS and its product", "dQ is read while its product runs")


def caught_by(edit: Edit, folder: Path) -> set[str]:
    """Kinds of findings, and WRONG if a gradient is beyond its budget."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], folder, patch)
        spec = WarpgroupBackwardSpec(**SPEC)
        run = build(spec)
        case = Case(batch=1, seqlen_q=600, seqlen_k=600, heads_k=1, group=1, head_dim=16,
                    head_dim_v=16, dtype="bf16", causal=True)  # fmt: skip
        found: set[str] = set()
        for how in RUNS:
            inputs = make_inputs(spec, case)
            space = prepare(spec, inputs)
            report, outputs = run.launch(inputs, space, collect=True, max_steps=STEPS_LIMIT, **how)
            found |= {finding.kind for finding in report.findings}
            if "step-limit" in found:
                break
            try:
                assert_within_budget(inputs, outputs, gradients_alone=True)
            except AssertionError:
                found.add(WRONG)
        return found


@pytest.mark.parametrize("name", FEW)
def test_fault_is_caught(name: str, tmp_path: Path) -> None:
    edit, kind = FAULTS[name]
    assert kind in caught_by(edit, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(FEW)))
def test_other_fault_is_caught(name: str, tmp_path: Path) -> None:
    edit, kind = FAULTS[name]
    assert kind in caught_by(edit, tmp_path)


def test_nothing_is_found_without_a_fault(tmp_path: Path) -> None:
    """An unaltered copy in the same place: it is the edits that are caught."""
    same = Edit(warpgroup_backward, "STAGES = 2", "STAGES = 2")
    assert caught_by(same, tmp_path) == set()
