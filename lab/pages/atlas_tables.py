"""The tables of docs/atlas.md: the records of `fa4.testing.atlas`.

`python -m lab.pages.atlas_tables` writes them between their markers in that page.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial

from fa4.plan.render import markdown_table
from fa4.testing import Case
from fa4.testing.atlas import BUGS, THEMES, Bug
from fa4.testing.atlas.bug import ordinary
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables

PAGE = DOCS / "atlas.md"


def describe_case(case: Case) -> str:
    """The fields in which a case differs from an ordinary one, as source."""
    usual = ordinary()
    differing = [
        f"{field.name}={getattr(case, field.name)!r}"
        for field in fields(case)
        if getattr(case, field.name) != getattr(usual, field.name)
    ]
    return ", ".join(differing) or "as it is"


def describe_cases(bug: Bug) -> str:
    """The calls that show a bug, and what is judged if it is not O and the LSE."""
    calls = [f"`{describe_case(case)}`" for case in bug.cases]
    shown = (
        f"{calls[0]}, {len(calls)} times" if len(set(calls)) < len(calls) else ", then ".join(calls)
    )
    judged = {
        "forward": "",
        "gradients": "gradients; ",
        "gradients_lse": "gradients with one of the LSE; ",
        "lse_requested": "with and without the LSE; ",
    }[bug.probe]
    arranged = f"; {bug.arrangement}" if bug.arrangement else ""
    return f"{judged}{shown}{arranged}"


def render_theme(theme: str) -> str:
    """A row for each bug."""
    rows = [
        (bug.where, bug.summary.replace("|", "\\|"), bug.versions, describe_cases(bug))
        for bug in THEMES[theme]
    ]
    return markdown_table(("where", "what went wrong", "versions", "smallest case"), rows)


def render_repositories() -> str:
    """How many bugs each repository has here, the most first."""
    counts = Counter(bug.repository for bug in BUGS.values())
    rows = [(name, str(count)) for name, count in counts.most_common() if count > 1]
    alone = [name for name, count in counts.items() if count == 1]
    rows.append((f"{len(alone)} others", str(len(alone))))
    return markdown_table(("repository", "bugs"), [*rows, ("all", str(len(BUGS)))])


TABLES = MarkedTables(
    "python -m lab.pages.atlas_tables",
    {"repositories": render_repositories}
    | {theme: partial(render_theme, theme) for theme in THEMES},
)

if __name__ == "__main__":
    TABLES.write(PAGE)
