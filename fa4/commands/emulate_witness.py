"""`fa4 emulate --witness` and `--replay`: an order of events that leads to a finding, as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import read_text, write_whole

if TYPE_CHECKING:
    from fa4.emulator.machine.launch_record import Allocation, Launch
    from fa4.emulator.orders.witness import Witness

WitnessOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a short order of events that gives the finding."),
]
SteerOption = Annotated[
    int,
    typer.Option(min=0, metavar="RUNS", help="Look for an order that shows hazards, in so many."),
]
ReplayOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Run in the order of such a file.")
]


def read(path: Path) -> Witness:
    """The witness in a file. Raises ValueError if there is none."""
    from fa4.emulator.errors import LaunchError
    from fa4.emulator.orders.witness import read_witness

    try:
        return read_witness(read_text(path))
    except LaunchError as error:
        raise ValueError(f"{path}: {error}") from None


def write(
    path: Path,
    launch: Launch,
    allocations: Sequence[Allocation],
    content: Sequence[tuple[Any, Any]],
    options: Mapping[str, Any],
) -> Witness | None:
    """Finds and writes a witness of the first finding; None if there is none.

    content: arrays, each with what was in it at the start. They are left as they are.
    """
    from fa4.emulator.machine.options import Options
    from fa4.emulator.orders.witness import find_witness

    results = [array.copy() for array, _ in content]
    try:
        for array, before in content:
            array[...] = before
        witness = find_witness([launch], allocations, Options(**options))
    finally:
        for (array, _), result in zip(content, results, strict=True):
            array[...] = result
    if witness is not None:
        write_whole(path, witness.text().encode())
    return witness


def write_shown(path: Path, reports: Sequence[Any]) -> Witness | None:
    """Writes the witness of what steering has shown first, errors before others; None if nothing
    was shown."""
    found = [shown for report in reports if report.steering for shown in report.steering.shown]
    found.sort(key=lambda shown: shown.finding is None)
    if not found:
        return None
    witness: Witness = found[0].witness
    write_whole(path, witness.text().encode())
    return witness


def describe_steering(reports: Sequence[Any]) -> dict[str, Any] | None:
    """What steering did, as plain data; None if it was not asked for."""
    done = [report.steering for report in reports if report.steering is not None]
    shown = [one for steering in done for one in steering.shown]
    return {
        "runs": sum(steering.runs for steering in done),
        "shown": [
            {"kind": one.hazard.kind, "line": one.hazard.line, "outcome": one.outcome,
             "order": one.witness.steps(), "base": one.witness.base}
            for one in shown
        ],
        "unshown": sum(len(steering.unshown) for steering in done),
    }  # fmt: skip


def render_steering(described: Mapping[str, Any] | None) -> list[str]:
    """The same for people."""
    if described is None:
        return []
    shown, unshown = len(described["shown"]), described["unshown"]
    return [f"steering: {described['runs']} runs; hazards shown: {shown}, not shown: {unshown}"]


def describe(witness: Witness, path: Path) -> dict[str, Any]:
    """A witness as plain data."""
    place = {"file": str(path), "kind": witness.kind, "line": witness.line}
    return {**place, "steps": witness.steps(), "base": witness.base}


def render(described: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    steps = described["steps"]
    head = f"{described['kind']} at PTX line {described['line']}"
    if not steps:
        return [f"witness of {head}: found in the order fifo; wrote {described['file']}"]
    return [
        f"witness of {head}: {described['base']}, but for {len(steps)} choices; "
        f"wrote {described['file']}",
        *(f"  {step}" for step in steps),
    ]
