"""docs/simulator.md: its tables are those of the cost model, which has a source for each figure."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fa4.sim.cost_table import FREE_CONSTANTS, CostTable
from lab.pages.simulator_tables import (
    OWN_PICTURE,
    PAGE,
    PICTURE,
    SECTIONS,
    TABLES,
    draw_sweep,
    own_swept,
    swept,
    unit,
)

DOCUMENT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.simulator_tables."""
    assert list(TABLES.stale(DOCUMENT)) == []


def test_the_pictures_are_up_to_date() -> None:
    """Written by the same command."""
    assert PICTURE.read_text(encoding="utf-8") == draw_sweep(swept())
    assert OWN_PICTURE.read_text(encoding="utf-8") == draw_sweep(own_swept())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_table_is_found_and_mended(name: str) -> None:
    """Planted: one changed digit or letter in a table, or a table that is not there."""
    table, end = SECTIONS[name](), TABLES.end(name)
    changed = DOCUMENT.replace(table, table[:-3] + "?" + table[-2:])
    assert list(TABLES.stale(changed)) == [name] and TABLES.fill(changed) == DOCUMENT
    with pytest.raises(ValueError, match=end):
        TABLES.fill(DOCUMENT.replace(end, ""))


def test_every_figure_is_listed_once() -> None:
    """With its unit and its source, among the costs or among the free constants."""
    tables = [render() for render in SECTIONS.values()]
    for item in fields(CostTable):
        assert sum(table.count(f"| `{item.name}` | {unit(item.name)} |") for table in tables) == 1
        assert CostTable.sources()[item.name] in "".join(tables)


@pytest.mark.parametrize("name", FREE_CONSTANTS)
def test_what_is_fitted_starts_within_its_bounds(name: str) -> None:
    """Also where calibration begins."""
    least, most, _ = FREE_CONSTANTS[name]
    assert 0 <= least <= getattr(CostTable(), name) <= most
