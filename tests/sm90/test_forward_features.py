"""The Hopper forward kernel, compiled and run by the emulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

pytest.importorskip("cutlass")

from fa4.testing import Case
from tests.sm90.forward_kernel import CHOICES, kernel, spec_of
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import features, pairs_met
from tests.sm100.test_forward_features import CHEAP, check


@pytest.mark.parametrize("name", CHOICES)
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
    met, possible = pairs_met([features(spec_of(name)) for name in CHOICES])
    assert len(possible) > 100
    assert [sorted(pair) for pair in possible - met] == []
