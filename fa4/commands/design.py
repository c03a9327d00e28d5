"""`fa4 design`: the search for a faster design among plans that nobody has built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.commands.gpus import with_options

if TYPE_CHECKING:
    from rich.table import Table

    from fa4.config import Problem
    from fa4.search.journal import Journal
    from fa4.search.judge import Judge
    from fa4.search.run import Effort, SearchOutcome

PASSES = {"fwd": False, "forward": False, "bwd": True, "backward": True}
MOST_DESIGNS, MOST_JOBS, MOST_TOP = 1_000_000, 256, 100
TOKENS = 2**15  # of a call, over all sequences
INTERRUPTED = 130


CALL: Mapping[str, tuple[str, Any, str, str]] = {
    "machine": ("NAME", str, "Of `fa4 machines`, or a TOML file.", "b200"),
    "head_dim": ("N", int, "Elements of a query and key.", "128"),
    "head_dim_v": ("N", int, "Of a value.", "head dim"),
    "causal": ("", bool, "Hide later keys.", ""),
    "pass": ("NAME", str, "forward or backward.", "forward"),
    "dtype": ("TYPE", str, "Of q, k and v.", "bf16"),
    "seqlen": ("N", str, "Of 32k tokens in all.", "16k"),
    "heads": ("N", int, "Of queries and of keys.", "16"),
    "fp8_values": ("", bool, "V and P may be FP8: other numbers.", ""),
    "rescale_rate": ("X", float, "Share of steps that rescale O.", "as random inputs"),
}
EFFORT: Mapping[str, tuple[str, Any, str, str]] = {
    "only": ("NAME=VALUE[,VALUE]", list[str], "Designs with these settings.", "all"),
    "limit": ("N", int, "Designs to look at.", "2000"),
    "seconds": ("X", float, "End after so long.", "never"),
    "jobs": ("N", int, "Processes.", "all cores"),
    "dask": ("ADDRESS", str, "Scheduler of a dask cluster to run on.", "none"),
    "resume": ("FILE", Path, "Keep verdicts there, and go on from them.", "none"),
    "top": ("N", int, "Leaders to show.", "5"),
}


@with_options("call", CALL)
@with_options("effort", EFFORT)
def design(
    call: Mapping[str, Any],
    effort: Mapping[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Search for a faster kernel among plans that nobody has built; no GPU needed.

    Thousands of designs are simulated with all sets of constants that fit the published figures;
    those lead whose least rate is highest. Ctrl-C ends it with what it has.

    Example: fa4 design --machine b200 --head-dim 128 --resume out/d128.jsonl
    """
    from fa4.config import require
    from fa4.search.judge import Judge
    from fa4.search.report import Today, build_report, simulation_of
    from fa4.search.run import Search
    from fa4.search.space import find_space
    from fa4.sim.machine import find_machine
    from fa4.sim.options import default_pipeline

    direction = given(call, "pass", "forward")
    require(direction in PASSES, f"--pass must be one of {', '.join(PASSES)}", direction)
    backward, machine = PASSES[direction], find_machine(given(call, "machine", "b200"))
    wanted = _effort(effort)
    problem = _problem(call)
    narrow = bool(call["fp8_values"])
    space = find_space(problem, machine.gpu, backward=backward, narrow_values=narrow)
    restrictions = read_only(effort["only"] or [])
    space = space.restricted(restrictions)
    judge = Judge.of(problem, machine, simulation_of(call["rescale_rate"]))
    pipeline = default_pipeline(problem, machine, backward=backward)
    today = Today(pipeline=pipeline, rates=judge.rates(pipeline))
    wanted = replace(wanted, floor=today.floor)
    kept = restrictions | {"fp8": narrow}
    shown = min(wanted.limit, len(space))
    with _journal(effort["resume"], judge, kept) as journal, _progress(shown) as progress:
        outcome = Search(space, judge, wanted, journal=journal, progress=progress).run()
    report = {"problem": str(problem), **build_report(outcome, judge, today)}
    file = effort["resume"]
    emit(report | {"journal": None if file is None else str(file)}, as_json, render)
    if outcome.ended == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not outcome.leaders:
        raise typer.Exit(1)


def given(options: Mapping[str, Any], name: str, default: Any) -> Any:
    """What an option was given, or its default."""
    return default if options[name] is None else options[name]


def _effort(effort: Mapping[str, Any]) -> Effort:
    from fa4.config import require, require_int
    from fa4.search.run import Effort
    from fa4.sim.sweep import local_cores

    limit, top = given(effort, "limit", 2000), given(effort, "top", 5)
    require_int("--limit", limit, 1, MOST_DESIGNS)
    require_int("--top", top, 1, MOST_TOP)
    jobs, dask, seconds = (effort[name] for name in ("jobs", "dask", "seconds"))
    if dask is not None and jobs is not None:
        raise ValueError(f"--dask and --jobs exclude each other; got {dask} and {jobs}")
    jobs = local_cores() if jobs is None else jobs
    require_int("--jobs", jobs, 1, MOST_JOBS)
    require(seconds is None or seconds > 0, "--seconds must be positive", seconds)
    return Effort(limit=limit, seconds=seconds, jobs=jobs, dask=dask, top=top)


