"""A timeline as a picture: a few steady-state steps, roles above and units below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fa4 import drawing
from fa4.config import require
from fa4.drawing import FORMATS, GREY, PALE
from fa4.sim.timeline import CtaTimeline, Event, Timeline, UnitSlice

STEPS = 2  # steady-state steps shown: more make the names illegible

PRODUCT, EXPONENTIAL, MATH = "matrix product", "exponentials", "other arithmetic"
TENSOR_MEMORY, SHARED_MEMORY = "tensor memory", "shared memory"
COPY, BARRIER, WAITING = "bulk copy", "barrier, fence", "waiting"
COLOURS = {
    PRODUCT: drawing.BLUE,
    EXPONENTIAL: drawing.VERMILION,
    MATH: drawing.ORANGE,
    TENSOR_MEMORY: drawing.GREEN,
    SHARED_MEMORY: drawing.PINK,
    COPY: drawing.SKY,
    BARRIER: drawing.SILVER,
    WAITING: PALE,
}
KIND_OF_UNIT = {
    "tensor": PRODUCT,
    "mufu": EXPONENTIAL,
    "fma": MATH,
    "alu": MATH,
    "issue": MATH,
    "tmem_load": TENSOR_MEMORY,
    "tmem_store": TENSOR_MEMORY,
    "smem": SHARED_MEMORY,
    "tma": COPY,
    "dsmem": COPY,
    "reduce": COPY,
}
UNIT_ORDER = tuple(KIND_OF_UNIT)
COPY_UNIT = "tma"  # is always shown: that nothing is copied says something, too
WIDTH_INCHES, ROW_INCHES, LABEL_POINTS = 15.0, 0.42, 7.5


@dataclass(frozen=True)
class Window:
    """Cycles shown, of one CTA; `period` cycles per step, if there are several."""

    start: float
    end: float
    period: float | None


@dataclass(frozen=True)
class Bar:
    """A rectangle in a row, and the names to try for it, longest first."""

    start: float
    end: float
    kind: str
    names: tuple[str, ...]


def steady_window(timeline: Timeline, steps: int = STEPS) -> Window:
    """`steps` whole steps from the middle of the first work tile: there, loads still go on.

    A step is the time between two of the main role's first repeated pieces of work. Everything is
    shown if there are too few steps to be steady.
    """
    cta = timeline.ctas[0]
    starts = _step_starts(cta)
    if len(starts) < steps + 3:
        period = (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else None
        return Window(0.0, cta.tile_ends[0], period)
    first = min(len(starts) // 2, len(starts) - 2 - steps)
    start, end = starts[first], starts[first + steps]
    return Window(start, end, (end - start) / steps)


def _step_starts(cta: CtaTimeline) -> list[float]:
    """When the main role (the one that issues products) began each step of the first work tile."""
    roles = {piece.role for piece in cta.unit_slices if piece.unit == "tensor"}
    starts: dict[tuple[str, str], list[float]] = {}
    for event in cta.events:
        if event.role in roles and event.tile == 0 and event.kind in ("work", "issue"):
            starts.setdefault((event.role, event.what), []).append(event.start)
    most = max((len(times) for times in starts.values()), default=0)
    return next((times for times in starts.values() if len(times) == most), [])


def unit_shares(timeline: Timeline, window: Window) -> dict[str, float]:
    """Share of the window in which each unit of the first CTA is occupied, busiest first."""
    busy = dict.fromkeys(timeline.units, 0.0)
    for piece in timeline.ctas[0].unit_slices:
        shown = min(piece.end, window.end) - max(piece.start, window.start)
        busy[piece.unit] += max(0.0, shown)
    length = max(window.end - window.start, 1.0)
    shares = {unit: cycles / length for unit, cycles in busy.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def rows_of(timeline: Timeline, window: Window) -> dict[str, list[Bar]]:
    """Row name -> bars in the window: roles as in the plan, then units: those used, and copies."""
    cta = timeline.ctas[0]
    rows: dict[str, list[Bar]] = {role.name: [] for role in timeline.plan.roles}
    units: dict[str, list[Bar]] = {unit: [] for unit in UNIT_ORDER}
    for event in cta.events:
        if event.kind != "arrive" and event.end > window.start and event.start < window.end:
            rows[event.role].append(_role_bar(event))
    for piece in cta.unit_slices:
        if piece.end > window.start and piece.start < window.end and piece.end > piece.start:
            units.setdefault(piece.unit, []).append(_unit_bar(piece))
    shown = {unit: bars for unit, bars in units.items() if bars or unit == COPY_UNIT}
    return rows | {f"{unit} unit": bars for unit, bars in shown.items()}


def _role_bar(event: Event) -> Bar:
    if event.kind == "wait":
        signal = event.what.removeprefix("wait ")
        return Bar(event.start, event.end, WAITING, (signal,))
    kind = BARRIER if event.unit is None else KIND_OF_UNIT.get(event.unit, MATH)
    return Bar(event.start, event.end, kind, _names(event.what))


def _unit_bar(piece: UnitSlice) -> Bar:
    return Bar(piece.start, piece.end, KIND_OF_UNIT.get(piece.unit, MATH), _names(piece.what))


def _names(what: str) -> tuple[str, ...]:
    """The name in full, without its last word, and the one word that says most."""
    words = what.split()
    best = words[1] if words[0] == "row" and len(words) > 1 else words[0]
    names = (what, " ".join(words[:-1]), best)
    return tuple(dict.fromkeys(name for name in names if name not in ("", "row")))


def title_of(timeline: Timeline, window: Window) -> str:
    """What runs where, cycles per step, and the busiest unit."""
    ns = 1e9 / timeline.machine.clock_hz
    what = {"kv_tiles": "KV tile", "q_tiles": "query tile"}.get(timeline.plan.trips[0], "step")
    step = "" if window.period is None else (
        f"{window.period:,.0f} cycles ({window.period * ns:,.0f} ns) per {what}, "
    )  # fmt: skip
    unit, share = next(iter(unit_shares(timeline, window).items()))
    name = timeline.plan.name[:1].upper() + timeline.plan.name[1:]
    return f"{name} on {timeline.machine.name}: {step}{unit} is the busiest unit ({share:.0%})"


def draw_timeline(timeline: Timeline, file_format: str = "png", steps: int = STEPS) -> bytes:
    """The picture as PNG or SVG. ImportError if matplotlib is missing."""
    require(file_format in FORMATS, f"the format must be one of {', '.join(FORMATS)}", file_format)
    window = steady_window(timeline, steps)
    height = ROW_INCHES * len(rows_of(timeline, window)) + 1.5
    with drawing.styled():
        figure = drawing.new_figure((WIDTH_INCHES, height))
        axes = figure.add_axes((0.09, 0.62 / height, 0.895, 1 - 1.5 / height))
        draw_axes(axes, timeline, window)
        return drawing.save(figure, file_format)


def draw_axes(axes: Any, timeline: Timeline, window: Window) -> None:
    """The timeline on matplotlib's axes, which are to be almost WIDTH_INCHES wide."""
    rows = rows_of(timeline, window)
    _draw_rows(axes, rows, window)
    _draw_frame(axes, timeline, window, rows)


