"""docs/simulator.md: its tables are those of the cost model, which has a source for each figure."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.sim.cost_table import FREE_CONSTANTS, CostTable
from lab.pages import published_twice, work_tiles
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
KEPT = TABLES.kept()  # what the tests ask for, made once


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.simulator_tables."""
    assert list(KEPT.stale(DOCUMENT)) == []


def test_what_was_published_twice() -> None:
    """If not: python -m lab.pages.published_twice."""
    assert list(published_twice.TABLES.stale(DOCUMENT)) == []
    for slower, faster in published_twice.pairs():
        assert slower.tflops <= faster.tflops and slower.source != faster.source
        assert (slower.problem, slower.software) == (faster.problem, faster.software)


@given(st.floats(1, 3000), st.floats(1, 3000))
def test_no_prediction_is_nearer_to_both(one: float, two: float) -> None:
    """Than the slower figure is, which is said of two sources that differ."""
    both = np.array([min(one, two), max(one, two)])
    least = published_twice.least_error(*both)
    predictions = np.append(np.linspace(both[0] / 2, 2 * both[1], 999), both)
    means = np.abs(predictions[:, None] / both - 1).mean(axis=1)
    assert means.min() == pytest.approx(least, abs=1e-12)


@given(st.floats(0, 9), st.floats(0.5, 2), st.lists(st.floats(1, 999), min_size=3, max_size=9))
def test_a_line_is_found(begin: float, slope: float, steps: list[float]) -> None:
    """A planted cost of each work tile and of each step, of work tiles of different lengths."""
    predicted = [at + 10 * i for i, at in enumerate(sorted(steps))]
    measured = [begin + slope * at for at in predicted]
    assert work_tiles.line(measured, predicted) == pytest.approx((begin, slope), abs=1e-6)


def test_the_pictures_are_up_to_date() -> None:
    """Written by the same command."""
    assert PICTURE.read_text(encoding="utf-8") == draw_sweep(swept())
    assert OWN_PICTURE.read_text(encoding="utf-8") == draw_sweep(own_swept())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_table_is_found_and_mended(name: str) -> None:
    """Planted: one changed digit or letter in a table, or a table that is not there."""
    table, end = KEPT.sections[name](), KEPT.end(name)
    changed = DOCUMENT.replace(table, table[:-3] + "?" + table[-2:])
    assert list(KEPT.stale(changed)) == [name] and KEPT.fill(changed) == DOCUMENT
    with pytest.raises(ValueError, match=end):
        KEPT.fill(DOCUMENT.replace(end, ""))


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
