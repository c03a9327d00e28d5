"""The notebooks that the site offers: what they hold, and that they run as Jupyter would run them.

Their pages are executed with all others (test_examples.py).
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs._ext.notebooks import PAGES, notebook, offer

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


def made(name: str) -> dict[str, Any]:
    """A page as a notebook, through JSON."""
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    document: dict[str, Any] = json.loads(json.dumps(notebook(text)))
    return document


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_have_jupyters_form(name: str) -> None:
    """nbformat 4.5: kinds of cells, their keys, ids that are there once; no link to a page."""
    document = made(name)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    cells = document["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 6
    for cell in cells:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not any("```" in line or ".md" in line for line in cell["source"])
    assert cells[0]["source"][0].startswith("# ")
    assert sum(cell["cell_type"] == "code" and bool(cell["outputs"]) for cell in cells) >= 3


def test_a_notebook_runs_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in one namespace; each cell prints what is stored with it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in made("debug")["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            stored = "".join(line for output in cell["outputs"] for line in output["text"])
            assert printed.getvalue() == stored


def test_pages_are_cut_into_cells() -> None:
    """Text, program with output, program without, text; a link to a page becomes its words."""
    page = "# T\n\n[a](b.md) [c](https://d.org)\n\n```python\nx = 1\n```\n\n```output\n1\n```\n\n"
    page += "```python\ny = 2\n```\n\nend\n"
    cells = notebook(page)["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code", "markdown"]
    assert cells[0]["source"] == ["# T\n", "\n", "a [c](https://d.org)"]
    assert cells[1]["outputs"][0]["text"] == ["1\n"] and cells[2]["outputs"] == []
    assert [cell["execution_count"] for cell in cells[1:3]] == [1, 2]


def test_the_site_offers_each(tmp_path: Path) -> None:
    """A file, and a link to it; other pages have none."""
    app = SimpleNamespace(outdir=str(tmp_path))
    for name in [*NAMES, "index"]:
        source = [(FOLDER / f"{name}.md").read_text("utf-8")]
        offer(app, f"notebooks/{name}", source)
        assert (f"../_static/notebooks/{name}.ipynb" in source[0]) is (name != "index")
    files = sorted(path.stem for path in (tmp_path / "_static" / "notebooks").iterdir())
    assert files == NAMES == ["debug", "numerics", "tiles"]
    assert not PAGES.fullmatch("ladder/01-softmax")
