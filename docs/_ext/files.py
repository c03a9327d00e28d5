"""Links of a page to files of the project that are no pages: the site holds a copy of each.

What MyST would not copy is prepared here: a folder is shown without a link, a Markdown file from
outside of this folder as a file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)\)")


def rewrite(text: str, folder: Path, docs: Path) -> str:
    """The text of a page in `folder` with links that MyST resolves. `docs`: where the pages are."""

    def change(match: re.Match[str]) -> str:
        label, target = match.groups()
        path = (folder / target).resolve()
        if path.is_dir():
            return label
        if path.suffix == ".md" and not path.is_relative_to(docs) and path.is_file():
            return f"{{download}}`{label.strip('`')} <{target}>`"
        return match.group()

    return LINK.sub(change, text)


def read(app: Any, name: str, source: list[str]) -> None:
    """For Sphinx, which has read a page."""
    docs = Path(app.srcdir)
    source[0] = rewrite(source[0], (docs / name).parent, docs)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
