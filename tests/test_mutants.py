"""The sample of single changes: seeded, sensible, and none that is no change."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cosmic_ray", reason="installed by `make mutants`")

from lab.benchmarks.mutants import run
from lab.benchmarks.mutants.run import (
    ROOT,
    Journal,
    Record,
    Verdict,
    find_passing,
    judge_all,
    summarize,
    try_tests,
)
from lab.benchmarks.mutants.sample import Mutant, describe, draw, find_all
from lab.benchmarks.mutants.survivors import WHY
from lab.records import read_record

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


def identities(mutants: list[Mutant]) -> set[tuple[str, str, str, int]]:
    return {mutant.identity for mutant in mutants}


def test_edits_elsewhere_leave_the_sample(file: Path) -> None:
    """Lines before, deeper indentation, or a new file change nothing of what they do not hold."""
    some = draw([file], file.parent, 6, seed=3)
    moved = "".join(f"    {line}" if line.strip() else line for line in SOURCE.splitlines(True))
    file.write_text(f"NAME = 'half'\n\nif NAME:\n{moved}")
    again = draw([file], file.parent, 6, seed=3)
    kept = [mutant for mutant in again if mutant.code not in ("NAME = 'half'", "if NAME:")]
    assert identities(kept) == identities(some[: len(kept)]) and len(kept) >= 5
    assert all(a.line == b.line + 3 for a, b in zip(kept, some, strict=False))
    other = file.with_name("other.py")
    other.write_text("FIRST = 7\nSECOND = 70\n")
    both = draw([file, other], file.parent, 6, seed=3)
    kept = [mutant for mutant in both if mutant.path == "half.py"]
    assert len(kept) >= 4 and identities(kept) == identities(again[: len(kept)])


def test_equal_lines_are_told_apart() -> None:
    """By their number, each change of each once; an equal line more leaves the others' numbers."""
    one = find_all("x.py", "a = 1\n")
    two = find_all("x.py", "a = 1\nb = a\na = 1\n")
    assert len(identities(two)) == len(two) == 2 * len(one) > 0
    assert identities(one) < identities(two)
    assert len({(mutant.family, mutant.place) for mutant in two}) == 2


@pytest.fixture
def judged(monkeypatch) -> None:
    """A judge in place of tests: it leaves a mark in its copy and takes longer for the first."""

    def judge(copy: Path, mutant: Mutant, record: object) -> Verdict:
        (copy / f"judged-{mutant.line}-{mutant.column}").write_text(mutant.operator)
        time.sleep(0.3 if mutant.line == record.slow else 0.05)  # type: ignore[attr-defined]
        return Verdict(mutant, mutant.code, "", "a test fails", f"{os.getpid()} {copy}", 1)

    monkeypatch.setattr(run, "judge", judge)


@pytest.mark.usefixtures("judged")
def test_several_processes_judge(file: Path, tmp_path: Path) -> None:
    """Each in its own copy; in order; one line of the journal each, from which a run goes on."""
    mutants = draw([file], file.parent, 8, seed=1)
    template, record = tmp_path / "template", SimpleNamespace(slow=mutants[0].line)
    template.mkdir()
    deadline, kept = time.monotonic() + 600, tmp_path / "journal"
    first = judge_all(mutants[:6], template, record, deadline, Journal(kept), 2)
    assert [verdict.mutant for verdict in first] == mutants[:6]
    workers = {tuple(verdict.by.split()) for verdict in first}
    assert len(workers) == len({copy for _, copy in workers}) == 2
    assert str(os.getpid()) not in {process for process, _ in workers}
    assert not any(Path(copy).exists() for _, copy in workers) and not any(template.iterdir())
    lines = [json.loads(line)["mutant"] for line in kept.read_text().splitlines()]
    assert identities([Mutant(**line) for line in lines]) == identities(mutants[:6])
    assert len(lines) == 6
    file.write_text("\n\n" + SOURCE)  # other line numbers, the same changes
    moved = draw([file], file.parent, 8, seed=1)
    assert judge_all(moved, template, record, 0.0, Journal(kept), 2) == first
    every = judge_all(moved, template, record, deadline, Journal(kept), 2)
    assert every[:6] == first and [verdict.mutant for verdict in every[6:]] == moved[6:]


