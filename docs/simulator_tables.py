"""The tables of docs/simulator.md: what every piece of work costs, and what was fitted.

`python docs/simulator_tables.py` writes them between their markers in that file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from fa4.plan.render import markdown_table
from fa4.sim.cost_table import FREE_CONSTANTS, CostTable
from fa4.sim.machine import COSTS

PAGE = Path(__file__).with_name("simulator.md")
COMMAND = "python docs/simulator_tables.py"
UNITS = {
    "_cycles": "cycles",
    "bytes_per_clk": "bytes/clk",
    "lanes_per_clk": "lanes/clk",
    "_per_clk": "instructions/clk",
    "_ns": "ns",
    "": "share",
}


def unit(name: str) -> str:
    """What a figure is counted in, by the end of its name."""
    return next(unit for end, unit in UNITS.items() if name.endswith(end))


def columns() -> Mapping[str, CostTable]:
    """Machines with the same figures, by their names: a column each."""
    found: dict[str, CostTable] = {}
    for table in dict.fromkeys(COSTS.values()):
        names = [name.upper() for name, costs in COSTS.items() if costs == table]
        found[", ".join(names)] = table
    return found


def render_costs() -> str:
    """Every figure that was measured or published, with its source."""
    names = [item.name for item in fields(CostTable) if item.name not in FREE_CONSTANTS]
    rows = [
        (f"`{name}`", unit(name), *(f"{getattr(x, name):g}" for x in columns().values()),
         CostTable.sources()[name])
        for name in names
    ]  # fmt: skip
    return markdown_table(("cost", "unit", *columns(), "source"), rows)


def render_free() -> str:
    """What calibration chose, where it began, and the bounds within which it may choose."""
    start, sources = CostTable(), CostTable.sources()
    rows = [
        (f"`{name}`", unit(name), *(f"{getattr(x, name):g}" for x in columns().values()),
         f"{least:g} to {most:g}", f"{getattr(start, name):g}", sources[name], why)
        for name, (least, most, why) in FREE_CONSTANTS.items()
    ]  # fmt: skip
    titles = ("constant", "unit", *columns(), "allowed", "unfitted", "meaning", "why these bounds")
    return markdown_table(titles, rows)


SECTIONS = {"free constants": render_free, "costs": render_costs}


def blocks() -> Iterator[tuple[str, str, str]]:
    """(first line, table, last line) of each."""
    for name, render in SECTIONS.items():
        yield f"<!-- {name}: written by {COMMAND} -->", render(), f"<!-- end of {name} -->"


def fill(text: str) -> str:
    """A document with the present tables. Raises ValueError if it lacks a table's markers."""
    for begin, table, end in blocks():
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the document lacks {begin!r} or {end!r}")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def main() -> None:
    """Writes the present tables into the page."""
    PAGE.write_text(fill(PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
