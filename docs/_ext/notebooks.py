"""The pages of notebooks/, as notebooks for Jupyter: text, programs and what they print.

A page and its notebook are one source, so that the page's test is the notebook's. Links to other
pages become their words: a notebook on its own has no pages beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

FOLDER = "_static/notebooks"
PAGES = re.compile(r"notebooks/(?!index)\w+")
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n+```output\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
PAGE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")


def notebook(text: str) -> dict[str, Any]:
    """A page in Jupyter's format (nbformat 4.5): cells of text and programs, in its order."""
    cells: list[dict[str, Any]] = []
    end = 0
    for block in BLOCK.finditer(text):
        _add_text(cells, text[end : block.start()])
        shown = block["output"]
        printed = [{"output_type": "stream", "name": "stdout", "text": _lines(shown)}]
        runs = 1 + sum(cell["cell_type"] == "code" for cell in cells)
        cells.append({
            "cell_type": "code", "id": f"cell-{len(cells)}", "metadata": {},
            "execution_count": runs, "source": _lines(dedent(block["code"]).rstrip("\n")),
            "outputs": printed if shown else [],
        })  # fmt: skip
        end = block.end()
    _add_text(cells, text[end:])
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
             "language_info": {"name": "python"}}  # fmt: skip
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    plain = PAGE_LINK.sub(r"\1", text).strip()
    if plain:
        cells.append({"cell_type": "markdown", "id": f"cell-{len(cells)}", "metadata": {},
                      "source": _lines(plain)})  # fmt: skip


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines(keepends=True)


def offer(app: Any, name: str, source: list[str]) -> None:
    """Keeps the file and links it at the end of the page."""
    if not PAGES.fullmatch(name):
        return
    file = Path(app.outdir, FOLDER, f"{Path(name).name}.ipynb")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(notebook(source[0]), indent=1, ensure_ascii=False)
    file.write_text(content + "\n", encoding="utf-8")
    source[0] += (
        f'\n\n<p><a href="../{FOLDER}/{file.name}" download>This page as a notebook</a> for '
        "Jupyter.</p>\n"
    )


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("source-read", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
