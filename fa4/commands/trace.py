"""`fa4 trace`: what every warp role and unit of a CTA does when, for Perfetto or as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, require_replaceable, write_whole
from fa4.commands import emit
from fa4.commands.predict import with_changes, with_settings

if TYPE_CHECKING:
    from fa4.sim.iket_ranges import MeasuredCta
    from fa4.sim.timeline import Timeline

SUFFIXES = (".json", ".png", ".svg")
SET_HELP = "A setting, or gpu.X or costs.X of the machine (repeatable)."


@with_settings
def trace(
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SET_HELP)
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", help="File to write: .json for ui.perfetto.dev, .png or .svg."),
    ] = Path("out/trace.json"),
    tiles: Annotated[int, typer.Option("--tiles", help="Work tiles to simulate.")] = 1,
    kv_tiles: Annotated[
        int, typer.Option("--kv-tiles", help="Steps of each work tile; 0 for all of them.")
    ] = 24,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of NVIDIA's run-iket, to lie beside the roles."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    **settings: Any,
) -> None:
    """Write the timeline of a CTA: warp roles, units, waits and signals, counters.

    Without options: what `fa4 predict` predicts without options.

    Example: fa4 trace --head-dim 64 --causal --out trace.svg
    """
    from fa4.sim.options import build
    from fa4.sim.timeline import record

    kind = check_name(out)
    check_folder(out.parent)
    ranges = read_ranges(measured, kind)
    request = build(with_changes(settings, change))
    timeline = record(
        request.problem,
        request.pipeline,
        request.machine,
        request.simulation,
        tiles=tiles,
        kv_tiles=kv_tiles or None,
    )
    content = draw(timeline, kind, ranges)
    write_whole(out, content)
    report = summarize(timeline) | {"file": str(out), "file_bytes": len(content)}
    emit(report | {"measured": ranges and ranges.about}, as_json, render)


def read_ranges(path: Path | None, kind: str) -> MeasuredCta | None:
    """What was measured, if a file is named; ValueError where a picture would have to show it."""
    from fa4.sim.iket_ranges import read_measured

    if path is not None and kind != "json":
        raise ValueError(f"--measured needs an --out that ends in .json; got .{kind}")
    return None if path is None else read_measured(path)


def check_name(out: Path) -> str:
    """The kind of file that a name asks for: json, png or svg."""
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in {', '.join(SUFFIXES)}; got {str(out)!r}")
    require_replaceable(out)
    return out.suffix.lower().removeprefix(".")


def draw(timeline: Timeline, kind: str, measured: MeasuredCta | None = None) -> bytes:
    """The content of the file."""
    if kind == "json":
        from fa4.sim.trace import trace_text

        return trace_text(timeline, measured).encode()
    from fa4.sim.figure import draw_timeline

    return draw_timeline(timeline, kind)


def summarize(timeline: Timeline) -> dict[str, Any]:
    """What was simulated, and what its steady state looks like."""
    from fa4.sim.figure import steady_window, title_of, unit_shares
    from fa4.sim.trace import metadata

    window = steady_window(timeline)
    ns = 1e9 / timeline.machine.clock_hz
    return {
        "title": title_of(timeline, window),
        "timeline": metadata(timeline),
        "events": sum(len(cta.events) for cta in timeline.ctas),
        "microseconds": timeline.cycles * ns / 1000,
        "step_cycles": window.period,
        "unit_busy": unit_shares(timeline, window),
    }


def render(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The report for people: three or four lines."""
    about = report["timeline"]
    busy = [f"{unit} {share:.0%}" for unit, share in list(report["unit_busy"].items())[:5]]
    cut = ", steps left out" if about["shortened"] else ""
    steps = sum(rows[0] for cta in about["trips"]["per_cta"] for rows in cta)
    tiles = sum(len(cta) for cta in about["trips"]["per_cta"])
    lines: tuple[str, ...] = (
        report["title"],
        f"CTAs: {about['ctas']}, work tiles: {tiles}, steps: {steps}{cut}; {report['events']} "
        f"events in {report['microseconds']:.1f} us; units busy: {', '.join(busy)}",
        f"wrote {report['file']} ({report['file_bytes'] / 1024:.0f} KiB)",
    )
    if report["measured"]:
        shown = report["measured"]
        lines += (
            f"measured: CTA {tuple(shown['cta'])} of {shown['ctas']} of {shown['kernel']!r}, "
            f"launch {shown['launch'] + 1} of {shown['launches']}: {shown['ranges']} ranges of "
            f"{shown['warps']} warps, from its first range on",
        )
    if report["file"].endswith(".json"):
        return (*lines, "open it at https://ui.perfetto.dev")
    return lines
