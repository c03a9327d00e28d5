"""The forward kernel with halves, run by the emulator against the oracle: every feature."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from hypothesis import given

from fa4.testing import Case
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import features, pairs_met
from tests.sm100.halves_kernel import ALONE, SPECS, halves_spec, kernel
from tests.sm100.test_forward_features import CHEAP, check


@pytest.mark.parametrize("name", SPECS)
def test_within_budget_under_any_schedule(name: str) -> None:
    """Drawn lengths, heads, windows, values and schedules; findings raise."""
    run = kernel(name)

    @CHEAP
    @given(forward_cases.cases(run.spec), forward_cases.runs())
    def search(case: Case, how: dict[str, Any]) -> None:
        sms = how["num_sms"] * run.spec.cta_group
        check(run, case, how | {"num_sms": sms})

    search()


def test_features_of_the_forward_kernel() -> None:
    """All pairs of them, in CTAs alone and in pairs of CTAs each feature."""
    specs = {name: halves_spec(name) for name in SPECS}
    met, possible = pairs_met([features(spec) for spec in specs.values()])
    assert possible - met == set() and len(possible) > 80
    alone, paired = (
        set().union(*(features(spec) for name, spec in specs.items() if (name in ALONE) == one))
        for one in (True, False)
    )
    assert alone ^ paired <= {"mask_mod", "window_right"}
