"""Tables in a page of the documentation that a command writes between markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MarkedTables:
    """command: that writes them, as the markers name it. sections: name of a table -> what makes
    its text."""

    command: str
    sections: Mapping[str, Callable[[], str]]

    def begin(self, name: str) -> str:
        """The line before a table."""
        return f"<!-- {name}: written by {self.command} -->"

    def end(self, name: str) -> str:
        """The line after it."""
        return f"<!-- end of {name} -->"

    def stale(self, text: str) -> Iterator[str]:
        """Names of the tables that a document lacks, has twice, or has as they were."""
        for name in self.sections:
            if text.count(self._marked(name)) != 1:
                yield name

    def fill(self, text: str) -> str:
        """A document with the present tables. Raises ValueError if it lacks a table's markers."""
        for name in self.sections:
            begin, end = self.begin(name), self.end(name)
            found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
            if found is None:
                raise ValueError(f"the document lacks {begin!r} or {end!r}")
            text = text[: found.start()] + self._marked(name) + text[found.end() :]
        return text

    def write(self, page: Path) -> None:
        """Writes the present tables into a page."""
        page.write_text(self.fill(page.read_text("utf-8")), encoding="utf-8")

    def _marked(self, name: str) -> str:
        return f"{self.begin(name)}\n\n{self.sections[name]()}\n\n{self.end(name)}"
