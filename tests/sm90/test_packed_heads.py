"""Query heads of any group in the rows of tiles: the Hopper kernels in the emulator.

Positions straddle warpgroups and work tiles; rows beyond a sequence, and other heads, are guarded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

pytest.importorskip("cutlass")

import fa4
from fa4.sm90.forward import kernel as kernels
from fa4.sm90.forward import load
from fa4.testing import Case
from tests.sm90.forward_kernel import build, spec_of
from tests.sm100 import forward_cases
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.test_forward_features import CHEAP, check

# One to three warpgroups, each order of work tiles, masks, ragged sequences, sinks, softcap.
GROUPS = {
    "plain": 11,
    "causal": 5,
    "window": 3,
    "decode": 12,
    "packed": 7,
    "packed_window": 9,
    "padded": 6,
    "drawn": 3,
}
LENGTHS = (1, 13, 26, 43, 65, 100)
FAULTS = {
    "a box begins where the work tile does": Edit(
        load, "    earlier = tile.first_row % tile.spec.group\n", "    earlier = 0\n"
    ),
    "a box has the positions behind": Edit(
        load, "position + tile.position(tile.first_row)\n", "position + tile.block\n"
    ),
    "warpgroups read the rows before": Edit(
        kernels, "            first = spec.query_place.lead + stage * spec.tile_rows\n",
        "            first = stage * spec.tile_rows\n",
    ),
    "a place begins with the first rows": Edit(
        kernels, "spec.query_place.lead * ROW_BYTES\n", "0\n"
    ),
}  # fmt: skip


def examine(name: str, **changed: Any) -> None:
    """Drawn calls of one of `forward_kernel.CHOICES` with another group."""
    run = build(spec_of(name, **{"group": GROUPS[name], **changed}))
    assert run.spec.straddles  # type: ignore[attr-defined]

    @CHEAP
    @given(forward_cases.cases(run.spec), forward_cases.runs())
    def search(case: Case, how: dict[str, Any]) -> None:
        check(run, case, how)

    search()


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several work tiles all the same: every position has several rows."""
    monkeypatch.setattr(forward_cases, "EDGES", LENGTHS)


@pytest.mark.parametrize("name", GROUPS)
def test_within_budget_under_any_schedule(name: str) -> None:
    """Drawn lengths, heads, windows, values and schedules; findings raise."""
    examine(name)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, tmp_path: Path) -> None:
    """By the result or by the emulator's checks."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([FAULTS[name]], tmp_path, patch)
        with pytest.raises((AssertionError, fa4.emulator.EmulationFailed)):
            examine("drawn", group=5)
