"""The sample of single changes: seeded, sensible, and none that is no change."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="installed by `make mutants`")

from benchmarks.mutants.run import Journal, Verdict, summarize
from benchmarks.mutants.sample import describe, draw, find_all

SOURCE = '''"""A file."""

LIMIT = 4096


def half(values: list[int | None], scale: float = 0.5) -> int | float:
    """Half of them."""
    found = [value for value in values if value is not None and value < LIMIT]
    return len(found) * scale - 1 if found else -1
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "half.py"
    path.write_text(SOURCE)
    return path


def test_changes_are_of_what_runs(file: Path) -> None:
    """Operators, comparisons, constants and conditions; not annotations; large numbers twice."""
    lines = [describe(mutant, SOURCE)[1] for mutant in find_all("half.py", SOURCE)]
    changed = {" ".join(line.split()) for line in lines}
    assert {"LIMIT = 8192", "LIMIT = 2048"} <= changed
    assert any("len(found) / scale - 1" in line for line in changed)
    assert any("value <= LIMIT" in line for line in changed)
    assert any("is None and value" in line for line in changed)
    assert any("is not None or value" in line for line in changed)
    assert not any(line.startswith("def half") and "int | None" not in line for line in changed)


def test_the_draw_is_seeded_and_changes_something(file: Path) -> None:
    """No place twice, other places for another seed, and each is another program."""
    some = draw([file], file.parent, 5, seed=3)
    assert some == draw([file], file.parent, 5, seed=3) != draw([file], file.parent, 5, seed=4)
    every = draw([file], file.parent, 1000, seed=3)
    places = [(mutant.line, mutant.column, mutant.operator.partition("_")[0]) for mutant in every]
    assert len(set(places)) == len(places) > 5
    before = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(mutant.text(SOURCE))) != before for mutant in every)


def test_the_journal_forgets_survivors(file: Path, tmp_path: Path) -> None:
    """They are judged again; the share counts them as missed until then, with their reason."""
    mutants = draw([file], file.parent, 4, seed=0)
    journal = Journal(tmp_path / "journal")
    verdicts = [
        Verdict(mutant, *describe(mutant, SOURCE), how, "", 1)
        for mutant, how in zip(
            mutants, ("survived", "a test fails", "no test runs it", "takes too long"), strict=True
        )
    ]
    for verdict in verdicts:
        journal.add(verdict)
    assert set(Journal(tmp_path / "journal").noticed.values()) == {verdicts[1], verdicts[3]}
    first = verdicts[0]
    why = {("half.py", first.before, first.after): "nothing needs it"}
    result = summarize([v for v in verdicts], why)
    assert (result["changes"], result["noticed"], result["share"]) == (4, 2, 0.5)
    assert [row["why"] for row in result["survivors"]] == ["nothing needs it", ""]
