"""The Hopper forward kernel, compiled and run by the emulator, against the oracle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

pytest.importorskip("cutlass")

from fa4.emulator import RunEvents
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.testing import Case
from fa4.testing.inputs import dense_inputs
from tests.sm90.forward_kernel import CHOICES, build, kernel, spec_of
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


class Fetches(RunEvents):
    """How often a run has L2 fetch a box."""

    def __init__(self) -> None:
        self.count = 0

    def executed(self, fragment: Any, step: Any, outcome: Any, tick: int) -> None:
        """A handler ran."""
        self.count += "bulk.prefetch.tensor" in step.instruction.opcode


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_ctas_first_work_tile_is_not_fetched_early() -> None:
    """Its loads start at once; a fetch would take their turn. Q of each later one is fetched."""
    run = build(WarpgroupSpec(head_dim=64, head_dim_v=64, tile_n=48, consumers=1))
    assert run.spec.plan.buffer("q").stages == 1
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 64, 3, 64)).astype(ml_dtypes.bfloat16) for _ in "qkv")
    for ctas, later in ((3, 0), (2, 1), (1, 2)):
        events = Fetches()
        run(dense_inputs(q, k, v), num_sms=ctas, events=events)
        assert events.count == later
