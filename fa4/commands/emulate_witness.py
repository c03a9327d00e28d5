"""`fa4 emulate --witness` and `--replay`: an order of events that leads to a finding, as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import read_text, write_whole

if TYPE_CHECKING:
    from fa4.emulator.machine.launch_record import Allocation, Launch
    from fa4.emulator.tools.witness import Witness

WitnessOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a short order of events that gives the finding."),
]
ReplayOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Run in the order of such a file.")
]


def read(path: Path) -> Witness:
    """The witness in a file. Raises ValueError if there is none."""
    from fa4.emulator.errors import LaunchError
    from fa4.emulator.tools.witness import read_witness

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
    """Writes a witness of the first finding; None if there is none.

    content: arrays, each with what was in it at the start. They are left as they are.
    """
    from fa4.emulator.machine.options import Options
    from fa4.emulator.tools.witness import find_witness

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


def describe(witness: Witness, path: Path) -> dict[str, Any]:
    """A witness as plain data."""
    steps = [*map(str, witness.choices), *(f"wait {n} gives up" for n in witness.gave_up)]
    return {"file": str(path), "kind": witness.kind, "line": witness.line, "steps": steps}


def render(described: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    steps = described["steps"]
    head = f"{described['kind']} at PTX line {described['line']}"
    if not steps:
        return [f"witness of {head}: found in the order fifo; wrote {described['file']}"]
    return [
        f"witness of {head}: fifo, but for {len(steps)} choices; wrote {described['file']}",
        *(f"  {step}" for step in steps),
    ]
