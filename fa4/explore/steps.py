"""Two steady-state steps of a pipeline as columns of small numbers.

A step looks the same whatever the length of the sequence, so that one recording serves all of them.
Times are whole ticks of the simulator's cycles from the start of the window.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.base.role_styles import UNITS
from fa4.explore.programs import Touches, fillers_first, unrolled
from fa4.plan.places import Resolver
from fa4.plan.schema import Arrive, Wait, Work
from fa4.sim.timeline import CtaTimeline, Event, Timeline, UnitSlice

STEPS = 2  # in a window: enough to see what a step leaves to the next
RECORDED_STEPS, FIRST_STEP = 20, 11  # of a work tile; where the window begins, far from both ends
TICKS_PER_CYCLE = (4, 2, 1)  # the finest that fits is taken
LEAD_TICKS = 8192  # an event may begin this long before the window
MOST_TICKS = 65535


@dataclass(frozen=True)
class StepWindow:
    """Cycles [start, end) that are shown, STEPS steps."""

    start: float
    end: float

    @property
    def step_cycles(self) -> float:
        """Cycles of one step."""
        return (self.end - self.start) / STEPS


def find_window(cta: CtaTimeline) -> StepWindow:
    """STEPS steps from the middle of the first work tile on; ValueError if it has too few.

    A step begins where the role that issues products begins what it does most often.
    """
    roles = {piece.role for piece in cta.unit_slices if piece.unit == "tensor"}
    starts: dict[tuple[str, str], list[float]] = {}
    for event in cta.events:
        if event.role in roles and event.tile == 0 and event.kind in ("work", "issue"):
            starts.setdefault((event.role, event.what), []).append(event.start)
    most = max((len(times) for times in starts.values()), default=0)
    if most <= FIRST_STEP + STEPS:
        raise ValueError(f"a window needs more than {FIRST_STEP + STEPS} steps; got {most}")
    times = next(times for times in starts.values() if len(times) == most)
    return StepWindow(times[FIRST_STEP], times[FIRST_STEP + STEPS])


def timing_of(cta: CtaTimeline, window: StepWindow) -> tuple[Any, ...]:
    """What is equal if and only if roles and units do the same at the same times in the window."""
    events = tuple(
        (event.role, event.what, round(event.start - window.start, 3),
         round(event.end - event.start, 3), round(event.done - event.end, 3),
         round(event.stalled, 3))
        for event in cta.events if window.start <= event.start < window.end
    )  # fmt: skip
    slices = tuple(
        (piece.unit, piece.role, piece.what, round(piece.start - window.start, 3),
         round(piece.end - piece.start, 3))
        for piece in cta.unit_slices if window.start <= piece.start < window.end
    )  # fmt: skip
    return round(window.step_cycles, 3), events, slices


@dataclass(frozen=True)
class PlacedEvent:
    """An event of the timeline, its line in its role's program, and the memory it touches."""

    event: Event
    line: int
    touch: int


def place_events(timeline: Timeline, touches: Touches) -> list[PlacedEvent]:
    """Every event of the first work tile with the line it comes from.

    Raises RuntimeError where the timeline does not follow the plan's programs.
    """
    cta, plan = timeline.ctas[0], timeline.plan
    trips = dict(zip(plan.trips, cta.trips[0], strict=True))
    by_role: dict[str, list[Event]] = {role.name: [] for role in plan.roles}
    for event in cta.events:
        by_role[event.role].append(event)
    resolver, placed = Resolver(plan), []
    for role in fillers_first(plan):
        steps = list(unrolled(role, trips))
        if len(steps) != len(by_role[role.name]):
            raise RuntimeError(
                f"{role.name} has {len(by_role[role.name])} events, not {len(steps)}"
            )
        for event, (line, step) in zip(by_role[role.name], steps, strict=True):
            if event.what != _named(step):
                raise RuntimeError(f"{role.name}: {event.what} stands for line {line}, {step}")
            if isinstance(step, Wait):
                resolver.wait(role.name, step.signal)
            touch = touches.number(resolver, role.name, step) if isinstance(step, Work) else 0
            placed.append(PlacedEvent(event, line, touch))
    return placed


def _named(step: Any) -> str:
    if isinstance(step, Wait):
        return f"wait {step.signal}"
    return f"arrive {step.signal}" if isinstance(step, Arrive) else str(step.what)


