"""What the emulator finds in a Hopper backward kernel with an edit in its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fa4.testing import Case, assert_within_budget
from fa4.testing.budget import Outputs
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.forward_kernel import make_inputs

WRONG = "wrong result"
STEPS_LIMIT = 100_000
RUNS: tuple[dict[str, Any], ...] = (
    {"schedule": "fifo", "resident_clusters": 1},
    {"schedule": "adversarial", "seed": 1, "resident_clusters": 2},
)
# (inputs, options of the emulator) -> (reports, gradients)
Launch = Callable[..., tuple[Sequence[Any], Outputs]]


def find(
    edit: Edit, folder: Path, compiled: Callable[[], tuple[Any, Launch]], case: Case
) -> set[str]:
    """Kinds of findings, and WRONG if a gradient is beyond its budget. compiled: a spec of the
    edited code and what launches its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], folder, patch)
        spec, launch = compiled()
        found: set[str] = set()
        for how in RUNS:
            inputs = make_inputs(spec, case)
            reports, outputs = launch(inputs, collect=True, max_steps=STEPS_LIMIT, **how)
            found |= {finding.kind for report in reports for finding in report.findings}
            if "step-limit" in found:
                break
            try:
                assert_within_budget(inputs, outputs, gradients_alone=True)
            except AssertionError:
                found.add(WRONG)
        return found
