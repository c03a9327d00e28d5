"""`fa4 sweep`: predictions over the product of several settings, on all cores or a dask cluster."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.commands.why import limit_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa4.sim.sweep import Row, Sweep

MOST_SHOWN = 20  # rows, and reasons, of the report for people
MOST_JOBS = 1024
MOST_COLUMNS = 4  # settings that fit into a table
MOST_RIVALS = 8  # fastest points behind the best that are predicted by all sets of constants

SET_HELP = (
    "A setting of `fa4 predict` with its values: head_dim=64,128 or seqlen=1k:32k:x2 or "
    "kv_stages=2:6:1; repeatable, all combinations are predicted."
)


def sweep(
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUES", help=SET_HELP)
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Append rows to this file; an interrupted sweep continues."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Processes.", show_default="all cores")
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option("--dask", metavar="ADDRESS", help="Scheduler of a dask cluster to run on."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Predict all combinations of settings; say which is best, and which cannot run and why.

    Example: fa4 sweep --set head_dim=64,128 --set kv_stages=2:6:1 --csv out/stages.csv
    """
    from fa4.config import require_int
    from fa4.sim.sweep import make_sweep

    planned = make_sweep(settings or [])
    if dask is not None and jobs is not None:
        raise ValueError(f"--dask and --jobs exclude each other; got {dask} and {jobs}")
    if jobs is not None:
        require_int("--jobs", jobs, 1, MOST_JOBS)
    with progress_bar(len(planned)) as advance:
        rows, reused = collect(planned, csv, {"jobs": jobs, "dask": dask}, advance)
    report = build_report(planned, rows, reused) | {"csv": csv and str(csv)}
    if report["best"] is not None:
        report["limit"] = limit_of(report["best"]["settings"])
        report["rivals"] = find_rivals(report)
    emit(report, as_json, render)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, and the function that advances it; nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("predicting", total=total)
        yield lambda steps: bar.advance(task, steps)


def collect(
    planned: Sweep, csv: Path | None, how: Mapping[str, Any], advance: Callable[[int], None]
) -> tuple[dict[int, Row], int]:
    """Results of every point, and how many of them the file held already."""
    from fa4.sim.sweep import run_points
    from fa4.sim.sweep_file import SweepFile

    file = SweepFile(csv, planned) if csv is not None else None
    rows: dict[int, Row] = dict(file.rows) if file else {}
    reused = len(rows)
    advance(reused)
    left = [point for point in range(len(planned)) if point not in rows]
    try:
        for point, results in run_points(planned, left, **how):
            rows[point] = results
            if file:
                file.add(point, results)
            advance(1)
    finally:
        if file:
            file.close()
    return rows, reused