def _problem(call: Mapping[str, Any]) -> Problem:
    from fa4.config import Problem
    from fa4.sim.fields import parse_count

    text, heads = given(call, "seqlen", "16k"), given(call, "heads", 16)
    try:
        length = parse_count(text)
    except ValueError as error:
        raise ValueError(f"--seqlen {error}; got {text!r}") from error
    head_dim = given(call, "head_dim", 128)
    return Problem(
        batch=max(1, TOKENS // max(1, length)), seqlen_q=length, seqlen_k=length, heads_q=heads,
        heads_k=heads, head_dim=head_dim, head_dim_v=given(call, "head_dim_v", head_dim),
        dtype=given(call, "dtype", "bf16"), causal=bool(call["causal"]),
    )  # fmt: skip


def read_only(texts: list[str]) -> dict[str, list[str]]:
    """{"groups": ["1", "2"]} from ["groups=1,2"]. ValueError for what is none, or given twice."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and values):
            raise ValueError(f"--only: expected NAME=VALUE, such as groups=2; got {text!r}")
        if name in found:
            raise ValueError(f"--only gives {name} twice: {','.join(found[name])} and {values}")
        found[name] = [value.strip() for value in values.split(",")]
    return found


@contextmanager
def _journal(
    path: Path | None, judge: Judge, settings: Mapping[str, Any]
) -> Iterator[Journal | None]:
    """The journal of a search, closed at the end; None without a file."""
    from fa4.search.journal import Journal
    from fa4.search.report import about
    from fa4.sim.cluster import model_version

    if path is None:
        yield None
        return
    journal = Journal(path, about(judge, settings, model_version()))
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """A callback for outcomes that moves a bar, if stderr is a terminal."""
    from fa4.commands.progress import progress_bar

    with progress_bar() as update:

        def said(outcome: SearchOutcome) -> None:
            best = f"best {outcome.leaders[0].verdict.least:.0f} TFLOP/s" if outcome.leaders else ""
            update(outcome.judged, count, best)

        yield said


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people."""
    today = report["today"]
    parts: list[Any] = [
        f"{report['judged']} of {report['designs']} designs judged in "
        f"{report['cpu_seconds']:.0f} CPU seconds, {report['can_run']} can run; ended: "
        f"{report['ended']}"
        + (f"; {report['from_journal']} from {report['journal']}" if report["from_journal"] else "")
    ]
    for kind, row in report["pruned"].items():
        example = f", such as: {row['example']}" if row["example"] else ""
        parts.append(f"pruned, {kind}: {row['count']}{example}")
    parts.append(
        f"today: {today['tflops']:.0f} TFLOP/s on {report['machine']}, {span(today)} by "
        f"{report['sets']} other sets of constants"
        + ("" if not (power := today["sustained_least_tflops"]) else f"; {power:.0f} at its power")
    )
    if not report["leaders"]:
        if report["can_run"]:
            return (*parts, "no design comes within a tenth of that")
        return (*parts, "no design can run")
    parts += ["", "leaders", table(report["leaders"])]
    if report["other_shapes"]:
        parts += ["the best of other shapes", table(report["other_shapes"])]
    parts += settings_lines(report)
    return (*parts, *reasons(report))


def span(row: Mapping[str, Any]) -> str:
    """From the least to the most."""
    return f"{row['least_tflops']:.0f} to {row['most_tflops']:.0f}"


def table(rows: list[Mapping[str, Any]]) -> Table:
    """Designs with their rates in TFLOP/s."""
    from rich.box import ASCII
    from rich.table import Table

    made = Table(box=ASCII)
    for title in ("design", "TFLOP/s", "by all sets", "today x", "at its power", "often rescaled",
                  "bound by"):  # fmt: skip
        made.add_column(title, justify="left" if title == "bound by" else "right")
    for row in rows:
        low, high = row["gain_interval"] or (row["gain"], row["gain"])
        capped = row["sustained_least_tflops"]
        made.add_row(
            str(row["number"]), f"{row['tflops']:.0f}", span(row),
            f"{low:.2f} to {high:.2f}" + (" (undecided)" if row["undecided"] else ""),
            "" if capped is None else f"{capped:.0f}", f"{row['often_rescaled_tflops']:.0f}",
            row["bound_by"],
        )  # fmt: skip
    return made


def settings_lines(report: Mapping[str, Any]) -> list[str]:
    """What each design is; of the further ones what differs from the first."""
    first = report["leaders"][0]
    lines = [f"{first['number']}: {say(first['settings'])}"]
    for row in (*report["leaders"][1:], *report["other_shapes"]):
        other = {name: value for name, value in row["settings"].items()
                 if first["settings"].get(name) != value}  # fmt: skip
        lines.append(f"{row['number']}: as {first['number']}, but {say(other)}")
    shown = (*report["leaders"], *report["other_shapes"])
    built = [(row["number"], row["built"]) for row in shown if row["built"]]
    return lines + [f"{number} is built: fa4 predict --kernel {name}" for number, name in built]


def say(settings: Mapping[str, Any]) -> str:
    """name=value of each setting."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def reasons(report: Mapping[str, Any]) -> list[str]:
    """Why the first leads, and what would decide."""
    first, why, decides = report["leaders"][0], report["why"], report["deciding"]
    lines = [f"{first['number']}: {first['bottleneck']}", f"limited by {why['limit']}"]
    if why["step_cycles"]:
        rows = "; ".join(f"{x['role']} {x['what']} {x['cycles']:.0f}" for x in why["chain"])
        lines.append(f"chain of a step, {why['step_cycles']:.0f} cycles, most of it: {rows}")
    if decides is None:
        lines.append("no figure of those that are not known tells it from the next")
    else:
        rival = (report["other_shapes"] or report["leaders"][1:])[0]["number"]
        (low, high), (at_low, at_high) = decides["ends"], decides["first_over_second"]
        lines.append(
            f"to decide between {first['number']} and {rival}, measure {decides['figure']}: at "
            f"{low:g} the first is {at_low:.3f} times as fast, at {high:g} {at_high:.3f} times"
        )
    return lines
