"""Writes how old the recorded results are: docs/records.md, lab/hardware/README.md, and at the end
of every page that quotes a record of a GPU, of a machine's times or of hours.

    python -m lab.pages.record_tables

What tests compute again is not listed there: it is of the code, or they fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from fa4.plan.render import markdown_table
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import ROOT, making_of, state_of
from lab.sources import SourceTree
from lab.table import BY_NAME, GPU, RECORDS, Record

COMMAND = "python -m lab.pages.record_tables"
PAGE, HARDWARE = DOCS / "records.md", ROOT / "lab" / "hardware" / "README.md"
APART = ("docs/records.md", "docs/hardware.md", "docs/notes/")  # the list itself; dated by name
GENERATOR = re.compile(r": written by python -m lab\.pages\.(\w+) -->")


@cache
def _tree() -> SourceTree:
    return SourceTree(ROOT)


def held_by(record: Record) -> str:
    """What keeps a record and the code together."""
    if record.recomputed_by:
        return "computed again by the tests"
    return f"needs {record.needs}" if record.needs else "the tests refuse an older one"


def age(record: Record) -> tuple[str, str, str, str]:
    """Machine, day, commit, and whether the code has changed since."""
    making = making_of(record.name)
    commit = f"`{making.commit[:7]}`" if making.commit else "unknown"
    changes = ", with changes" if making.clean is False else ""
    now = state_of(record.name, _tree()) if record.needs else "of this code"
    return making.machine or "unknown", (making.date or "")[:10] or "unknown", commit + changes, now


def render_all() -> str:
    """Every record: its command, what holds it to the code, where and when it was made."""
    rows = [
        (f"[{record.name}](../{record.path})", f"`{record.command}`", held_by(record), *age(record))
        for record in sorted(RECORDS, key=lambda record: record.name)
    ]
    names = ("record", "made by", "held to the code", "machine", "day", "commit", "now")
    return markdown_table(names, rows)


def render_ages(records: Iterable[Record]) -> str:
    """Machine, day, commit and age of some."""
    rows = [(f"`{record.name}`", *age(record)) for record in records]
    return markdown_table(("record", "machine", "day", "commit", "now"), rows)


def quoted(text: str) -> list[Record]:
    """Records that a page quotes and that may be older than the code: in the marker of a number, by
    the file's name, or in a table whose program reads it."""
    names = sorted(set(GENERATOR.findall(text)))
    programs = [(ROOT / f"lab/pages/{name}.py").read_text("utf-8") for name in names]
    found = set(re.findall(r"<!--=(\w+): ", text)) | set(re.findall(r"results/(\w+)\.", text))
    for program in programs:
        found |= set(re.findall(r'read_record\("(\w+)"', program))
    found |= {x.name for x in RECORDS if any(table in text for table in x.tables)}
    return [BY_NAME[name] for name in sorted(found) if name in BY_NAME and BY_NAME[name].needs]


def tables_of(path: Path) -> MarkedTables:
    """The tables of a page."""
    if path == PAGE:
        return MarkedTables(COMMAND, {"records": render_all})
    if path == HARDWARE:
        shown = sorted((x for x in RECORDS if x.needs == GPU), key=lambda record: record.name)
    else:
        shown = quoted(path.read_text("utf-8"))
    return MarkedTables(COMMAND, {"records": lambda: render_ages(shown)})


def pages() -> Iterator[Path]:
    """The list, the hardware's, and every page that quotes a record."""
    yield from (PAGE, HARDWARE)
    for path in sorted(DOCS.rglob("*.md")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(APART) and quoted(path.read_text("utf-8")):
            yield path


if __name__ == "__main__":
    for page in pages():
        tables_of(page).write(page)