@pytest.mark.parametrize(
    ("test", "how"),
    [
        (
            f"@pytest.mark.parametrize('x', range(2000))\ndef test_{'of_a_long_name' * 3}(x): pass",
            "survived",
        ),
        ("def test(): assert 0", "a test fails"),
        ("import nothing_of_that_name", "import fails"),
        ("import os\ndef test(): os._exit(3)", "crashes with exit code 3"),
        ("def test():\n    while True: pass", "takes too long"),
        ("import time\ndef test(): time.sleep(60)", "takes too long"),
    ],
    ids=lambda text: text[-12:],
)
def test_what_becomes_of_a_change(test: str, how: str, tmp_path: Path) -> None:
    """That it survives is told with the names of all tests, more than a pipe holds."""
    (tmp_path / "test_it.py").write_text("import pytest\n" + test)
    limit_seconds = 2.0 if how == "takes too long" else 60.0
    assert try_tests(tmp_path, ["test_it.py"], limit_seconds)[0] == how


def test_what_fails_without_a_change_is_left_out(tmp_path: Path) -> None:
    """Where changes are judged a test may fail, or a file crash: they notice nothing there."""
    (tmp_path / "test_one.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    (tmp_path / "test_two.py").write_text("import os\ndef test_crash(): os._exit(3)\n")
    assert find_passing(tmp_path, "test_one.py", 1.0) == ["test_one.py::test_right"]
    assert find_passing(tmp_path, "test_two.py", 1.0) == []
    kept = tmp_path / "record.json"
    names = {"test_one.py::test_right": 1.0, "test_one.py::test_wrong": 2.0, "test_two.py::x": 5.0}
    lines = {"fa4/half.py": {"4": [0, 1], "6": [1]}}
    kept.write_text(json.dumps({"seconds": names, "failed": ["test_two.py::y"], "lines": lines}))
    record = Record(kept)
    assert record.files() == [("test_two.py", 5.0), ("test_one.py", 3.0)]
    record.leave_out(["test_one.py::test_wrong"])
    assert record.failed == ["test_one.py::test_wrong", "test_two.py::y"]
    assert record.tests_of(Mutant("fa4/half.py", "", 0, 4, 0, "", 0, 0)) == [
        "test_one.py::test_right"
    ]
    assert record.tests_of(Mutant("fa4/half.py", "", 0, 6, 0, "", 0, 0)) == [
        "test_one.py::test_right"
    ]


@pytest.mark.parametrize("key", WHY, ids=lambda key: key[1][:40])
def test_explanations_are_of_changes_that_there_are(key: tuple[str, str, str]) -> None:
    """Each names a change of the line that it names (see tests/lab/test_survivors.py)."""
    path, before, after = key
    source = (ROOT / path).read_text(encoding="utf-8")
    changes = [mutant for mutant in find_all(path, source) if mutant.code == before]
    assert (before, after) in {describe(mutant, source) for mutant in changes}


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


@pytest.mark.parametrize(("name", "count"), [("mutants", 300), ("mutants_testing", 160)])
def test_the_recorded_run_noticed_enough(name: str, count: int) -> None:
    """Of the whole sample, in every package that tests run; what was missed says why."""
    found = read_record(name)
    assert found["changes"] == found["noticed"] + len(found["survivors"]) == count
    assert found["share"] == round(found["noticed"] / count, 4) >= run.LEAST_SHARE
    assert set(found["packages"]) == set(found["packages_changed"])
    assert len(found["noticed_by"]) == found["noticed"]
    assert all(row["why"] for row in found["survivors"])
