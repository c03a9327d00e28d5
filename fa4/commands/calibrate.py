"""`fa4 calibrate`: fit the simulator's free constants to measured throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.sim.calibrate import Calibration


def calibrate(
    measurements: Annotated[
        Path, typer.Option(metavar="FILE.csv", help="Measured throughput, as for fa4 validate.")
    ],
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Machine, or TOML file. Default: the file's.")
    ] = None,
    software: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Rows to fit to. Default: FA4.")
    ] = None,
    constants: Annotated[
        str | None, typer.Option(metavar="A,B", help="Constants to fit. Default: all free ones.")
    ] = None,
    evaluations: Annotated[
        int, typer.Option(help="Predictions of the whole file that the search may make.")
    ] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the search; the same one repeats it.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="MY.toml", help="Write a machine with the fit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Fit free constants within their bounds; report errors before and after, and left out.

    Example: fa4 calibrate --measurements b200.csv --output my.toml
    """
    from fa4.base.files import require_replaceable
    from fa4.commands.validate import describe as describe_comparison
    from fa4.commands.validate import load_rows
    from fa4.config import require_int
    from fa4.sim.calibrate import calibrate as fit

    require_int("evaluations", evaluations, 1)
    require_int("seed", seed, 0)
    if output is not None:
        if output.suffix != ".toml" or not output.parent.is_dir() or output.is_dir():
            raise ValueError(
                f"--output must be a .toml file in a folder there is; got {str(output)!r}"
            )
        require_replaceable(output)
        check_folder(output.parent)
    found, rows, skipped = load_rows(measurements, machine, software)
    names = None if constants is None else [name.strip() for name in constants.split(",")]
    with progress_bar() as progress:
        result = fit(rows, found, names, seed=seed, evaluations=evaluations, progress=progress)
    report = {
        "machine": found.name,
        "seed": seed,
        "evaluations": result.evaluations,
        "constants": [asdict(item) | {"at_bound": item.at_bound} for item in result.constants],
        "before": describe_comparison(result.before, skipped),
        "after": describe_comparison(result.after),
        "left_out": describe_comparison(result.left_out),
        "output": None if output is None else str(output),
    }
    if output is not None:
        base = machine if machine is not None else found.name.lower()
        write_whole(output, "\n".join(write_toml(result, base, measurements)).encode())
    emit(report, as_json, render)


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A callback (done, total, what) that shows a bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))  # noqa: E501  # fmt: skip
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )


def write_toml(result: Calibration, base: str, measurements: Path) -> Iterator[str]:
    """Lines of a machine file: `base` with the fitted constants."""
    import json

    yield f"# Fitted by fa4 calibrate to {json.dumps(measurements.name)}"
    yield (
        f"# mean error {result.after.mape:.2%}, worst {abs(result.after.worst.error):.2%}; "
        f"each point left out: mean {result.left_out.mape:.2%}"
    )
    yield f"base = {json.dumps(base)}\n"
    yield "[costs]"
    for item in result.constants:
        yield f"{item.name} = {item.value!r}  # allowed: {item.least:g} to {item.most:g}"
    yield ""


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: the constants, then errors before, after and left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    constants = Table(box=SIMPLE_HEAD, pad_edge=False)
    constants.add_column("constant", no_wrap=True)
    for heading in (
        "before", "fitted", "95% interval", "bounds", "at bound", "error 10% lower", "10% higher"
    ):  # fmt: skip
        constants.add_column(heading, justify="right")
    for row in report["constants"]:
        constants.add_row(
            row["name"],
            f"{row['before']:g}",
            f"{row['value']:g}",
            f"{row['interval'][0]:.3g} to {row['interval'][1]:.3g}",
            f"{row['least']:g} to {row['most']:g}",
            row["at_bound"] or "no",
            *(
                "" if row[key] is None else f"{row[key]:.2%}"
                for key in ("mape_below", "mape_above")
            ),
        )
    errors = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "mean error", "worst", "worst point"):
        errors.add_column(heading)
    for name, key in (("before", "before"), ("fitted", "after"), ("left out", "left_out")):
        row = report[key]
        errors.add_row(
            name, f"{row['mape']:.2%}", f"{row['worst']['error']:+.2%}", row["worst"]["point"]
        )
    parts: list[Any] = [
        f"{report['machine']}, {len(report['after']['points'])} points, "
        f"{report['evaluations']} evaluations, seed {report['seed']}",
        constants,
        errors,
        "10% lower, higher: mean error with the constant moved by a tenth of its range\n"
        "95% interval: of refits to configurations drawn again (bootstrap)\n"
        "left out: each point predicted by a fit to all the others",
    ]
    if report["output"]:
        parts.append(f"wrote {report['output']}")
    return tuple(parts)