def pack_step(timeline: Timeline, touches: Touches) -> tuple[StepWindow, np.ndarray]:
    """The window, and its content as 16-bit numbers: the page's `readStep` is the other side.

    ticks per cycle, number of events, of unit slices, of counts; then columns. Events: role, line,
    touch, kind's start (with LEAD_TICKS added, as differences), duration, done after the end,
    stalled. Slices: event, unit, start after the window's (as for events), duration. Counts:
    signal, role, arrivals before the events.
    """
    cta, plan = timeline.ctas[0], timeline.plan
    window = find_window(cta)
    placed = place_events(timeline, touches)
    shown = [x for x in placed if x.event.start < window.end
             and max(x.event.end, x.event.done) > window.start]  # fmt: skip
    order = {role.name: i for i, role in enumerate(plan.roles)}
    shown.sort(key=lambda x: (order[x.event.role], x.event.start, x.event.end))
    slices = _slices(cta, window, shown)
    counts = _counts(timeline, placed, shown)
    ticks, units = _finest(window), tuple(UNITS)
    head = [ticks, len(shown), len(slices), len(counts)]
    columns = [
        [order[x.event.role] for x in shown],
        [x.line for x in shown],
        [x.touch for x in shown],
        _differences([_at(x.event.start, window, ticks) for x in shown]),
        [_length(x.event.end - x.event.start, ticks) for x in shown],
        [_length(x.event.done - x.event.end, ticks) for x in shown],
        [_length(x.event.stalled, ticks) for x in shown],
        [event for event, _ in slices],
        [units.index(piece.unit) for _, piece in slices],
        _differences([_at(piece.start, window, ticks) for _, piece in slices]),
        [_length(piece.end - piece.start, ticks) for _, piece in slices],
        *([list(column) for column in zip(*counts, strict=True)] or [[], [], []]),
    ]
    flat = head + [number for column in columns for number in column]
    return window, np.array(flat, np.int64).astype(np.uint16)


def _finest(window: StepWindow) -> int:
    for ticks in TICKS_PER_CYCLE:
        if (window.end - window.start) * ticks + LEAD_TICKS < MOST_TICKS:
            return ticks
    raise ValueError(f"two steps take {window.end - window.start:.0f} cycles, too long for a page")


def _at(cycles: float, window: StepWindow, ticks: int) -> int:
    return max(0, round((cycles - window.start) * ticks) + LEAD_TICKS)


def _length(cycles: float, ticks: int) -> int:
    return min(MOST_TICKS, max(0, round(cycles * ticks)))


def _differences(values: list[int]) -> list[int]:
    """Each value less the one before, modulo 2^16: equal steps look equal to the compressor."""
    return [
        (value - before) % (MOST_TICKS + 1)
        for before, value in zip([0, *values], values, strict=False)
    ]


def _slices(
    cta: CtaTimeline, window: StepWindow, shown: list[PlacedEvent]
) -> list[tuple[int, UnitSlice]]:
    """(event, slice) of the units' work in the window; the event that asked for it, if shown."""
    owners: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for number, item in enumerate(shown):
        if item.event.kind in ("work", "issue"):
            owners.setdefault((item.event.role, item.event.what), []).append(
                (item.event.start, number)
            )
    found = []
    for piece in cta.unit_slices:
        if piece.end > window.start and piece.start < window.end and piece.end > piece.start:
            askers = [n for start, n in owners.get((piece.role, piece.what), ())
                      if start <= piece.start]  # fmt: skip
            if askers:
                found.append((askers[-1], piece))
    found.sort(key=lambda item: (item[1].unit, item[1].start))
    return found


def _counts(
    timeline: Timeline, placed: list[PlacedEvent], shown: list[PlacedEvent]
) -> list[tuple[int, int, int]]:
    """(signal, role, arrivals) before those that are shown."""
    signals = [signal.name for signal in timeline.plan.signals]
    roles = [role.name for role in timeline.plan.roles]
    first = min((x.event.start for x in shown if x.event.kind == "arrive"), default=0.0)
    there = {id(x.event) for x in shown}
    counts: Counter[tuple[int, int]] = Counter()
    for item in placed:
        event = item.event
        if event.kind == "arrive" and id(event) not in there and event.start <= first:
            signal = event.what.removeprefix("arrive ")
            counts[signals.index(signal), roles.index(event.role)] += 1
    return [(signal, role, count) for (signal, role), count in sorted(counts.items())]
