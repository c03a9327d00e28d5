"""A timeline as a picture: a few steady-state steps, roles above and units below.

Everything that a warp role does has its colour, on the units, too; the strength says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fa4.base import drawing
from fa4.base.drawing import FORMATS, GREY, PALE, SILVER
from fa4.base.role_styles import style_of
from fa4.config import require
from fa4.sim.timeline import CtaTimeline, Event, Timeline, UnitSlice

STEPS = 2  # steady-state steps shown: more make the names illegible

PRODUCT, EXPONENTIAL, MATH = "matrix product", "exponentials", "other arithmetic"
TENSOR_MEMORY, SHARED_MEMORY = "tensor memory", "shared memory"
COPY, BARRIER, WAITING = "bulk copy", "barrier, fence", "waiting"
# How strong a role's colour is in what it does; barriers and waits have the colours of no role.
STRENGTHS = {
    PRODUCT: 1.0,
    EXPONENTIAL: 1.0,
    COPY: 1.0,
    MATH: 0.65,
    TENSOR_MEMORY: 0.4,
    SHARED_MEMORY: 0.4,
}
COLOURLESS = {BARRIER: SILVER, WAITING: PALE}
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
    """A rectangle in a row: whose, what, and the names to try for it, longest first."""

    start: float
    end: float
    role: str
    kind: str
    names: tuple[str, ...]

    @property
    def colour(self) -> str:
        """The role's, mixed with white by the kind."""
        if self.kind in COLOURLESS:
            return COLOURLESS[self.kind]
        return mix_with_white(style_of(self.role).light, STRENGTHS[self.kind])


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
        return Bar(event.start, event.end, event.role, WAITING, (signal,))
    kind = BARRIER if event.unit is None else KIND_OF_UNIT.get(event.unit, MATH)
    return Bar(event.start, event.end, event.role, kind, _names(event.what))


def _unit_bar(piece: UnitSlice) -> Bar:
    kind = KIND_OF_UNIT.get(piece.unit, MATH)
    return Bar(piece.start, piece.end, piece.role, kind, _names(piece.what))


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
            axes.broken_barh([span], (number - 0.39, 0.78), facecolors=bar.colour,
                             edgecolor="white", linewidth=0.5 if inches > 0.03 else 0)  # fmt: skip
            name = next((x for x in bar.names if _fits(x, inches)), None)
            if name is not None:
                axes.text(span[0] + span[1] / 2, number, name, ha="center", va="center_baseline",
                          fontsize=LABEL_POINTS, color=ink_on(bar.colour))  # fmt: skip


def _fits(name: str, inches: float) -> bool:
    return (0.60 * len(name) + 0.5) * LABEL_POINTS / 72 <= inches


def mix_with_white(colour: str, strength: float) -> str:
    """A colour on white: at strength 1 as it is."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)


def luminance(colour: str) -> float:
    """From 0 to 1 (WCAG's relative luminance of an sRGB colour)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast."""
    return "black" if luminance(colour) > 0.179 else "white"


def _draw_frame(axes: Any, timeline: Timeline, window: Window, rows: dict[str, list[Bar]]) -> None:
    """Axes, step lines, legend and title."""
    roles = len(timeline.plan.roles)
    length = window.end - window.start
    axes.set_xlim(0, length)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [_label(timeline, row) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.axhline(roles - 0.5, color=GREY, linewidth=1.0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for line in _step_lines(window):
        axes.axvline(line, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    clock = timeline.machine.clock_hz
    axes.set_xlabel(f"SM cycles ({1e9 / clock:.3f} ns each at {clock / 1e9:g} GHz)")
    handles = list(_legend({bar.kind for bars in rows.values() for bar in bars}))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), frameon=False,
                ncols=len(handles), fontsize=9, handlelength=1.2, columnspacing=1.4)  # fmt: skip
    axes.set_title(title_of(timeline, window), loc="left", fontsize=12, fontweight="bold", pad=28)


def _label(timeline: Timeline, row: str) -> str:
    """A role's name and letter; a unit's name."""
    roles = {role.name for role in timeline.plan.roles}
    return f"{row}  {style_of(row).letter}" if row in roles else row


def _legend(kinds: set[str]) -> Iterator[Any]:
    """What each strength of a colour means, then the colours that no role has."""
    from matplotlib.patches import Patch

    for strength in sorted(set(STRENGTHS.values()), reverse=True):
        names = [kind for kind in STRENGTHS if STRENGTHS[kind] == strength and kind in kinds]
        if names:
            label = "a role's colour: " * (strength == 1.0) + ", ".join(names)
            yield Patch(color=mix_with_white(style_of("mma").light, strength), label=label)
    for kind, colour in COLOURLESS.items():
        if kind in kinds:
            yield Patch(color=colour, label=kind)


def _step_lines(window: Window) -> Iterator[float]:
    """Where steps begin, apart from the edges."""
    if window.period is not None and window.start > 0:
        line = window.period
        while line < window.end - window.start - 1:
            yield line
            line += window.period
