"""Each test file passes alone, in a process of its own: nothing it needs was left by another.

A few tests of a few files, drawn anew in each run; every file whole in the slow tests.
"""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drawn import draw_seed

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests").rglob("test_*.py")
    if path != Path(__file__)
)
DRAWN_FILES, DRAWN_TESTS = 2, 5
NOTHING_SELECTED = 5  # pytest's exit code: all tests of the file are slow, or want a GPU


def run_pytest(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """pytest in a new process, which knows nothing of this one."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=root, env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


def collect(*words: str) -> list[str]:
    """The names of the tests in a file; AssertionError with the output if it cannot be imported."""
    done = run_pytest("--collect-only", *words)
    assert done.returncode in (0, NOTHING_SELECTED), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def passes(done: subprocess.CompletedProcess[str], seed: int | None = None) -> None:
    """AssertionError with the output if a test failed."""
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"


def draw(seed: int, files: Sequence[str]) -> list[str]:
    """Tests of one of these files that has any without marks, in the order of the file."""
    choose = random.Random(seed)
    found: list[str] = []
    while not found:
        found = collect(choose.choice(files))
    return sorted(choose.sample(found, min(DRAWN_TESTS, len(found))), key=found.index)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(DRAWN_FILES))
def test_drawn_tests_pass_alone(number: int) -> None:
    """Of a file that is drawn now. To repeat it: run_pytest(*draw(SEED, FILES))."""
    seed = draw_seed()
    passes(run_pytest(*draw(seed, FILES)), seed)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("path", FILES)
def test_a_file_passes_alone(path: str) -> None:
    """All its tests that are neither slow nor want a GPU; where there are none, it is imported."""
    done = run_pytest(path)
    if done.returncode == NOTHING_SELECTED:
        assert collect(path, "-m", "")
    else:
        passes(done)


def has_tests(source: str) -> bool:
    """Does a file define a function that pytest collects, in a class or outside?"""
    return any(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        for node in ast.walk(ast.parse(source))
    )


def test_no_file_is_without_tests() -> None:
    """One whose tests were lost would pass for ever."""
    assert not has_tests("") and has_tests("class TestX:\n    def test(self): pass\n")
    assert [path for path in FILES if not has_tests((ROOT / path).read_text("utf-8"))] == []


def test_a_file_that_needs_another_is_found(tmp_path: Path) -> None:
    """Planted: a table that importing the other file fills. Together they pass, alone one fails."""
    (tmp_path / "table.py").write_text("ROWS = []\n")
    (tmp_path / "test_a.py").write_text("import table\ntable.ROWS.append(1)\ndef test(): pass\n")
    (tmp_path / "test_b.py").write_text("import table\ndef test(): assert table.ROWS\n")
    passes(run_pytest("test_a.py", "test_b.py", root=tmp_path))
    passes(run_pytest("test_a.py", root=tmp_path))
    with pytest.raises(AssertionError, match="1 failed"):
        passes(run_pytest("test_b.py", root=tmp_path))
