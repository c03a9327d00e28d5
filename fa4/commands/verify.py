"""`fa4 verify`: the property suite on any attention function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fa4.commands import emit, verify_corpus, verify_run

# fa4.testing.runner says the same; not imported, so that --help stays fast
DEFAULT_EXAMPLES, DEFAULT_STEPS = 20, 12


BackendName = Annotated[
    str,
    typer.Option(
        help="reference, oracle, torch-sdpa, an adapter (--list-backends), module:function, a "
        "pair module:forward,module:backward or torch:module:function."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only properties of this name or pattern, as 'gradients*' (repeatable)."),
]
DtypeNames = Annotated[
    list[str] | None,
    typer.Option(help="Only this element type: fp32, bf16, fp16, fp64 (repeatable)."),
]
ExitFirst = Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases of everything: half a minute.")]
MaxExamples = Annotated[
    int, typer.Option(help="Cases drawn per property; with 20, 5 of each pair of features.")
]
Steps = Annotated[
    int, typer.Option(help="Calls in a row of a session: cache_*, replay_* and others.")
]
Seed = Annotated[int, typer.Option(help="Seed of the cases; the same one repeats a run.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for one call; turns isolation on.")]
Isolated = Annotated[
    bool | None,
    typer.Option(
        "--isolate/--no-isolate",
        help="Run the function in a worker process that is replaced when it dies (default: for "
        "what uses CUDA).",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="The robustness properties must hold, too.")]
Corpus = Annotated[
    bool,
    typer.Option("--corpus", help="Only the bugs of the atlas, by their smallest cases: seconds."),
]
Html = Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")]
Junit = Annotated[Path | None, typer.Option(help="Write JUnit XML, a test case per property.")]
Badge = Annotated[Path | None, typer.Option(help="Write a badge of the result, SVG.")]
ListAdapters = Annotated[
    bool, typer.Option("--list-backends", help="List the adapters and what is installed.")
]


def verify(
    backend: BackendName = "reference",
    only: Only = None,
    dtype: DtypeNames = None,
    exitfirst: ExitFirst = False,
    quick: Quick = False,
    max_examples: MaxExamples = DEFAULT_EXAMPLES,
    steps: Steps = DEFAULT_STEPS,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    timeout: Timeout = None,
    isolated: Isolated = None,
    strict: Strict = False,
    corpus: Corpus = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="List the properties; with --corpus, the bugs.")
    ] = False,
    list_adapters: ListAdapters = False,
    html: Html = None,
    junit: Junit = None,
    badge: Badge = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check an attention function against the float64 oracle, within a derived error budget.

    Exit code 0 if nothing failed; 1 if a property failed or nothing could be checked; 2 for bad
    input. What the function does not offer is listed as not covered, and never counted as passed.

    Example: fa4 verify --backend torch-sdpa --only 'causal*' --only 'gradients*' -x
    """
    from fa4 import testing

    if list_adapters:
        emit({"backends": testing.list_backends()}, as_json, render_backends)
        return
    chosen = {
        "only": tuple(only) if only else None,
        "dtypes": tuple(dtype) if dtype else None,
        "exitfirst": exitfirst,
        "strict": strict,
        "isolate": isolated,
        "timeout_s": timeout,
    }
    if corpus:
        drawn = {"--max-examples": max_examples, "--steps": steps, "--seed": seed, "--jobs": jobs,
                 "--html": html, "--junit": junit, "--badge": badge}  # fmt: skip
        verify_corpus.verify_corpus(backend, as_json, list_only, drawn, chosen)
        return
    if list_only:
        emit({"properties": describe(testing.find_properties(only or None))}, as_json, render_list)
        return
    drawn = {"max_examples": max_examples, "steps": steps, "seed": seed, "quick": quick,
             "jobs": jobs}  # fmt: skip
    options = testing.VerifyOptions(**drawn, **chosen)
    files = verify_run.check_files({"html": html, "junit": junit, "badge": badge})
    report = verify_run.run_suite(backend, options, files)
    emit(report, as_json, render)  # first, so that a full disk costs no run
    verify_run.write_files(report, files)
    if not report["passed"]:
        raise typer.Exit(1)


