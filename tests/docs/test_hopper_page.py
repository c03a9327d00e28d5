"""docs/hopper.md: its tables are the result files' figures."""

from __future__ import annotations

import pytest

from docs.hopper_speed import PAGE, TABLES, bench_points, kernel_points, render_means

DOCUMENT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python docs/hopper_speed.py."""
    assert list(TABLES.stale(DOCUMENT)) == []


@pytest.mark.parametrize("name", TABLES.sections)
def test_a_changed_figure_is_found_and_mended(name: str) -> None:
    """One digit is enough."""
    begin, end = TABLES.begin(name), TABLES.end(name)
    table = DOCUMENT.split(begin)[1].split(end)[0]
    digit = next(letter for letter in reversed(table) if letter.isdigit())
    at = table.rindex(digit)
    changed = table[:at] + str((int(digit) + 1) % 10) + table[at + 1 :]
    stale = DOCUMENT.replace(table, changed)
    assert list(TABLES.stale(stale)) == [name] and TABLES.fill(stale) == DOCUMENT


def test_every_call_was_measured_beside_both_peers() -> None:
    for points in (list(bench_points()), list(kernel_points())):
        assert len(points) > 30
        assert all({"flash-attn-4", "cudnn"} <= point.peers.keys() for point in points)


def test_the_readme_says_the_same() -> None:
    """The factors and the numbers of calls in which it was slower."""
    rows = [[cell.strip() for cell in line.split("|")] for line in render_means().splitlines()[2:]]
    means = {row[1]: (float(row[2]), int(row[3]), int(row[4])) for row in rows}
    (flash, calls, slower), (cudnn, _, fewer) = means["flash-attn-4"], means["cuDNN"]
    lost = f"{slower} and {fewer}" if slower + fewer else "none"
    readme = " ".join((PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    said = (
        f"over {calls} calls {flash:.2f} times as fast as flash-attn-4 and {cudnn:.2f} times as "
        f"cuDNN in the geometric mean, slower in {lost} of them"
    )
    assert said in readme
