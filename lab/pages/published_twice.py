"""What two sources published of the same kernel and call, in docs/simulator.md.

`python -m lab.pages.published_twice` writes the table. Where sources differ, one prediction of the
call cannot be right for both: the mean of its errors, each a share of what was measured, is least
if it is the slower figure.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

from fa4.figures.accuracy import B200_FILE, KEPT_OUT_FILE
from fa4.plan.render import markdown_table
from fa4.sim.measurements import Row, read_measurements
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables

PAGE = DOCS / "simulator.md"


def pairs() -> list[tuple[Row, Row]]:
    """(slower, faster) of each two sources of the same call by the same kernel on a B200."""
    found = defaultdict(list)
    for row in (*read_measurements(B200_FILE), *read_measurements(KEPT_OUT_FILE)):
        if row.gpu == "B200":
            found[row.software, row.direction, row.problem].append(row)
    both = [
        (min(two, key=lambda row: row.tflops), max(two, key=lambda row: row.tflops))
        for rows in found.values()
        for two in combinations(rows, 2)
        if two[0].source != two[1].source
    ]
    return sorted(both, key=lambda two: two[0].tflops / two[1].tflops)


def least_error(slower: float, faster: float) -> float:
    """The least mean of a prediction's relative errors beside two figures."""
    return (1 - slower / faster) / 2


def render() -> str:
    """The call, both figures, how far apart, and the least mean error of one prediction of both."""
    rows = []
    for slower, faster in pairs():
        cells = (f"{row.tflops:g} ({row.source})" for row in (slower, faster))
        call = slower.label.partition(slower.source)[0].strip()
        apart = faster.tflops / slower.tflops - 1
        least = least_error(slower.tflops, faster.tflops)
        rows.append((slower.software, call, *cells, f"{apart:.1%}", f"{least:.1%}"))
    titles = ("kernel", "call", "slower", "faster", "apart", "least mean error")
    return markdown_table(titles, rows)


TABLES = MarkedTables("python -m lab.pages.published_twice", {"published twice": render})


def main() -> None:
    """Writes the present table into the page."""
    TABLES.write(PAGE)


if __name__ == "__main__":
    main()
