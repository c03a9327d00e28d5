"""`fa4 verify`: the property suite on our reference, torch's SDPA or any attention function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from fa4.commands import emit

DEFAULT_EXAMPLES = 50  # fa4.testing.runner says the same; not imported, so that --help stays fast


def verify(
    backend: Annotated[
        str, typer.Option(help="reference, oracle, torch-sdpa or module:function.")
    ] = "reference",
    max_examples: Annotated[int, typer.Option(help="Cases per property.")] = DEFAULT_EXAMPLES,
    seed: Annotated[int, typer.Option(help="Seed of the cases; the same one repeats a run.")] = 0,
    names: Annotated[
        list[str] | None, typer.Option("--property", help="Only this property (repeatable).")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the properties.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check an attention function against the float64 oracle, within a derived error budget.

    Exit code 0 if nothing failed, 1 if a property failed, 2 for bad input. What the function does
    not offer is listed as not covered, and is never counted as passed.

    Example: fa4 verify --backend torch-sdpa --property causal --property gradients
    """
    from fa4 import testing

    if list_only:
        emit({"properties": describe(testing.find_properties(names or None))}, as_json, render_list)
        return
    with progress_bar() as progress:
        report = testing.verify(
            backend,
            max_examples=max_examples,
            seed=seed,
            properties=names or None,
            progress=progress,
        )
    emit(report.as_dict(), as_json, render)
    if report.with_status("failed"):
        raise typer.Exit(1)


def describe(properties: Any) -> list[dict[str, Any]]:
    """Name, description and needs of each property."""
    return [
        {"name": prop.name, "description": prop.description, "needs": sorted(prop.needs)}
        for prop in properties
    ]


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A callback (done, total, name) that shows a bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield update


def render_list(report: Mapping[str, Any]) -> Any:
    """The properties as a table."""
    from rich.table import Table

    table = Table("property", "what must hold", "needs")
    for prop in report["properties"]:
        table.add_row(prop["name"], prop["description"], ", ".join(prop["needs"]))
    return table


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: results, what is not covered, tests to paste, one line of summary."""
    from rich.table import Table

    results = Table("property", "status", "cases", "worst error / budget", "what must hold")
    for row in report["properties"]:
        if row["status"] != "not covered":
            share = "" if row["worst_share"] is None else f"{row['worst_share']:.3f}"
            results.add_row(
                row["name"], row["status"], str(row["cases"]), share, row["description"]
            )
    parts: list[Any] = [results]
    missing = [row for row in report["properties"] if row["status"] == "not covered"]
    if missing:
        table = Table("not covered", "because")
        for row in missing:
            table.add_row(row["name"], row["reason"])
        parts.append(table)
    partly = [
        row for row in report["properties"] if row["status"] != "not covered" and row["reason"]
    ]
    parts += [f"{row['name']}: some cases not covered: {row['reason']}" for row in partly]
    for row in report["properties"]:
        if row["status"] == "failed":
            parts.append(f"\n{row['name']} failed: {row['error']}\n\n{row['test']}")
    counts = report["counts"]
    parts.append(
        f"{report['backend']}: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not_covered']} not covered; {report['cases']} cases "
        f"in {report['seconds']:.1f} s (seed {report['seed']})"
    )
    return tuple(parts)
