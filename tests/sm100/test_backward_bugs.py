"""Each bug of `backward_bugs` is caught by the check it names, and every class is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.sm100.backward import reduce
from lab.pages.backward_bugs import render_bugs
from tests.sm100.altered import Edit
from tests.sm100.backward_bugs import (
    BUGS,
    CAUSAL,
    CLASSES,
    ELSEWHERE,
    IMPOSSIBLE,
    BackwardBug,
    caught_by,
)
from tests.sm100.backward_pair_bugs import PAIR, PAIR_BUGS, WIDE_PAIR

ALL = BUGS | PAIR_BUGS

# In every run of the tests: one of each kind of check. All: make test-slow.
FEW = (
    "no fence behind P in tensor memory",
    "a KV tile that nobody sees waits for a turn",
    "the next turn when the sums are read, not added",
    "two counts of registers in a warpgroup",
    "dQ's elements in another order",
    "dQ over S that is not read",
)


@pytest.mark.parametrize("name", FEW)
def test_bug_is_caught(name: str, tmp_path: Path) -> None:
    assert ALL[name].caught in caught_by(ALL[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALL) - set(FEW)))
def test_other_bug_is_caught(name: str, tmp_path: Path) -> None:
    assert ALL[name].caught in caught_by(ALL[name], tmp_path)


@pytest.mark.parametrize(
    "spec",
    [CAUSAL, *(pytest.param(spec, marks=pytest.mark.slow) for spec in (PAIR, WIDE_PAIR))],
    ids=["CTA", "pair", "wide pair"],
)
def test_nothing_is_found_without_a_bug(spec: dict[str, Any], tmp_path: Path) -> None:
    """An unaltered copy in the same place: it is the edits that are caught."""
    same = BackwardBug("", (Edit(reduce, "READ_COLS = 64", "READ_COLS = 64"),), "", spec)
    assert caught_by(same, tmp_path) == set()


def test_every_class_is_accounted_for() -> None:
    """Put back here or elsewhere, or why it cannot be; elsewhere is a test that there is."""
    here = {one.number for one in ALL.values()}
    assert set(CLASSES) == here | set(ELSEWHERE) | set(IMPOSSIBLE)
    assert not here & set(IMPOSSIBLE)
    for place in ELSEWHERE.values():
        file, _, name = place.split(": ")[-1].partition(", ")
        assert name in Path(file).read_text(encoding="utf-8")


def test_the_table_has_every_bug() -> None:
    table = render_bugs()
    assert table.count("\n") == len(ALL) + len(ELSEWHERE) + len(IMPOSSIBLE) + 1
    for name, one in ALL.items():
        (row,) = (line for line in table.splitlines() if f"| {name} |" in line)
        assert row.startswith(f"| {one.number} |") and row.endswith(f"| {one.caught} |")
    assert all(text in table for text in (*CLASSES.values(), *IMPOSSIBLE.values()))