def _draw_rows(axes: Any, rows: dict[str, list[Bar]], window: Window) -> None:
    """The bars, and the names that fit into them."""
    inches_per_cycle = 0.895 * WIDTH_INCHES / (window.end - window.start)
    for number, bars in enumerate(rows.values()):
        for bar in bars:
            start, end = max(bar.start, window.start), min(bar.end, window.end)
            span = (start - window.start, end - start)
            inches = span[1] * inches_per_cycle
            # An edge separates neighbours, but would hide a bar that is hardly wider than itself.
            axes.broken_barh([span], (number - 0.39, 0.78), facecolors=COLOURS[bar.kind],
                             edgecolor="white", linewidth=0.5 if inches > 0.03 else 0)  # fmt: skip
            name = next((x for x in bar.names if _fits(x, inches)), None)
            if name is not None:
                axes.text(span[0] + span[1] / 2, number, name, ha="center", va="center_baseline",
                          fontsize=LABEL_POINTS, color=_ink(bar.kind))  # fmt: skip


def _fits(name: str, inches: float) -> bool:
    return (0.60 * len(name) + 0.5) * LABEL_POINTS / 72 <= inches


def _ink(kind: str) -> str:
    return "white" if kind in (PRODUCT, EXPONENTIAL, TENSOR_MEMORY) else "black"


def _draw_frame(axes: Any, timeline: Timeline, window: Window, rows: dict[str, list[Bar]]) -> None:
    """Axes, step lines, legend and title."""
    from matplotlib.patches import Patch

    roles = len(timeline.plan.roles)
    length = window.end - window.start
    axes.set_xlim(0, length)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.axhline(roles - 0.5, color=GREY, linewidth=1.0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for line in _step_lines(window):
        axes.axvline(line, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    clock = timeline.machine.clock_hz
    axes.set_xlabel(f"SM cycles ({1e9 / clock:.3f} ns each at {clock / 1e9:g} GHz)")
    used = {bar.kind for bars in rows.values() for bar in bars}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), frameon=False,
                ncols=len(handles), fontsize=9, handlelength=1.2, columnspacing=1.4)  # fmt: skip
    axes.set_title(title_of(timeline, window), loc="left", fontsize=12, fontweight="bold", pad=28)


def _step_lines(window: Window) -> Iterator[float]:
    """Where steps begin, apart from the edges."""
    if window.period is not None and window.start > 0:
        line = window.period
        while line < window.end - window.start - 1:
            yield line
            line += window.period
