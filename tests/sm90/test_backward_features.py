"""The Hopper backward kernel, compiled and run by the emulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.testing import Case
from tests.sm90.backward_kernel import CHOICES, kernel, spec_of
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import features, pairs_met
from tests.sm100.test_backward_features import check
from tests.sm100.test_forward_features import CHEAP

# In every run of the tests; the others, and more of these, by `make test-slow`.
FEW = ("plain", "packed", "causal")
FEW_EXAMPLES, ROOM, EXAMPLES = 1, 4, 8


def search(name: str, examples: int, room: int) -> None:
    """Drawn lengths, heads, windows, values and schedules; findings raise."""
    run = kernel(name)

    @settings(CHEAP, max_examples=examples)
    @given(forward_cases.cases(run.spec, room), forward_cases.backward_runs(), st.booleans())
    def check_one(case: Case, how: dict[str, Any], with_dlse: bool) -> None:
        check(run, case, how, with_dlse)

    check_one()


@pytest.mark.parametrize("name", FEW)
def test_within_budget_under_any_schedule(name: str) -> None:
    search(name, FEW_EXAMPLES, ROOM)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_within_budget_of_every_kernel(name: str) -> None:
    search(name, EXAMPLES, forward_cases.MOST_TILES)


def test_every_pair_of_features_is_compiled() -> None:
    """Each two features that do not exclude one another meet in one of the specs."""
    met, possible = pairs_met([features(spec_of(name)) for name in CHOICES])
    assert len(possible) > 90
    assert [sorted(pair) for pair in possible - met] == []
