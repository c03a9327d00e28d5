"""The tables of docs/hopper_units.md: what was measured of a Hopper SM, its memory and its clock.

`python -m lab.pages.hopper_tables` writes them between their markers in that page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fa4.plan.render import markdown_table
from lab.hardware.hopper_units.figures import PORTS, STARTS, STEPS, Unit, figures, report
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables

PAGE = DOCS / "hopper_units.md"
# Programs whose figures differ by what stands behind the last comma: a column each.
WIDE = ("wgmma", "copies")
LISTS = ("barriers", "pipes", "softmax", "memory", "launch")
LOAD = {
    "burst_mhz": "MHz, 1 to 20 ms", "burst_tflops": "TFLOP/s", "steady_mhz": "MHz, second half",
    "steady_tflops": "TFLOP/s, second half", "steady_w": "W, second half",
}  # fmt: skip


ENERGY = {
    "steady_mhz": "MHz", "steady_tflops": "TFLOP/s", "steady_exponentials_per_ns": "exp/ns",
    "steady_bytes_per_ns": "bytes/ns", "steady_w": "W",
}  # fmt: skip
LIFE = ("replaced", "barriers, later rounds", "registers, later rounds", "first box, later rounds",
        "last box, later rounds", "last box, first round", "stores, later rounds")  # fmt: skip


def of_program(program: str) -> list[Unit]:
    """A program's figures but for the clock beside them, in the order they were measured."""
    chosen = (figure for figure in figures().values() if figure.program == program)
    return [figure for figure in chosen if not figure.name.startswith("clock/")]


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def render_list(program: str) -> str:
    """A row per figure, with its interval."""
    rows = [
        (figure.name.replace("/", ": ", 1), number(figure.value),
         "to".join(f" {number(end)} " for end in figure.interval).strip(), figure.unit,
         figure.method)
        for figure in of_program(program)
    ]  # fmt: skip
    return markdown_table(("what", "median", "least to most", "unit", "how"), rows)


def render_wide(program: str) -> str:
    """A table per group of figures: rows by what stands before the last comma."""
    groups: dict[str, dict[str, dict[str, Unit]]] = {}
    for figure in of_program(program):
        group, rest = figure.name.split("/", 1)
        row, _, column = rest.rpartition(", ")
        groups.setdefault(group, {}).setdefault(row or rest, {})[column if row else "value"] = (
            figure
        )
    return "\n\n".join(wide_table(group, rows) for group, rows in groups.items())


def wide_table(group: str, rows: Mapping[str, Mapping[str, Unit]]) -> str:
    """One of them; its title names the units and the widest interval."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    all_figures = [figure for row in rows.values() for figure in row.values()]
    units = ", ".join(dict.fromkeys(figure.unit for figure in all_figures))
    widest = max(figure.spread for figure in all_figures)
    body = [
        (name, *(number(row[x].value) if x in row else "" for x in columns))
        for name, row in rows.items()
    ]
    title = f"**{group}** ({units}; widest interval {100 * widest:.1f}% of its median)"
    return f"{title}\n\n{markdown_table((group, *columns), body)}"


def render_starts() -> str:
    """The life of a CTA: a row per shape and load."""
    found = figures(STARTS)
    shapes = dict.fromkeys(
        name.removeprefix("start/").removesuffix(", replaced")
        for name in found if name.endswith(", replaced")
    )  # fmt: skip
    rows = [
        (shape, *(number(found[f"start/{shape}, {what}"].value) for what in LIFE))
        for shape in shapes
    ]
    return markdown_table(("CTA", *LIFE), rows)


def render_beside() -> str:
    """Vector code alone and beside products: a row per code and number of warpgroups."""
    rows: dict[str, dict[str, Unit]] = {}
    for name, figure in figures(STEPS).items():
        if name.startswith("beside/"):
            code, groups, products = name.removeprefix("beside/").split(", ")
            rows.setdefault(f"{code}, {groups}", {})[products] = figure
    return wide_table("cycles", rows)


def render_waited() -> str:
    """Products that are waited for one by one."""
    rows: dict[str, dict[str, Unit]] = {}
    for name, figure in figures(STEPS).items():
        if name.startswith("one by one/"):
            shape, source, groups = name.removeprefix("one by one/").split(", ")
            rows.setdefault(f"{shape}, {source}", {})[groups] = figure
    return wide_table("cycles each", rows)


def render_steps() -> str:
    """Whole steps without loads: a row per tile."""
    rows: dict[str, dict[str, Unit]] = {}
    for name, figure in figures(STEPS).items():
        if name.startswith("step/"):
            dim, tile, how = name.removeprefix("step/").split(", ", 2)
            rows.setdefault(f"{dim}, {tile}", {})[how] = figure
    return wide_table("cycles of a step", rows)


def render_ports(what: str) -> str:
    """Accesses of shared memory beside products: a row per products, a column per access.

    what: "time" of the access, or "interval" of the products.
    """
    rows: dict[str, dict[str, Unit]] = {}
    for name, figure in figures(PORTS).items():
        if name.startswith("ports/") and name.endswith(f", {what}"):
            access, products = name.removeprefix("ports/").split(", beside ")
            rows.setdefault(products.removesuffix(f", {what}"), {})[access] = figure
    return wide_table("beside", rows)


def render_rows() -> str:
    """Tiles of rows that begin at a sector or in its middle, loaded by all SMs."""
    rows: dict[str, dict[str, Unit]] = {}
    for name, figure in figures(PORTS).items():
        if name.startswith("rows/") and name.endswith(", all SMs"):
            columns, where = name.removeprefix("rows/").removesuffix(", all SMs").split(", ", 1)
            rows.setdefault(columns, {})[where] = figure
    return wide_table("a head of", rows)


def render_energy() -> str:
    """Rates and power in the second half of each load."""
    rows = [
        (load["load"], *(number(load[key]) for key in ENERGY)) for load in report(STARTS)["loads"]
    ]
    return markdown_table(("load", *ENERGY.values()), rows)


def render_loads() -> str:
    """Clock, rate and power under load."""
    rows = [
        (load["load"], f"{load['seconds']:g}", *(number(load[key]) for key in LOAD))
        for load in report()["loads"]
    ]
    return markdown_table(("load", "s", *LOAD.values()), rows)


def render_machine() -> str:
    """What it was measured on."""
    found = report()
    rows = [(key, value) for key, value in found["machine"].items()]
    rows += [("date", found["date"]), ("commit", found["commit"])]
    return markdown_table(("machine", "value"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "machine": render_machine,
    "loads": render_loads,
    **{name: partial(render_list, name) for name in LISTS},
    **{name: partial(render_wide, name) for name in WIDE},
    "starts": render_starts,
    "energy": render_energy,
    "waited": render_waited,
    "beside": render_beside,
    "steps": render_steps,
    "ports": partial(render_ports, "time"),
    "slowed": partial(render_ports, "interval"),
    "rows": render_rows,
}
TABLES = MarkedTables("python -m lab.pages.hopper_tables", SECTIONS)

if __name__ == "__main__":
    TABLES.write(PAGE)
