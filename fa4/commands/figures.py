"""`fa4 figures`: the figures of the pages, each made anew from the code and its measurements."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.figures.entry import FigureEntry

# Of a figure's data: objects, drawn but not printed.
HIDDEN = ("timeline", "window", "plan", "times")


def figures(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which; all if none is named.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("out/figures"),
    file_format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
    only_list: Annotated[bool, typer.Option("--list", help="Say which there are.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines: the numbers, too.")
    ] = False,
) -> None:
    """Draw the figures that explain the kernel: predictions, measurements and numerics.

    A figure that needs a package that is missing is left out, with a line that says so and exit
    code 2; the others are made.

    Example: fa4 figures ablation exp2 --format svg
    """
    from fa4.base.drawing import FORMATS, require_matplotlib
    from fa4.figures.catalogue import choose

    chosen = choose(names or [])
    if file_format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}; got {file_format!r}")
    if only_list:
        emit({"figures": [describe(entry) for entry in chosen]}, as_json, render_list)
        return
    require_matplotlib()
    paths = {entry.name: out / f"{entry.name}.{file_format}" for entry in chosen}
    check_files(paths.values())
    made, missing = make(chosen, file_format)
    report = write(made, chosen, paths)
    if report:
        emit({"figures": report}, as_json, render)
    if missing:
        raise ImportError("; ".join(f"figure {name}: {why}" for name, why in missing.items()))


def check_files(paths: Any) -> None:
    """Raise now what writing would raise later, before anything is computed."""
    from fa4.base.files import require_replaceable

    for path in paths:
        check_folder(path.parent)
        require_replaceable(path)


def make(
    chosen: list[FigureEntry], file_format: str
) -> tuple[dict[str, tuple[Mapping[str, Any], bytes]], dict[str, str]]:
    """(data, content) of each figure, and why some could not be made: a package is missing."""
    made: dict[str, tuple[Mapping[str, Any], bytes]] = {}
    missing: dict[str, str] = {}
    for entry in chosen:
        try:
            data = entry.collect()
        except ImportError as error:
            missing[entry.name] = str(error)
            continue
        made[entry.name] = (data, entry.render(data, file_format))
        if sys.stderr.isatty():
            print(f"{entry.name}: {len(made)} of {len(chosen)}", file=sys.stderr)
    return made, missing


def write(
    made: Mapping[str, tuple[Mapping[str, Any], bytes]],
    chosen: list[FigureEntry],
    paths: Mapping[str, Path],
) -> list[dict[str, Any]]:
    """Write the files; what was made, with the numbers of each figure."""

    report = []
    for entry in chosen:
        if entry.name in made:
            data, content = made[entry.name]
            write_whole(paths[entry.name], content)
            numbers = {key: value for key, value in data.items() if key not in HIDDEN}
            report.append(
                describe(entry)
                | {"file": str(paths[entry.name]), "file_bytes": len(content), "data": numbers}
            )
    return report


def describe(entry: FigureEntry) -> dict[str, Any]:
    """A figure without its numbers."""
    return {"name": entry.name, "about": entry.about, "sources": entry.sources,
            "needs": entry.needs, "command": entry.command}  # fmt: skip


def render_list(report: Mapping[str, Any]) -> Any:
    """Name and purpose of each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("what it shows")
    for entry in report["figures"]:
        needs = f" (needs {entry['needs']})" if entry["needs"] else ""
        table.add_row(entry["name"], entry["about"] + needs)
    return table


def render(report: Mapping[str, Any]) -> str:
    """One line for each file."""
    return "\n".join(
        f"wrote {entry['file']} ({entry['file_bytes'] / 1024:.0f} KiB): {entry['data']['title']}"
        for entry in report["figures"]
    )
