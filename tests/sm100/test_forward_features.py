"""The forward kernel, compiled and run by the emulator, against the oracle: every feature."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fa4.testing import Case, assert_within_budget
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import (
    SPECS,
    Kernel,
    features,
    kernel,
    make_inputs,
    pairs_met,
    spec_of,
)

EXAMPLES = 3  # per spec
CHEAP = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),  # an example takes a second: do not shrink
    suppress_health_check=list(HealthCheck),
)


def check(run: Kernel, case: Case, how: dict[str, Any]) -> float:
    """No finding of the emulator, O and LSE within their budgets. Returns the share used."""
    inputs = make_inputs(run.spec, case)
    outputs, _ = run(inputs, **how)
    return assert_within_budget(inputs, outputs)


@pytest.mark.parametrize("name", SPECS)
def test_within_budget_under_any_schedule(name: str) -> None:
    """Drawn lengths, heads, windows, values and schedules; findings raise."""
    run = kernel(name)

    @CHEAP
    @given(forward_cases.cases(run.spec), forward_cases.runs())
    def search(case: Case, how: dict[str, Any]) -> None:
        check(run, case, how)

    search()


def test_every_pair_of_features_is_compiled() -> None:
    """Each two features that do not exclude one another meet in one of the specs."""
    met, possible = pairs_met([features(spec_of(name)) for name in SPECS])
    assert len(possible) > 100
    assert [sorted(pair) for pair in possible - met] == []


def test_specs_are_valid() -> None:
    """Specs that contradict themselves are refused, with the reason."""
    assert spec_of("plain").ragged_k is False
