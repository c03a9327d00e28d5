"""What commands write into pages of the documentation: tables between markers, and the numbers of
sentences, each behind a marker that names the claim it makes.

    <!-- costs: written by python -m lab.pages.simulator_tables -->     a table, up to its last line
    predicted <!--=headline-->1573 TFLOP/s                          a number, right behind
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SIGN = "<!--="  # the beginning of a number's marker
ALONE = re.compile(r"^[ >]*(?:[-*] +)?<!--=[^>]*>", re.MULTILINE)  # would be a block of HTML
NUMBER = re.compile(r"<!--=(?P<name>[^<>]+)-->(?P<number>[-+]?\d+(?:[.,]\d+)*%?)")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
TABLE = re.compile(
    r"^<!-- (?P<name>[^:\n]+): written by (?P<command>[^>\n]+) -->$.*?^<!-- end of [^>\n]+ -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class MarkedTables:
    """command: that writes them, as the markers name it. sections: name of a table -> what makes
    its text."""

    command: str
    sections: Mapping[str, Callable[[], str]]

    def kept(self) -> MarkedTables:
        """The same tables, each made when it is first asked for and never again."""
        return MarkedTables(self.command, {name: cache(x) for name, x in self.sections.items()})

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


@dataclass(frozen=True)
class MarkedNumbers:
    """claims: name of a claim -> what says its number today, as text."""

    claims: Mapping[str, Callable[[], str]]

    def stale(self, text: str) -> Iterator[str]:
        """The claims whose number a document has as it was, and what it says instead.

        Raises ValueError for a marker that names no claim, has no number behind it, or begins a
        line, which Markdown would take for HTML as a whole.
        """
        for match in self._marked(text):
            now = self.claims[match["name"]]()
            if match["number"] != now:
                yield f"{match['name']}: {match['number']}, now {now}"

    def fill(self, text: str) -> str:
        """A document with the present numbers. Raises as `stale` does, and for a percent sign that
        only one of both has."""
        for match in reversed(list(self._marked(text))):
            now = self.claims[match["name"]]()
            if now.endswith("%") != match["number"].endswith("%"):
                raise ValueError(f"{match['name']} is {now}; the document has {match['number']}")
            text = text[: match.start("number")] + now + text[match.end("number") :]
        return text

    def _marked(self, text: str) -> Iterator[re.Match[str]]:
        if alone := ALONE.search(text):
            raise ValueError(f"a line must not begin with {alone.group().strip()!r}")
        found = list(NUMBER.finditer(text))
        begun = [place.start() for place in re.finditer(re.escape(SIGN), text)]
        for place in set(begun).difference(match.start() for match in found):
            raise ValueError(f"no number behind {text[place:].partition('>')[0] + '>'!r}")
        for match in found:
            if match["name"] not in self.claims:
                raise ValueError(f"no claim {match['name']!r}; they are in lab/pages/claims.py")
            yield match


def sentences(text: str) -> str:
    """A document without its programs, what they print, and the tables that commands write; lines
    stay where they are."""
    for kind in (TABLE, FENCED):
        text = kind.sub(lambda match: "\n" * match.group().count("\n"), text)
    return text
