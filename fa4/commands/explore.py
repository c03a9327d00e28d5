"""`fa4 explore`: a page on which a kernel's choices can be changed and watched."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit

LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal


def explore(
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path(
        "out/explore.html"
    ),
    machine: Annotated[
        list[str] | None,
        typer.Option(help="A name, or a TOML file; several are allowed.", show_default="all known"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small choice of everything.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write a page that explains the pipeline: change a choice and watch what it does.

    One file that needs no network: timeline of the warp roles and units, memory, barriers, program
    lines and predicted speed of every combination, and what the emulator says when a barrier is
    taken out. It takes some minutes to make.

    Example: fa4 explore --quick --open
    """
    from fa4.base.files import require_replaceable
    from fa4.explore.controls import controls, with_machines
    from fa4.explore.packing import pack
    from fa4.explore.page import build_page
    from fa4.explore.recording import count_shapes, record_grid
    from fa4.explore.verdicts import read_verdicts
    from fa4.sim.machine import find_machine

    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end in .html; got {str(out)!r}")
    require_replaceable(out)
    check_folder(out.parent)
    grid = controls(quick)
    for name in machine or ():
        find_machine(name)  # refuses an unknown one before anything is done
    if machine:
        grid = with_machines(grid, tuple(dict.fromkeys(machine)))
    verdicts = read_verdicts()
    build_page("")  # what the page is made of is there
    began = time.perf_counter()
    with progress_bar(count_shapes(grid)) as advance:
        recording = record_grid(grid, advance)
    page = build_page(pack(recording, verdicts)).encode()
    write_whole(out, page)
    report = {
        "file": str(out),
        "file_bytes": len(page),
        "points": len(recording.point_results),
        "predictions": len(recording.results),
        "timelines": len(recording.steps),
        "plans": len(recording.plans.values),
        "seconds": time.perf_counter() - began,
    }
    emit(report, as_json, render)
    if show:
        webbrowser.open(out.resolve().as_uri())


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, lines where that is no terminal, and the function that advances it."""
    if not sys.stderr.isatty():
        yield progress_lines(total)
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda: bar.advance(task)


def progress_lines(total: int) -> Callable[[], None]:
    """Says on stderr what there is to do, then every LINE_SECONDS how much of it is done."""
    from fa4.commands.limits import time_text

    began = said = time.monotonic()
    done = 0
    print(f"fa4 explore: {total} shapes to simulate", file=sys.stderr, flush=True)

    def advance() -> None:
        nonlocal done, said
        done, now = done + 1, time.monotonic()
        if now - said < LINE_SECONDS:
            return
        said, left = now, (now - began) * (total - done) / done
        print(
            f"fa4 explore: {done} of {total}, {time_text(left)} left", file=sys.stderr, flush=True
        )

    return advance


def render(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The report for people."""
    return (
        f"{report['points']} combinations: {report['predictions']} predictions, "
        f"{report['timelines']} timelines, {report['plans']} plans; {report['seconds']:.0f} s",
        f"wrote {report['file']} ({report['file_bytes'] / 1e6:.2f} MB); open it in a browser",
    )
