"""What the Python examples of the pages print: executed, compared, written.

A ```python block of a page may be followed by an ```output block: exactly what it prints.
`python docs/outputs.py` runs the examples of README.md and of all pages (or of those that are
named) and writes their output blocks; `tests/docs/test_examples.py` holds them to it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"^ *```python\n(?P<code>.*?)^ *```$(?:\n+```output\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def documents() -> list[Path]:
    """README.md and the pages under docs/ that have Python examples."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if BLOCK.search(path.read_text(encoding="utf-8"))]


def run_blocks(path: Path) -> tuple[dict[str, object], str]:
    """Execute a page's ```python blocks, in order and in one namespace.

    Returns the names they leave, and the page with the output blocks that they print now.
    Tracebacks point into the page itself.
    """
    text = path.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "example"}
    pieces, end = [], 0
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + dedent(block["code"]), str(path), "exec"), names)
        if block["output"] is not None:
            pieces += [text[end : block.start("output")], printed.getvalue()]
            end = block.end("output")
    return names, "".join([*pieces, text[end:]])


def main(arguments: Sequence[str]) -> None:
    """Write the output blocks of the pages that are named, or of all of them."""
    pages = [Path(name).resolve() for name in arguments] or documents()
    for page in pages:
        if "```output" not in page.read_text(encoding="utf-8"):
            continue
        here = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                _, text = run_blocks(page)
            finally:
                os.chdir(here)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
