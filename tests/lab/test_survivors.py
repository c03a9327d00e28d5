"""Explanations of changes that no test noticed are of lines that there are."""

from __future__ import annotations

import pytest

from lab import ROOT
from lab.benchmarks.mutants.survivors import WHY


def count(source: str, line: str) -> int:
    """How often a line stands in a file, however far it is indented."""
    return sum(found.strip() == line for found in source.splitlines())


@pytest.mark.parametrize("key", WHY, ids=lambda key: key[1][:40])
def test_explanations_are_of_lines_that_there_are(key: tuple[str, str, str]) -> None:
    """Each names one line of its file (a decorator may stand at several), and another."""
    path, before, after = key
    lines = count((ROOT / path).read_text(encoding="utf-8"), before)
    assert lines == 1 or (lines and before.startswith("@"))
    assert after != before and not count((ROOT / path).read_text(encoding="utf-8"), after)
