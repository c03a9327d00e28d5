"""`fa4 validate`: predictions beside measured throughput, point by point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.sim.machine import Machine
    from fa4.sim.measurements import Row, Skipped
    from fa4.sim.validation import Comparison


def validate(
    measurements: Annotated[
        Path, typer.Option(metavar="FILE.csv", help="Measured throughput; see docs/simulator.md.")
    ],
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Machine, or TOML file. Default: the file's.")
    ] = None,
    software: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Rows to compare with. Default: FA4.")
    ] = None,
    max_mape: Annotated[
        float | None, typer.Option(help="Exit with 1 if the mean error is more percent.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Exit with 1 if any error is more percent.")
    ] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="The measured calls were repeated without a pause.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compare predictions with measured throughput: error of each point, mean and worst.

    Example: fa4 validate --measurements b200.csv --max-mape 4 --max-error 10
    """
    from fa4.config import require_finite
    from fa4.sim.validation import compare

    for name, limit in (("--max-mape", max_mape), ("--max-error", max_error)):
        if limit is not None:
            require_finite(name, limit, 0.0)
    limits = {"mape": max_mape, "error": max_error}
    reports, failed = [], []
    for found, rows, skipped in load_machines(measurements, machine, software):
        try:
            comparison = compare(rows, found, sustained=sustained)
        except ValueError as error:
            raise ValueError(f"{measurements} {error}") from error
        reports.append(describe(comparison, skipped) | {"limits": limits})
        failed += [
            f"{found.name}: {what} {value:.2%} is more than {limit:g} %"
            for what, value, limit in (
                ("mean error", comparison.mape, max_mape),
                ("worst error", abs(comparison.worst.error), max_error),
            )
            if limit is not None and value * 100 > limit
        ]
    report = reports[0] if len(reports) == 1 else {"machines": reports, "limits": limits}
    emit(report | {"failed": failed}, as_json, render)
    if failed:
        raise typer.Exit(1)


Selection = tuple["Machine", "tuple[Row, ...]", "tuple[Skipped, ...]"]


def load_machines(path: Path, machine: str | None, software: str | None) -> list[Selection]:
    """Of each machine (those of the rows, unless named): the rows to compare and those left out."""
    from fa4.sim.machine import find_machine
    from fa4.sim.measurements import machine_names, read_measurements, select_rows

    rows = read_measurements(path)
    found = [find_machine(x) for x in ((machine,) if machine is not None else machine_names(rows))]
    known = {item.name.lower() for item in found}
    own = rows if machine is not None else [row for row in rows if row.gpu.lower() in known]
    selections = []
    for item in found:
        alone = [row for row in own if len(found) == 1 or row.gpu.lower() == item.name.lower()]
        selections.append((item, *select_rows(alone, item, software)))
    return selections


def load_rows(path: Path, machine: str | None, software: str | None) -> Selection:
    """The one machine, the rows to compare and those left out. ValueError if there are several."""
    from fa4.sim.measurements import machine_name, read_measurements

    one = machine_name(read_measurements(path)) if machine is None else machine
    return load_machines(path, one, software)[0]


def describe(comparison: Comparison, skipped: tuple[Skipped, ...] = ()) -> dict[str, Any]:
    """A comparison as plain data; errors are relative, positive where the model is too fast."""
    worst = comparison.worst
    return {
        "machine": comparison.machine,
        "mape": comparison.mape,
        "rank_correlation": comparison.rank_correlation,
        "worst": {"line": worst.row.line, "point": worst.row.label, "error": worst.error},
        "points": [
            {
                "line": point.row.line,
                "point": point.row.label,
                "software": point.row.software,
                "source": point.row.source,
                "approx": point.row.approx,
                "measured_tflops": point.row.tflops,
                "predicted_tflops": point.predicted_tflops,
                "error": point.error,
                "bottleneck": point.bottleneck,
            }
            for point in comparison.points
        ],
        "skipped": [
            {
                "line": item.row.line,
                "point": item.row.label,
                "software": item.row.software,
                "why": item.why,
            }
            for item in skipped
        ],
    }


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: of each machine one line per point, then the summary."""
    if "machines" in report:
        every = [part for item in report["machines"] for part in render(item)]
        return (*every, *report.get("failed", ()))
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = {point["software"] for point in report["points"]}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("line", no_wrap=True)
    table.add_column("point", no_wrap=True)
    if len(names) > 1:
        table.add_column("software", min_width=13)
    for heading, width in (("measured", 8), ("predicted", 9), ("error", 6)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for point in report["points"]:
        about = "~" if point["approx"] else ""
        table.add_row(
            str(point["line"]),
            point["point"],
            *([point["software"]] if len(names) > 1 else []),
            f"{about}{point['measured_tflops']:.1f}",
            f"{point['predicted_tflops']:.1f}",
            f"{point['error']:+.1%}",
        )
    title = f"{report['machine']}, TFLOP/s"
    if len(names) == 1:
        title += f", {names.pop()}"
    parts: list[Any] = [title, table]
    reasons: dict[str, list[str]] = {}
    for item in report["skipped"]:
        reasons.setdefault(item["why"], []).append(str(item["line"]))
    parts += [f"skipped ({why}): lines {', '.join(lines)}" for why, lines in reasons.items()]
    worst = report["worst"]
    parts.append(
        f"mean absolute error {report['mape']:.2%}, rank correlation "
        f"{report['rank_correlation']:.3f} over {len(report['points'])} points; "
        f"worst {worst['error']:+.2%} (line {worst['line']}: {worst['point']})"
    )
    return (*parts, *report.get("failed", ()))
