"""`fa4 emulate --until-covered RUNS`: other sizes, until all of the kernels has run."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands.emulate_findings import FindingFiles

if TYPE_CHECKING:
    from fa4.emulator.host.until_covered import Attempt, Covering

UntilOption = Annotated[
    int,
    typer.Option(
        min=0, metavar="RUNS", help="Vary integers until all has run, in at most so many runs."
    ),
]
VaryOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FIRST:LAST[:STEP]",
        help="With --until-covered: vary this integer only, in these limits; may be repeated.",
    ),
]
SecondsOption = Annotated[
    float, typer.Option(min=1, help="With --until-covered: begin no run after so many seconds.")
]
REFUSED = ("--out", "--trace", "--list", "--steer", "--witness", "--replay")
_LIMITS = re.compile(r"([^=]+)=(\d+):(\d+)(?::(\d+))?")
_INTEGER = re.compile(r"(?:(--?[^=\s]+)=)?(\d+)")


def covered_options(runs: int, vary: list[str] | None, seconds: float) -> dict[str, Any]:
    """The options by name. Raises ValueError for limits of nothing."""
    if vary and not runs:
        raise ValueError("--vary needs --until-covered RUNS")
    return {"--until-covered": runs, "--vary": vary, "--seconds": seconds}


def integers_of_script(arguments: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Name -> (index, value) of each positive integer among a script's arguments.

    Of `--k 512` and `--k=512` the name is k; of one by itself its place, from 1 on.
    """
    found = {}
    for index, text in enumerate(arguments):
        match = _INTEGER.fullmatch(text)
        if match is None or not int(match[2]):
            continue
        before = arguments[index - 1] if index else ""
        option = match[1] or (before if before.startswith("-") and "=" not in before else "")
        found[option.lstrip("-") or str(index + 1)] = index, int(match[2])
    return found


def with_integers(arguments: Sequence[str], places: Mapping[str, int], sizes: Any) -> list[str]:
    """The arguments with other integers. places: name -> index."""
    changed = list(arguments)
    for name, value in sizes.items():
        before, equals, _ = changed[places[name]].rpartition("=")
        changed[places[name]] = f"{before}{equals}{value}"
    return changed


def choose_sizes(
    known: Mapping[str, int], vary: Sequence[str], most: Callable[[int], int]
) -> dict[str, Sequence[int]]:
    """Of each integer the values to try, where it begins first. most: of one without limits.

    Raises ValueError for --vary that cannot be.
    """
    chosen: dict[str, Sequence[int]] = {}
    for text in vary:
        match = _LIMITS.fullmatch(text)
        if match is None:
            raise ValueError(f"--vary {text}: expected NAME=FIRST:LAST or NAME=FIRST:LAST:STEP")
        name, first, last, step = match[1], int(match[2]), int(match[3]), int(match[4] or 1)
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"--vary {text}: no integer of this name; there are {listed}")
        if not step or first > last:
            raise ValueError(f"--vary {text}: FIRST is at most LAST, STEP at least 1")
        chosen[name] = [known[name], *(x for x in range(first, last + 1, step) if x != known[name])]
    if not chosen:
        if not known:
            raise ValueError("--until-covered: there is no integer to vary among the arguments")
        chosen = {
            name: [value, *(x for x in range(1, most(value) + 1) if x != value)]
            for name, value in known.items()
        }
    return chosen


def attempt_script(
    file: Path,
    arguments: Sequence[str],
    places: Mapping[str, int],
    arch: str,
    options: Mapping[str, Any],
) -> Attempt:
    """A run of a script with other integers; only the first one's output is shown."""
    from fa4.commands.emulate_script import execute

    first = True

    def attempt(sizes: dict[str, int]) -> Any:
        nonlocal first
        with contextlib.ExitStack() as stack:
            if not first:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            first = False
            given = with_integers(arguments, places, sizes)
            session, failed, code = execute(file, given, arch, options)
        if code and not failed:
            raise ValueError(f"{file} {' '.join(given)} ended with exit code {code}")
        return session.coverage(), session.findings()

    return attempt


