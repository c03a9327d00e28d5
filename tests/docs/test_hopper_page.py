"""docs/hopper.md: its tables are the result files' figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa4 import cli
from lab.pages.hopper_speed import PAGE, TABLES, bench_points, kernel_points
from lab.records import record_path
from tests.docs.test_figures_of_pages import same

DOCUMENT = PAGE.read_text(encoding="utf-8")
KEPT = TABLES.kept()  # what the tests ask for, made once


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.hopper_speed."""
    assert list(KEPT.stale(DOCUMENT)) == []


@pytest.mark.parametrize("name", KEPT.sections)
def test_a_changed_figure_is_found_and_mended(name: str) -> None:
    """One digit is enough."""
    begin, end = KEPT.begin(name), KEPT.end(name)
    table = DOCUMENT.split(begin)[1].split(end)[0]
    digit = next(letter for letter in reversed(table) if letter.isdigit())
    at = table.rindex(digit)
    changed = table[:at] + str((int(digit) + 1) % 10) + table[at + 1 :]
    stale = DOCUMENT.replace(table, changed)
    assert list(KEPT.stale(stale)) == [name] and KEPT.fill(stale) == DOCUMENT


def test_every_call_was_measured_beside_both_peers() -> None:
    for points in (list(bench_points()), list(kernel_points())):
        assert len(points) > 30
        assert all({"flash-attn-4", "cudnn"} <= point.peers.keys() for point in points)


def test_the_picture_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: make pages."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--from", str(record_path("hopper_bench")), "--figure", "hopper.svg"])
    assert stop.value.code == 0
    drawn = Path("hopper.svg").read_text("utf-8")
    assert same(drawn, (PAGE.parent / "pictures" / "hopper.svg").read_text("utf-8"))
