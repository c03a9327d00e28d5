"""The Hopper backward kernels, compiled and run by the emulator, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.testing import Case
from tests.sm90 import backward_kernel, wide_kernel
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import features, pairs_met
from tests.sm100.test_backward_features import check
from tests.sm100.test_forward_features import CHEAP

KERNELS = {"narrow": backward_kernel, "wide": wide_kernel}
CHOICES = tuple((heads, name) for heads in KERNELS for name in KERNELS[heads].CHOICES)
# In every run of the tests; the others, and more of these, by `make test-slow`.
FEW = tuple((heads, name) for heads in KERNELS for name in ("plain", "packed", "causal"))
FEW += (("narrow", "plain_in_order"),)
FEW_EXAMPLES, ROOM, EXAMPLES = 1, 4, 8


def search(heads: str, name: str, examples: int, room: int) -> None:
    """Drawn lengths, heads, windows, values and schedules; findings raise."""
    run = KERNELS[heads].kernel(name)

    @settings(CHEAP, max_examples=examples)
    @given(forward_cases.cases(run.spec, room), forward_cases.backward_runs(), st.booleans())
    def check_one(case: Case, how: dict[str, Any], with_dlse: bool) -> None:
        check(run, case, how, with_dlse)

    check_one()


@pytest.mark.parametrize(("heads", "name"), FEW)
def test_within_budget_under_any_schedule(heads: str, name: str) -> None:
    search(heads, name, FEW_EXAMPLES, ROOM)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "name"), CHOICES)
def test_within_budget_of_every_kernel(heads: str, name: str) -> None:
    search(heads, name, EXAMPLES, forward_cases.MOST_TILES)


@pytest.mark.parametrize(("heads", "least"), [("narrow", 91), ("wide", 81)])
def test_every_pair_of_features_is_compiled(heads: str, least: int) -> None:
    """Each two features that do not exclude one another meet in one of the specs."""
    kernels = KERNELS[heads]
    met, possible = pairs_met([features(kernels.spec_of(name)) for name in kernels.CHOICES])
    assert len(possible) >= least
    assert [sorted(pair) for pair in possible - met] == []