def describe(properties: Any) -> list[dict[str, Any]]:
    """Name, description, group and needs of each property."""
    return [
        {"name": prop.name, "description": prop.description, "group": prop.group,
         "needs": sorted(prop.needs)}
        for prop in properties
    ]  # fmt: skip


def render_list(report: Mapping[str, Any]) -> Any:
    """The properties as a table."""
    from rich.table import Table

    table = Table("property", "what must hold", "needs")
    for prop in report["properties"]:
        table.add_row(prop["name"], prop["description"], ", ".join(prop["needs"]))
    return table


def render_backends(report: Mapping[str, Any]) -> Any:
    """The adapters as a table."""
    from rich.table import Table

    table = Table("backend", "what it runs", "here")
    for row in report["backends"]:
        table.add_row(row["name"], row["description"], row["missing"] or "yes")
    return table


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: results, failures by cause, what is not covered, one line at last."""
    rows = report["properties"]
    if not any(row["status"] != "not covered" for row in rows):
        return (
            f"{report['backend']}: nothing could be checked, which is no success: "
            f"{_first_reason(report)}",
        )
    parts: list[Any] = [results_table(rows), *uncovered_lines(rows)]
    if report["skipped"]:
        parts.append(f"stopped at the first failure; {len(report['skipped'])} properties not run")
    for group in report["failures"]:
        parts += failure_text(group)
    if len(report["failures"]) > 1:
        parts.append(causes_text(report["failures"]))
    said, files = report["printed"], report["files"]
    if said["lines"]:
        parts.append(f"it printed {said['lines']} lines, as {said['first']!r}")
    if files:
        parts.append(f"report in {', '.join(files.values())}")
    counts = report["counts"]
    not_robust = f"{counts['not_robust']} not robust, " if counts["not_robust"] else ""
    parts.append(
        f"{report['backend']}: {counts['passed']} passed, {counts['failed']} failed, {not_robust}"
        f"{counts['not_covered']} not covered; {report['cases']} cases "
        f"in {report['seconds']:.1f} s (seed {report['seed']})"
    )
    return tuple(parts)


def results_table(rows: list[Mapping[str, Any]]) -> Any:
    """One row per property that ran; pairs of features that passed are one row per feature."""
    from rich.table import Table

    table = Table("property", "status", "cases", "error / budget")
    pairs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        first, with_, _ = row["name"].partition("_with_")
        if row["status"] == "passed" and with_:
            pairs.setdefault(first, []).append(row)
        elif row["status"] != "not covered":
            share = "" if row["worst_share"] is None else f"{row['worst_share']:.3f}"
            table.add_row(row["name"], row["status"], str(row["cases"]), share)
    for first, group in pairs.items():
        worst = max(row["worst_share"] for row in group)
        cases = sum(row["cases"] for row in group)
        table.add_row(f"{first} with {len(group)} others", "passed", str(cases), f"{worst:.3f}")
    return table


def uncovered_lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """What is not covered, one line per reason; and which cases of what ran were not."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            for reason in row["reason"].split("; "):
                by_reason.setdefault(reason, []).append(row["name"])
    for reason, names in by_reason.items():
        where = names[0] if len(names) == 1 else f"{len(names)} properties"
        yield f"not covered ({where}): {reason}"


def failure_text(group: Mapping[str, Any]) -> Iterator[str]:
    """One cause: its name, the smallest example as a test, the properties that show it."""
    names, smallest = group["properties"], group["smallest"]
    others = len(names) - 1
    more = f" and {others} other{'s' * (others > 1)}" if others else ""
    yield (
        f"\n{group['cause']}\n  {smallest}{more} {group['status']}: {group['error']}\n\n"
        f"{group['test']}"
    )
    if more:
        yield f"with it: {', '.join(name for name in names if name != smallest)}"


def causes_text(groups: list[Mapping[str, Any]]) -> str:
    """The causes, a line each."""
    lines = [f"  {group['cause']}: {len(group['properties'])}" for group in groups]
    return "\n".join([f"{len(groups)} causes, and how many properties show each:", *lines])


def _first_reason(report: Mapping[str, Any]) -> str:
    """Why the first property is not covered."""
    return next((row["reason"] for row in report["properties"] if row["reason"]), "no case ran")
