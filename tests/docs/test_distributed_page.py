"""docs/distributed.md: its tables are what the simulator of links says today."""

from __future__ import annotations

from lab.pages.distributed_tables import PAGE, TABLES

DOCUMENT = PAGE.read_text(encoding="utf-8")
KEPT = TABLES.kept()  # what the tests ask for, made once


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.distributed_tables."""
    assert list(KEPT.stale(DOCUMENT)) == []


def test_a_changed_figure_is_found_and_mended() -> None:
    """One digit of each table is enough."""
    stale = DOCUMENT
    for name in KEPT.sections:
        begin, end = KEPT.begin(name), KEPT.end(name)
        table = DOCUMENT.split(begin)[1].split(end)[0]
        at = max(place for place, letter in enumerate(table) if letter.isdigit())
        changed = table[:at] + str((int(table[at]) + 1) % 10) + table[at + 1 :]
        stale = stale.replace(table, changed)
    assert set(KEPT.stale(stale)) == set(KEPT.sections) and KEPT.fill(stale) == DOCUMENT
