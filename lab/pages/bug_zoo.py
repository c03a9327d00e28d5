"""docs/how-to/bugs.md: classes of bugs, and what the emulator says of each.

`python -m lab.pages.bug_zoo` writes the tables from the kernels of tests/emulator/bug_zoo.py, which
are run by the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fa4.emulator.kinds import kind_of
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from tests.emulator.bug_zoo import GROUPS, Bug

PAGE = DOCS / "how-to" / "bugs.md"
SHOWN = 60


def row(bug: Bug) -> str:
    """One class: what is wrong, the finding, what mends it."""
    section = kind_of(bug.kind).section
    formal = " (formal)" if bug.severity == "formal" else ""
    mended = " ".join(bug.mended.split())
    shown = f"`{mended if len(mended) <= SHOWN else mended[: SHOWN - 3] + '...'}`" if mended else ""
    if bug.broken:
        shown += f" instead of `{bug.broken}`" if len(bug.broken) <= SHOWN else ""
    shown = shown.strip() if mended else "without it"
    story = bug.story.removesuffix(".")
    return f"| {bug.name} | {story} | `{bug.kind}`{formal} | {section} | {shown} |"


def render(bugs: Sequence[Bug]) -> str:
    """The table of a group."""
    head = "| bug | what is wrong | finding | PTX ISA | mended by |\n|---|---|---|---|---|"
    return "\n".join([head, *map(row, bugs)])


TABLES = MarkedTables(
    "python -m lab.pages.bug_zoo", {name: partial(render, bugs) for name, bugs in GROUPS.items()}
)


if __name__ == "__main__":
    TABLES.write(PAGE)
