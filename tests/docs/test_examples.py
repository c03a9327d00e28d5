"""The Python examples in README.md and docs/ run as they stand.

The ```python blocks of one file are executed in order, in one namespace and a temporary folder;
blocks of any other kind (console, bash, text) are not executed.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(number of its first line, code) of each ```python block."""
    found = BLOCK.finditer(text)
    return [(text.count("\n", 0, block.start(1)) + 1, dedent(block[1])) for block in found]


def run_blocks(path: Path) -> dict[str, object]:
    """Execute a file's blocks; the names they leave. Tracebacks point into the file itself."""
    names: dict[str, object] = {"__name__": "example"}
    for line, code in python_blocks(path.read_text(encoding="utf-8")):
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)
    return names


def documents() -> list[Path]:
    """README.md and the files under docs/ that have Python examples."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if python_blocks(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing raises and nothing warns."""
    monkeypatch.chdir(tmp_path)
    run_blocks(path)


def test_readme_has_an_example() -> None:
    """Otherwise the test above would check nothing of it."""
    assert ROOT / "README.md" in documents()


def test_a_wrong_example_fails(tmp_path: Path) -> None:
    """A planted fault in the second block is found, with its line; the first block ran."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_blocks(page)
    assert failure.traceback[-1].lineno + 1 == 10


def test_only_python_blocks_run(tmp_path: Path) -> None:
    """Shell blocks are left alone; a block inside a list item is dedented; names are shared."""
    page = tmp_path / "page.md"
    page.write_text(
        "```console\nrm x\n```\n\n1. item\n\n   ```python\n   x = 1\n   ```\n\n"
        "```bash\nexit 1\n```\n\n```python\ny = x + 1\n```\n"
    )
    assert run_blocks(page)["y"] == 2
