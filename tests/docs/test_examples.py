"""The Python examples in README.md and docs/ run as they stand and print what the page shows.

The ```python blocks of one file are executed in order, in one namespace and a temporary folder;
an ```output block behind one is what it prints. Blocks of any other kind (console, py, text) are
not executed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.outputs import ROOT, documents, run_blocks


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing raises, nothing warns, outputs are those of the page: else python docs/outputs.py."""
    monkeypatch.chdir(tmp_path)
    _, text = run_blocks(path)
    assert text == path.read_text(encoding="utf-8")


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


def test_a_stale_output_is_mended(tmp_path: Path) -> None:
    """Another figure, an empty block; what stands around them is kept."""
    page = tmp_path / "page.md"
    right = "# Page\n\n```python\nprint(1 + 1)\nprint()\n```\n\n```output\n2\n\n```\n\nend\n"
    for shown in ("2\n\n", "3\n\n", ""):
        page.write_text(right.replace("2\n\n", shown))
        assert run_blocks(page)[1] == right


def test_only_python_blocks_run(tmp_path: Path) -> None:
    """Shell blocks are left alone; a block inside a list item is dedented; names are shared."""
    page = tmp_path / "page.md"
    page.write_text(
        "```console\nrm x\n```\n\n1. item\n\n   ```python\n   x = 1\n   ```\n\n"
        "```bash\nexit 1\n```\n\n```python\ny = x + 1\n```\n"
    )
    assert run_blocks(page)[0]["y"] == 2


def test_what_does_not_run_is_marked() -> None:
    """Every block of a page says what it is; code that is Python and not run is ```py."""
    marked = ["bash", "console", "cuda", "mermaid", "output", "sql", "text", "toml"]
    kinds = {"py", "python", *marked}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        fences = [line for line in lines if line.startswith("```")]
        opened = {line[3:] for line in fences[::2]}
        assert {line for line in fences[1::2]} <= {"```"}, path
        assert {kind for kind in opened if not kind.startswith("{")} <= kinds, (path, opened)
