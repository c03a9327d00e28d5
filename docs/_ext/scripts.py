"""The programs of a page of the ladder, as a file to download and run."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

FOLDER = "_static/programs"
PAGES = re.compile(r"ladder/\d.*|tile")
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def script(name: str, text: str) -> str:
    """All programs of a page, in its order."""
    title = re.search(r"^# (.*)", text, re.MULTILINE)
    programs = [dedent(code).strip("\n") for code in BLOCK.findall(text)]
    head = f'"""{title[1] if title else name}: the programs of the page, in one file."""'
    return "\n\n".join([head, *programs]) + "\n"


def offer(app: Any, name: str, source: list[str]) -> None:
    """Keeps the file and links it at the end of the page."""
    if not PAGES.fullmatch(name):
        return
    file = Path(app.outdir, FOLDER, f"{Path(name).name}.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script(name, source[0]), encoding="utf-8")
    up = "../" * name.count("/")
    source[0] += (
        f'\n\n<p><a href="{up}{FOLDER}/{file.name}" download>The programs of this page</a>, '
        "in one file.</p>\n"
    )


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("source-read", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
