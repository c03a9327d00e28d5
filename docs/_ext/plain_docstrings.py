"""Docstrings are prose with `code` in it, not reStructuredText: only that much is read in them."""

from __future__ import annotations

import re
from typing import Any


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText that shows the same.

    Paragraphs with an indented line are shown as they are written; elsewhere what would be markup
    is escaped, except `code` and lists.
    """
    result: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        written = paragraph.splitlines()
        is_list = bool(re.match(r"- ", paragraph)) and all(re.match(r"- |  ", x) for x in written)
        if any(line.startswith((" ", "\t")) for line in written) and not is_list:
            result += ["::", "", *(f"    {line}" for line in written), ""]
        else:
            result += [*map(escape, written), ""]
    return result


def escape(line: str) -> str:
    """A line whose text, apart from `code`, means nothing but itself."""
    parts = re.split(r"(`+[^`]+`+)", line)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([\\*|_])", r"\\\1", parts[number])
    return "".join(parts)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For autodoc."""
    lines[:] = to_rst(lines)


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out what has no docstring of its own: the fields of named tuples."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
