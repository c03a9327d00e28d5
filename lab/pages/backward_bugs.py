"""The table of bugs that were put back for docs/backward.md, from tests/sm100/backward_bugs.py."""

from __future__ import annotations

from fa4.plan.render import markdown_table
from tests.sm100.backward_bugs import BUGS, CLASSES, ELSEWHERE, IMPOSSIBLE
from tests.sm100.backward_pair_bugs import PAIR_BUGS

TITLES = ("class", "what goes wrong", "put back as", "caught by")


def render_bugs() -> str:
    """A row for each bug, by class, then for each class that has none here."""
    rows = []
    for number, title in CLASSES.items():
        for name, one in (BUGS | PAIR_BUGS).items():
            if one.number == number:
                rows.append((number, title, name, one.caught))
        if number in ELSEWHERE:
            rows.append((number, title, "in another test", ELSEWHERE[number]))
        if number in IMPOSSIBLE:
            rows.append((number, title, "cannot be", IMPOSSIBLE[number]))
    return markdown_table(TITLES, rows)