def build_report(planned: Sweep, rows: Mapping[int, Row], reused: int) -> dict[str, Any]:
    """The report as plain data; the keys are what `--json` prints. limit: of the best point."""
    every = [
        {"point": point, "settings": planned.settings(point), **rows[point]}
        for point in sorted(rows)
    ]
    feasible = [row for row in every if row["status"] == "ok"]
    best = max(feasible, key=lambda row: (row["tflops"], -row["point"]), default=None)
    compared = [row for row in feasible if row["speedup"] != ""]
    gain = max(compared, key=lambda row: (row["speedup"], -row["point"]), default=None)
    return {
        "axes": {name: list(values) for name, values in planned.axes.items()},
        "points": len(planned),
        "feasible": len(feasible),
        "infeasible": len(every) - len(feasible),
        "from_file": reused,
        "best": best,
        "limit": None,
        "rivals": [],
        "best_speedup": gain,
        "rows": every,
    }


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: best rows first, then what cannot run, then the verdict."""
    parts: list[Any] = [
        f"{report['points']} points: {report['feasible']} predicted, "
        f"{report['infeasible']} cannot run"
        + (f"; {report['from_file']} taken from {report['csv']}" if report["from_file"] else "")
    ]
    feasible = [row for row in report["rows"] if row["status"] == "ok"]
    feasible.sort(key=lambda row: (-row["tflops"], row["point"]))
    if len(report["axes"]) > MOST_COLUMNS:
        parts += [say_row(row) for row in feasible[:MOST_SHOWN]]
    elif feasible:
        parts.append(best_table(list(report["axes"]), feasible[:MOST_SHOWN]))
    if len(feasible) > MOST_SHOWN:
        where = "--csv FILE and --json have all" if not report["csv"] else "the file has all"
        parts.append(f"{len(feasible) - MOST_SHOWN} more rows ({where})")
    parts += [f"cannot run: {line}" for line in refusals(report["rows"])]
    if report["best"] is not None:
        parts.append(f"best: {say_row(report['best'])}")
        if report["limit"]:
            parts.append(f"limited by {report['limit']}")
        parts += [say_rival(rival) for rival in report["rivals"]]
        parts.append("default: what FlashAttention-4 would choose for the same problem and machine")
        gain = report["best_speedup"]
        if gain is not None and gain["speedup"] > 1.001 * (report["best"]["speedup"] or 0.0):
            parts.append(f"largest gain: {say_row(gain)}")
    if report["csv"]:
        parts.append(f"rows in {report['csv']}")
    return tuple(parts)


def find_rivals(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Points of the best one's problem that some sets of constants put before it: of the fastest
    ones behind it, those whose order is undecided."""
    from fa4.sim.ensemble import seconds_of, speedup_interval
    from fa4.sim.options import build
    from fa4.sim.sweep import default_settings

    best = report["best"]
    problem = default_settings(best["settings"])
    behind = [row for row in report["rows"] if row["status"] == "ok" and row is not best
              and default_settings(row["settings"]) == problem]  # fmt: skip
    behind.sort(key=lambda row: (-row["tflops"], row["point"]))
    if not behind:
        return []
    times = seconds_of(build(best["settings"]))
    found = []
    for row in behind[:MOST_RIVALS]:
        interval = speedup_interval(seconds_of(build(row["settings"])), times)
        if interval is not None and interval.undecided:
            found.append({"point": row["point"], "settings": row["settings"],
                          "best_over_it": [interval.least, interval.most]})  # fmt: skip
    return found


def say_rival(rival: Mapping[str, Any]) -> str:
    """A point that may be the best as well."""
    least, most = rival["best_over_it"]
    return (
        f"undecided: {say_settings(rival)}; the best is {least:.3f} to {most:.3f} times as fast by "
        "the sets of constants that fit as well"
    )


def best_table(axes: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """One line per point: settings, time, speed, gain over the default, busiest unit."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in axes:
        table.add_column(name, overflow="fold")
    for heading in ("us", "TFLOP/s", "of peak", "vs default"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("busiest")
    for row in rows:
        table.add_row(
            *row["settings"].values(),
            f"{row['microseconds']:.1f}",
            f"{row['tflops']:.0f}",
            f"{row['peak_share']:.1%}",
            "-" if row["speedup"] == "" else f"{row['speedup']:.3f}x",
            row["bound_by"],
        )
    return table


def refusals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each reason once, with the number of points and the settings of the first."""
    failed = [row for row in rows if row["status"] != "ok"]
    counts = Counter(row["reason"] for row in failed)
    first = {row["reason"]: row for row in reversed(failed)}
    lines = []
    for reason, count in counts.most_common(MOST_SHOWN):
        more = "" if count == 1 else f" and {count - 1} more"
        lines.append(f"{say_settings(first[reason])}{more}: {reason}")
    if len(counts) > MOST_SHOWN:
        lines.append(f"and {len(counts) - MOST_SHOWN} more reasons")
    return lines


def say_settings(row: Mapping[str, Any]) -> str:
    """Settings as they would be given."""
    return " ".join(f"{name}={value}" for name, value in row["settings"].items())


def say_row(row: Mapping[str, Any]) -> str:
    """A point, its speed and its gain."""
    speed = f"{row['tflops']:.0f} TFLOP/s, {row['microseconds']:.1f} us"
    gain = "" if row["speedup"] == "" else f", {row['speedup']:.3f}x the default"
    return f"{say_settings(row)}: {speed}{gain}"
