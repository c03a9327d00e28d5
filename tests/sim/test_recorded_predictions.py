"""Records that rest on predictions are those of this code: what a CPU can compute again, is.

Who changes a plan, a cost, the engine or a kernel's loop makes them anew, from a clean commit:
`python -m lab.benchmarks.forward_prediction`, `python -m lab.benchmarks.claims`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.benchmarks import claims
from lab.benchmarks import forward_prediction as forward
from lab.records import read_record
from tests.sim.test_predictions import differences

ROOT = Path(__file__).resolve().parents[2]
FORWARD = read_record("forward_prediction")
CLAIMS = read_record("claims")["claims"]


def predicted_again(forward: ModuleType, report: dict[str, Any]) -> list[str]:
    """Where a report of the forward kernels differs from what its own counts give today."""
    calls, rows = {call.name: call for call in forward.CALLS}, report["predictions"]
    found = []
    for row in rows:
        call = calls[row["call"]]
        split = forward.Exp2Split(**row["exp2"])
        spec = call.spec(row["cta_group"], split)
        now = json.loads(json.dumps(forward.describe(call, spec, forward.amounts_of(row))))
        place = f"{row['call']}, {row['cta_group']} CTA, {row['emulated_columns']} emulated"
        found += differences(row, now, place)
    verdicts = [forward.judge(call, rows) for call in forward.CALLS]
    return found + differences(report["verdicts"], json.loads(json.dumps(verdicts)), "verdicts")


def test_predictions_of_the_forward_kernels() -> None:
    """By their recorded counts; a planted TFLOP/s, count, aim or verdict would be seen."""
    assert predicted_again(forward, FORWARD) == []
    for change in (
        lambda x: x["predictions"][3].update(tflops=1605.0),
        lambda x: x["predictions"][0]["instructions_per_tile"]["softmax0"]["counted"].update(
            mufu=9
        ),
        lambda x: x["verdicts"][0].update(reached=True),
    ):
        wrong = copy.deepcopy(FORWARD)
        change(wrong)
        assert predicted_again(forward, wrong) != []


def test_instructions_of_the_forward_kernels() -> None:
    """Counted again, in the emulator, of the kernels that the two calls get."""
    pytest.importorskip("cutlass")
    shipped = [row for row in FORWARD["predictions"] if row["shipped"]]
    assert len(shipped) == len(forward.CALLS)
    for call, row in zip(forward.CALLS, shipped, strict=True):
        counted = forward.tile_amounts(call.spec(call.cta_group))
        recorded = forward.amounts_of(row)
        pipes = {role: forward.pipes(amount) for role, amount in counted.items()}
        assert pipes == {role: forward.pipes(amount) for role, amount in recorded.items()}


def test_the_papers_claims() -> None:
    """All but the counts of rescales, which the NumPy reference takes long for."""
    parts = [part for part in claims.PARTS if part is not claims.rescaling]
    now = json.loads(json.dumps(claims.json_ready([row for part in parts for row in part()])))
    recorded = [row for row in CLAIMS if not row["claim"].startswith("rescales")]
    assert differences(recorded, now) == []


@pytest.mark.slow
def test_counts_of_rescales() -> None:
    """Those that depend on sums of bf16 products: within a percent."""
    recorded = [row for row in CLAIMS if row["claim"].startswith("rescales")]
    for old, new in zip(recorded, claims.rescaling(), strict=True):
        assert new["rates"] == pytest.approx(old["rates"], rel=0.01)
        assert new["speedup"] == pytest.approx(old["speedup"], rel=0.01)
