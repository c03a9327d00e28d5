"""`fa4 verify --corpus`: which published bugs a back end has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from fa4.commands import emit
from fa4.commands.progress import progress_bar

# Options of what is drawn, with what they are if nobody gives them.
DRAWN = {"--max-examples": 20, "--steps": 12, "--seed": 0, "--jobs": 1, "--html": None,
         "--junit": None, "--badge": None}  # fmt: skip


def verify_corpus(
    backend: str,
    as_json: bool,
    list_only: bool,
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Run the atlas on a back end and print what was found, or list the bugs.

    drawn: options that say nothing here, by their spelling; ValueError if one was given. options:
    as for `run_corpus`. Raises typer.Exit(1) if a bug was found or nothing could be judged.
    """
    from fa4.testing.atlas import run_corpus

    for spelling, default in DRAWN.items():
        if drawn[spelling] != default:
            raise ValueError(
                f"the cases of --corpus are fixed: {spelling} must be left out; "
                f"got {drawn[spelling]}"
            )
    if list_only:
        list_corpus(options["only"], as_json)
        return
    with progress_bar() as progress:
        report = run_corpus(backend, **options, progress=progress)
    emit(report.as_dict(), as_json, render)
    if not report.passed:
        raise typer.Exit(1)


def list_corpus(only: list[str] | None, as_json: bool) -> None:
    """Print the bugs of the atlas."""
    from fa4.testing.atlas import find_bugs

    rows = [
        {"name": bug.name, "repository": bug.repository, "number": bug.number,
         "versions": bug.versions, "summary": bug.summary, "judged": bug.probe,
         "arrangement": bug.arrangement, "group": bug.group,
         "cases": [repr(case) for case in bug.cases]}
        for bug in find_bugs(only)
    ]  # fmt: skip
    emit({"bugs": rows}, as_json, render_list)


def render_list(report: Mapping[str, Any]) -> Any:
    """The bugs as a table."""
    from rich.table import Table

    table = Table("bug", "what went wrong", "versions")
    for bug in report["bugs"]:
        table.add_row(bug["name"], bug["summary"], bug["versions"])
    return table


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: bugs found, what is not covered, one line at last."""
    rows, counts = report["bugs"], report["counts"]
    name, judged = report["backend"], len(rows) - counts["not_covered"]
    if not judged:
        reason = next((row["reason"] for row in rows if row["reason"]), "no case ran")
        return (f"{name}: nothing could be checked, which is no success: {reason}",)
    found = [row for row in rows if row["error"]]
    parts = [part for row in found for part in bug_text(row)]
    parts += uncovered_lines(rows)
    if report["skipped"]:
        parts.append(f"stopped at the first bug; {len(report['skipped'])} were not looked for")
    not_robust = f"{counts['not_robust']} not robust, " if counts["not_robust"] else ""
    parts.append(
        f"{name}: {counts['failed']} of {judged} published bugs found, {not_robust}"
        f"{counts['not_covered']} not covered, in {report['seconds']:.1f} s"
    )
    return tuple(parts)


def bug_text(row: Mapping[str, Any]) -> Iterator[str]:
    """A bug that was found: its name, what it was upstream, what it is here, a test."""
    mark = " (not robust)" if row["status"] == "not robust" else ""
    yield f"like {row['name']}{mark}: {row['summary']}\n  {row['error']}\n\n{row['test']}"


def uncovered_lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """What was not judged, one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            by_reason.setdefault(row["reason"], []).append(row["name"])
    for reason, names in by_reason.items():
        where = names[0] if len(names) == 1 else f"{len(names)} bugs"
        yield f"not covered ({where}): {reason}"
