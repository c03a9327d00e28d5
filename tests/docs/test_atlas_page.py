"""docs/atlas.md: its tables are the records of the atlas."""

from __future__ import annotations

import pytest

from fa4.testing.atlas import BUGS, THEMES
from fa4.testing.atlas.bug import ordinary
from lab.pages.atlas_tables import PAGE, TABLES, describe_case, describe_cases

DOCUMENT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.atlas_tables."""
    assert list(TABLES.stale(DOCUMENT)) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_changed_word_is_found_and_mended(theme: str) -> None:
    """Of any entry."""
    bug = THEMES[theme][-1]
    stale = DOCUMENT.replace(bug.summary, bug.summary + " Or so.")
    assert list(TABLES.stale(stale)) == [theme] and TABLES.fill(stale) == DOCUMENT


def test_every_bug_is_on_the_page_once() -> None:
    """In the table of its theme."""
    for bug in BUGS.values():
        assert DOCUMENT.count(f"| {bug.where} |") == 1
    assert f"| all | {len(BUGS)} |" in DOCUMENT
    verify = PAGE.with_name("verify.md").read_text(encoding="utf-8")
    assert f"only [{len(BUGS)} published bugs](atlas.md)" in verify


def test_cases_are_told_by_what_is_special_in_them() -> None:
    """And by what is judged of them."""
    assert describe_case(ordinary()) == "as it is"
    assert describe_case(ordinary(causal=True, head_dim=128)) == "head_dim=128, causal=True"
    nan = describe_cases(BUGS["pytorch#196678"])
    assert nan.startswith("gradients; `") and "values='low'" in nan
    assert describe_cases(BUGS["flash-attention#2756"]).endswith("`, 4 times")
    assert "`, then `" in describe_cases(BUGS["b12x#63"])
    assert describe_cases(BUGS["flash-attention#325"]).endswith("; expanded dO")
