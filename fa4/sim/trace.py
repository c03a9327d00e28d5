"""Timelines as Perfetto/Chrome traces.

pid is the CTA and tid a role or a unit, so that slices of a tid never overlap. Times are
microseconds at the machine's clock, rounded to nanoseconds (Perfetto's resolution: rounding later
would make slices overlap); `args` holds cycles. Counters say how many units are busy, how many
columns of tensor memory hold something and how many bytes are on their way. Ranges that were
measured inside a kernel lie under the role whose warps emitted them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fa4.sim import counters
from fa4.sim.iket_ranges import MeasuredCta
from fa4.sim.passed_tiles import column_names
from fa4.sim.timeline import Arrow, CtaTimeline, Event, Timeline, UnitSlice

SCHEMA_VERSION = 1  # of the trace's metadata and args
UNIT_TID = 100  # tids of units start here, those of roles at 1; 0 is the CTA itself
MEASURED_TID = 1000  # and those of measured warps here
SORT_STEP = 100  # between two lanes, for the measured ones in between

Json = dict[str, Any]


def chrome_trace(timeline: Timeline, measured: MeasuredCta | None = None) -> Json:
    """The timeline as a Chrome trace (JSON object format), which ui.perfetto.dev opens.

    measured: ranges of one CTA, laid over the first simulated one.
    """
    events: list[Json] = []
    about = metadata(timeline)
    for pid, cta in enumerate(timeline.ctas):
        writer = _CtaWriter(timeline, cta, pid)
        events += writer.events()
        if measured is not None and pid == 0:
            events += writer.measured(measured)
            about["measured"] = measured.about
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def metadata(timeline: Timeline) -> Json:
    """What ran where: schema version, machine and clock, plan, problem, and the time base."""
    problem = timeline.problem
    return {
        "schema_version": SCHEMA_VERSION,
        "simulated": True,
        "machine": timeline.machine.name,
        "clock_hz": timeline.machine.clock_hz,
        "base_time_ns": 0,
        "plan": timeline.plan.name,
        "problem": {
            name: getattr(problem, name) for name in problem.__dataclass_fields__
        } | {"window_size": list(problem.window_size)},
        "rescale_rate": timeline.rescale_rate,
        "ctas": len(timeline.ctas),
        "trips": {"names": column_names(timeline.plan),
                  "per_cta": [[list(row) for row in cta.trips] for cta in timeline.ctas]},
        "shortened": timeline.shortened,
        "cycles": timeline.cycles,
    }  # fmt: skip


class _CtaWriter:
    """Trace events of one CTA (one pid)."""

    def __init__(self, timeline: Timeline, cta: CtaTimeline, pid: int) -> None:
        self.cta, self.pid, self.plan = cta, pid, timeline.plan
        self.ns_per_cycle = 1e9 / timeline.machine.clock_hz
        roles = [role.name for role in timeline.plan.roles]
        self.tids = {f"role {name}": 1 + i for i, name in enumerate(roles)}
        self.tids |= {f"unit {name}": UNIT_TID + i for i, name in enumerate(timeline.units)}
        self.names = {0: "work tiles"} | {tid: name for name, tid in self.tids.items()}

    def events(self) -> list[Json]:
        """Names, slices and arrows of this CTA."""
        found = [self._meta("process_name", 0, name=self.cta.name)]
        for tid, name in self.names.items():
            found.append(self._meta("thread_name", tid, name=name))
            found.append(self._meta("thread_sort_index", tid, sort_index=SORT_STEP * tid))
        found += self._tiles()
        for event in self.cta.events:
            if event.kind == "arrive":
                found.append(self._arrival(event))
            else:
                args = {"tile": event.tile, "unit": event.unit, "done_cycles": event.done}
                if event.kind == "wait":
                    args = {"tile": event.tile, "stalled_cycles": event.stalled}
                found.append(self._slice(f"role {event.role}", event, event.kind, args))
        for piece in self.cta.unit_slices:
            args = {"tile": piece.tile, "role": piece.role}
            found.append(self._slice(f"unit {piece.unit}", piece, "unit", args))
        for number, arrow in enumerate(self.cta.arrows):
            found += self._arrow(number, arrow)
        return found + list(self._counters())

    def _counters(self) -> Iterator[Json]:
        """Counter tracks; of changes within a nanosecond the last one counts."""
        tracks = (
            ("busy", "units", counters.units_busy(self.cta)),
            ("tensor memory", "columns in use", counters.tensor_columns(self.plan, self.cta)),
            ("copies", "bytes in flight", counters.bytes_in_flight(self.plan, self.cta)),
        )
        for name, unit, steps in tracks:
            values = {self._ns(cycles): value for cycles, value in [(0.0, 0), *steps]}
            for ns, value in values.items() if steps else ():
                yield {"ph": "C", "pid": self.pid, "tid": 0, "name": name, "ts": ns / 1000,
                       "args": {unit: value}}  # fmt: skip

    def measured(self, measured: MeasuredCta) -> Iterator[Json]:
        """Lanes of measured warps, each below its role's, from the CTA's first instruction on."""
        start = self._ns(0.0)
        roles = {warp: (number, role.name) for number, role in enumerate(self.plan.roles, 1)
                 for warp in role.warps}  # fmt: skip
        last = len(self.plan.roles)
        for place, lane in enumerate(measured.lanes):
            tid = MEASURED_TID + place
            number, role = roles.get(lane.warp, (last, "no role"))
            name = f"measured {role}, warp {lane.warp}{lane.suffix}"
            yield self._meta("thread_name", tid, name=name)
            sort_index = SORT_STEP * number + 1 + place % (SORT_STEP - 1)
            yield self._meta("thread_sort_index", tid, sort_index=sort_index)
            for item in lane.ranges:
                ts = start + item.start_ns
                yield {"ph": "X", "pid": self.pid, "tid": tid, "name": item.name,
                       "cat": "measured", "ts": ts / 1000,
                       "dur": (item.stop_ns - item.start_ns) / 1000,
                       "args": {"role": role, "warp": lane.warp}}  # fmt: skip

    def _ns(self, cycles: float) -> int:
        """Whole nanoseconds since the launch of the first CTA, so that rounding never overlaps."""
        return round((self.cta.launch + self.cta.start_cycles + cycles) * self.ns_per_cycle)

    def _meta(self, what: str, tid: int, **args: Any) -> Json:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}

    def _span(self, tid: int, name: str, span: tuple[float, float], args: Json) -> Json:
        start, end = (self._ns(cycles) for cycles in span)
        cycles = {"start_cycles": span[0], "cycles": span[1] - span[0]}
        return {"ph": "X", "pid": self.pid, "tid": tid, "name": name, "ts": start / 1000,
                "dur": (end - start) / 1000, "args": cycles | args}  # fmt: skip

    def _slice(self, track: str, item: Event | UnitSlice, kind: str, args: Json) -> Json:
        span = self._span(self.tids[track], item.what, (item.start, item.end), args)
        return span | {"cat": kind}

    def _tiles(self) -> Iterator[Json]:
        """The CTA's own track: its start, and until when it worked on which tile."""
        yield self._span(0, "start of the CTA", (-self.cta.start_cycles, 0.0), {}) | {"cat": "tile"}
        begun = 0.0
        for tile, end in enumerate(self.cta.tile_ends):
            args = {"trips": list(self.cta.trips[tile])}
            yield self._span(0, f"work tile {tile}", (begun, end), args) | {"cat": "tile"}
            begun = end

    def _arrival(self, event: Event) -> Json:
        return {"ph": "i", "s": "t", "pid": self.pid, "tid": self.tids[f"role {event.role}"],
                "name": event.what, "cat": "arrive", "ts": self._ns(event.start) / 1000,
                "args": {"tile": event.tile, "effective_cycles": event.done}}  # fmt: skip

    def _arrow(self, number: int, arrow: Arrow) -> Iterator[Json]:
        """Flow from inside the cause's slice to inside the wait's; none if rounding ate a slice."""
        source, target = arrow.source, arrow.target
        track = f"unit {source.unit}" if isinstance(source, UnitSlice) else f"role {source.role}"
        ends = (("s", track, source), ("f", f"role {target.role}", target))
        if any(self._ns(item.end) == self._ns(item.start) for _, _, item in ends):
            return
        for phase, where, item in ends:
            flow = {"ph": phase, "pid": self.pid, "tid": self.tids[where], "cat": "signal",
                    "name": target.what.removeprefix("wait "), "id": self.pid << 32 | number,
                    "ts": (self._ns(item.end) - 1) / 1000}  # fmt: skip
            yield flow | ({"bp": "e"} if phase == "f" else {})


def trace_text(timeline: Timeline, measured: MeasuredCta | None = None) -> str:
    """The Chrome trace as compact JSON text."""
    return (
        json.dumps(chrome_trace(timeline, measured), separators=(",", ":"), allow_nan=False) + "\n"
    )