def integers_of_ptx(texts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Name -> (index, value) of each positive integer among --arg options."""
    import numpy as np

    from fa4.emulator.host.ptx_arguments import parse_arguments

    values = parse_arguments(texts, 0)
    return {
        name: (index, int(value))
        for index, (name, value) in enumerate(values.items())
        if isinstance(value, np.integer) and value > 0
    }


def attempt_ptx(
    texts: Sequence[str],
    places: Mapping[str, int],
    prepare: Callable[[Sequence[str]], Any],
    options: Mapping[str, Any],
) -> Attempt:
    """A run of a PTX kernel with other integers. prepare: makes the launch and its memory anew."""

    def attempt(sizes: dict[str, int]) -> Any:
        from fa4.emulator.execute import run
        from fa4.emulator.machine.options import Options

        job = prepare(with_integers(texts, places, sizes))
        report = run([job.launch], job.allocations, Options(**options))
        return report.coverage, report.findings

    return attempt


def describe_covering(found: Covering) -> dict[str, Any]:
    """What was found as plain data."""
    from fa4.emulator.host.until_covered import render_covering
    from fa4.emulator.tools.describe import describe_findings

    return {
        "ended": found.ended,
        "trials": [
            {"sizes": trial.sizes, "new": [vars(place) for place in trial.new],
             "findings": len(trial.findings), "refused": trial.refused}
            for trial in found.trials
        ],
        "open": [vars(place) for place in found.open],
        "proposal": found.proposal,
        "findings": [
            {"sizes": sizes, **one}
            for (sizes, _), one in zip(
                found.findings,
                describe_findings([finding for _, finding in found.findings], ""),
                strict=True,
            )
        ],
        "text": list(render_covering(found)),
    }  # fmt: skip


def render(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The same for people; findings of the sizes that were given first."""
    from fa4.commands.emulate_report import render_findings

    first = report["trials"][0]["sizes"]
    return (
        *render_findings([one for one in report["findings"] if one["sizes"] == first]),
        *report["text"],
        *(f"wrote {path}" for path in report["reports"]),
        f"findings: {len(report['findings']) or 'none'}",
    )


def run_covered(
    file: Path,
    script_args: Sequence[str],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    files: FindingFiles,
    prepare: Callable[[Sequence[str]], Any] | None = None,
) -> dict[str, Any]:
    """Varies, writes the files that were asked for and returns what was found.

    given: options of the command. prepare: of PTX; without it the file is a script.
    """
    from fa4.emulator.host.until_covered import search
    from fa4.emulator.tools.finding_files import FindingTexts

    clash = [name for name in REFUSED if given[name]] + ["--seeds"] * (given["--seeds"] > 1)
    if clash:
        raise ValueError(f"{clash[0]} cannot be used with --until-covered")
    texts = script_args if prepare is None else given["--arg"] or []
    found = integers_of_script(texts) if prepare is None else integers_of_ptx(texts)
    places = {name: index for name, (index, _) in found.items()}
    known = {name: value for name, (_, value) in found.items()}
    # Arrays of a kernel's stay as large as they are: its integers become no larger by themselves.
    most = 1 if prepare is not None else 2
    sizes = choose_sizes(known, given["--vary"] or [], lambda value: most * value)
    chosen = {**options, "seed": given["--seed"], "collect": True, "accepted": files.accepted}
    if prepare is None:
        attempt = attempt_script(file, script_args, places, given["--arch"], chosen)
    else:
        attempt = attempt_ptx(texts, places, prepare, chosen)
    covering = search(
        attempt, sizes, runs=given["--until-covered"], seconds=given["--seconds"],
        seed=given["--seed"],
    )  # fmt: skip
    written = files.write(
        FindingTexts(
            findings=[finding for _, finding in covering.findings], accepted=[],
            coverage=covering.coverage, ptx_file=file if prepare is not None else None,
        )
    )  # fmt: skip
    return {**describe_covering(covering), "reports": list(map(str, written))}
