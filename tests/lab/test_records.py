"""Result files: each is listed, unedited, and of this code or said to be older."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lab import records
from lab.records import EDITED, OLDER, ROOT, Making, making_of, state_of, write_record
from lab.sources import SourceTree
from lab.table import BY_NAME, RECORDS
from tests.test_architecture import python_files

FOLDERS = ("lab/benchmarks/results", "lab/hardware/results")
SIMULATED = {  # whose programs import its costs; `fa4 bench` shares a module with `fa4 run`, and
    # fa4.distributed asks the simulator for a method
    "claims", "design", "forward_prediction", "halves_code", "hopper_bench", "hopper_counters",
    "hopper_designs", "hopper_splits", "mutants", "predictions", "ranks_of_one_gpu",
    "sim", "two_gpus", "validation",
}  # fmt: skip
NUMBER = re.compile(r"^([A-Z][A-Z_]+ = )(\d)", re.MULTILINE)


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    """The project as it stands."""
    return SourceTree(ROOT)


def test_every_result_file_is_listed() -> None:
    """And every one that is listed is there; names are unique."""
    found = {str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).iterdir()}
    listed = {path for record in RECORDS for path in (record.path, *record.tables)}
    assert {path for path in listed if path.startswith(FOLDERS)} == found
    assert len(BY_NAME) == len(RECORDS)
    assert all((ROOT / path).is_file() for path in listed)
    assert sorted(json.loads(records.LEDGER.read_text("utf-8"))) == sorted(BY_NAME)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_record_is_unedited_and_of_this_code(name: str, tree: SourceTree) -> None:
    """If not: `make records`. What needs a GPU or hours may be older; its pages then say so."""
    record, state = BY_NAME[name], state_of(name, tree)
    assert state != EDITED
    if record.needs is None and record.recomputed_by is None:
        assert state == records.CURRENT, f"{state}: {record.command}"


def test_records_that_tests_compute_again() -> None:
    """The tests exist; who may be old says why, and is not computed again."""
    for record in RECORDS:
        assert not (record.needs and record.recomputed_by)
        if record.recomputed_by:
            path, _, test = record.recomputed_by.partition("::")
            defined = ast.parse((ROOT / path).read_text("utf-8")).body
            assert test in [node.name for node in defined if isinstance(node, ast.FunctionDef)]


def planted(tree: SourceTree, module: str, text: str) -> set[str]:
    """Records that are made from other sources once a module has this text."""
    changed = SourceTree(ROOT, {module: text})
    return {
        record.name
        for record in RECORDS
        if tree.fingerprint(record.modules) != changed.fingerprint(record.modules)
    }


def test_a_cost_makes_its_dependants_stale_and_no_other(tree: SourceTree) -> None:
    """One number of the simulator's costs; a comment and a docstring make none."""
    text = tree.text("fa4.sim.costs")
    changed, count = NUMBER.subn(r"\g<1>9\2", text, count=1)
    assert count == 1
    assert planted(tree, "fa4.sim.costs", changed) == SIMULATED
    commented = text.replace('"""', '"""Planted. ', 1) + "\n# planted\n"
    assert planted(tree, "fa4.sim.costs", commented) == set()


def test_a_file_that_is_read_makes_a_record_stale(tree: SourceTree, tmp_path: Path) -> None:
    """Planted: another row in a table of measurements; and another byte in the record."""
    name = "validation"
    making = replace(making_of(name), content=records.content_of(name), clean=True, commit="0",
                     sources=tree.fingerprint(BY_NAME[name].modules),
                     files=records.hash_files(name, tree))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "making_of", lambda _: making)
        assert state_of(name, tree) == records.CURRENT
        path = next(iter(making.files))
        patch.setattr(records, "making_of", lambda _: replace(making, files={path: "0"}))
        assert state_of(name, tree) == OLDER
        patch.setattr(records, "making_of", lambda _: replace(making, content="0"))
        assert state_of(name, tree) == EDITED
        unknown = replace(making, sources=None)
        patch.setattr(records, "making_of", lambda _: unknown)
        assert state_of(name, tree) == records.UNKNOWN


def test_no_sources_of_a_tree_with_changes() -> None:
    """Nobody knows what they were."""
    with pytest.raises(ValueError, match="only a clean commit has known sources; got '12ab'"):
        Making(content="0", sources="1", commit="12ab", clean=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in which records are written."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        (tmp_path / "lab/benchmarks").mkdir(exist_ok=True, parents=True)
        (tmp_path / "lab/benchmarks/features.py").write_text("X = 1\n")
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "LEDGER", tmp_path / "lab/ledger.json")
    return tmp_path


def test_a_record_is_written_from_a_clean_tree_alone(project: Path) -> None:
    """Its numbers are kept elsewhere otherwise; other files are nobody's record."""
    path = project / "lab/benchmarks/results/features.json"
    write_record(path, {"kernels": []}, ("pytest",))
    making = making_of("features")
    assert making.clean and making.commit and making.versions["pytest"] == pytest.__version__
    assert state_of("features", SourceTree(project)) == records.CURRENT
    write_record(path, {"kernels": [1]})  # a record written before it is no change
    assert records.read_record("features") == {"kernels": [1]}

    (project / "lab/benchmarks/features.py").write_text("X = 2\n")
    with pytest.raises(ValueError, match=r"features is not recorded: lab/benchmarks/fe"):
        write_record(path, {"kernels": [2]})
    assert records.read_record("features") == {"kernels": [1]}
    kept = project / "out" / path.name
    assert json.loads(kept.read_text("utf-8")) == {"kernels": [2]}
    assert state_of("features", SourceTree(project)) == OLDER
    write_record(project / "features.json", {"kernels": [3]})
    with records.tree_at("HEAD") as before:
        assert state_of("features", before) == records.CURRENT


def test_a_record_in_parts_is_of_no_one_tree(project: Path) -> None:
    """Some of it is kept from an earlier run."""
    write_record(project / "lab/benchmarks/results/features.json", {}, whole=False)
    assert state_of("features", SourceTree(project)) == records.UNKNOWN


def opened(text: str) -> list[str]:
    """Result files that a program opens by their path instead of by their record's name."""
    return re.findall(r"""["'/](?:results/)?(\w+\.json)["'][^\n]*(?:read_text|open)\(""", text)


def test_programs_read_records_by_their_names() -> None:
    """Through read_record, whose names are those of the table."""
    files = {Path(record.path).name for record in RECORDS} - {"verdicts.json"}
    texts = python_files("lab", "tests")
    assert [(path, x) for path, text in texts for x in opened(text) if x in files] == []
    assert opened('json.loads((RESULTS / "x' + '.json").read_text())') == ["x.json"]
