"""docs/how-to/bugs.md: classes of bugs, and what the emulator says of each.

`python -m lab.pages.bug_zoo` writes the tables from the kernels of lab/bug_zoo.py, which
are run by the tests, and from what a GPU's tools said of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fa4.emulator.kinds import kind_of
from lab.bug_zoo import GROUPS, Bug
from lab.hardware.sanitizer_zoo import TOOLS, verdict
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

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


def render_tools() -> str:
    """What compute-sanitizer says of the broken kernels that were run under it."""
    record: dict[str, Any] = read_record("sanitizer_zoo")
    kinds = {bug["name"]: bug["kind"] for bug in record["bugs"]}
    by_bug: dict[str, dict[str, str]] = {name: {} for name in kinds}
    for row in record["runs"]:
        if row["variant"] == "broken":
            by_bug[row["bug"]][row["tool"]] = verdict(row)
    seen = {name: found for name, found in by_bug.items() if found}
    by_tool = {tool: sum(f.get(tool) == "found" for f in seen.values()) for tool in TOOLS}
    some = sum("found" in found.values() for found in seen.values())
    gpu, driver, *_ = record["gpu"].split(", ")
    counts = ", ".join(f"{tool} {count}" for tool, count in by_tool.items())
    others = len(by_bug) - len(seen)
    left = f" The other {others}, those that hang among them, were not run." if others else ""
    head = ["bug", "emulator", "on the GPU", *TOOLS]
    lines = [
        f"{gpu}, driver {driver}. Of {len(seen)} broken kernels the emulator finds {len(seen)}, a "
        f"tool of compute-sanitizer {some}: {counts}.{left}",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for name, found in seen.items():
        cells = [name, f"`{kinds[name]}`", *(found.get(tool, "not run") for tool in ("", *TOOLS))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = MarkedTables(
    "python -m lab.pages.bug_zoo",
    {name: partial(render, bugs) for name, bugs in GROUPS.items()} | {"tools": render_tools},
)


if __name__ == "__main__":
    TABLES.write(PAGE)
