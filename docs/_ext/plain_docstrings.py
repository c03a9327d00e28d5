"""Docstrings are prose with `code` in it, not reStructuredText: only that much is read in them."""

from __future__ import annotations

import re
from typing import Any

SECTIONS = ("Args:", "Returns:", "Raises:")


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText that shows the same.

    The sections of arguments, results and errors become lists; other paragraphs with an indented
    line are shown as they are written; elsewhere what would be markup is escaped, except `code` and
    lists.
    """
    result: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        written = paragraph.splitlines()
        is_list = written and all(re.match(r"- |  ", line) for line in written)
        is_list = is_list and written[0].startswith("- ")
        if written and written[0] in SECTIONS:
            result += [f"**{written[0].rstrip(':')}**", "", *entries(written[1:]), ""]
        elif any(line.startswith((" ", "\t")) for line in written) and not is_list:
            result += [".. code-block:: text", "", *(f"    {line}" for line in written), ""]
        else:
            result += [*map(escape, written), ""]
    return result


def entries(lines: list[str]) -> list[str]:
    """A list of a section's entries; a line that is indented further goes on with the last one."""
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    result: list[str] = []
    for line in (line[indent:] for line in lines):
        named = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if line.startswith(" ") or (result and not named):
            result[-1] += " " + escape(line.strip())
        elif named:
            result.append(f"- ``{named[1]}``: {escape(named[2])}")
        else:
            result.append(f"- {escape(line)}")
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
