"""Traces as Perfetto's own trace processor reads them, asked by SQL."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fa4.emulator.tools.trace import Recorder
from fa4.sim.iket_ranges import read_measured
from fa4.sim.timeline import Timeline
from fa4.sim.trace import chrome_trace, trace_text
from tests.emulator.test_grids import CANCEL, counted
from tests.sim.test_trace import CALLS, timeline_of
from tests.sim.test_trace_tables import location, span, write
from tests.web.processor import TraceProcessor, serve_program

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"

Load = Callable[[str], TraceProcessor]

UNREAD = """
  select name, value from stats
  where value > 0 and (severity in ('error', 'data_loss') or name like 'flow%')"""
LANES = """
  select thread.name as lane, count(*) as slices, sum(dur) as ns
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
  group by lane"""
TRACKS = """
  select track.name as track, count(*) as changes, max(value) as most, min(value) as least
  from counter join process_counter_track as track on counter.track_id = track.id
  group by track"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_program() as found:
        yield found


@pytest.fixture
def load(browser: Any, address: str) -> Iterator[Load]:
    """A function that loads a trace, of which nothing may be wrong."""
    pages = []

    def of(trace: str) -> TraceProcessor:
        pages.append(page := browser.new_page())
        page.goto(f"{address}manifest.json")
        return TraceProcessor(page, trace.encode())

    yield of
    for page in pages:
        page.close()


@pytest.mark.parametrize("name", CALLS)
def test_every_event_arrives(name: str, load: Load) -> None:
    """Nothing is dropped; each lane has its slices and its time, each arrow its two ends."""
    timeline = timeline_of(name, tiles=2, kv_tiles=6)
    document = chrome_trace(timeline)
    processor = load(json.dumps(document))
    assert processor.query(UNREAD) == []
    written = Counter(event["ph"] for event in document["traceEvents"])
    found = {row["lane"]: row for row in processor.query(LANES)}
    assert sum(row["slices"] for row in found.values()) == written["X"] + written["i"]
    assert processor.query("select count(*) as n from flow") == [{"n": written["s"]}]
    assert written["s"] == written["f"] > 10
    for unit, ns in busy_ns(timeline).items():
        assert found[f"unit {unit}"]["ns"] == pytest.approx(ns, abs=found[f"unit {unit}"]["slices"])
    assert {f"role {role.name}" for role in timeline.plan.roles} <= set(found)
    assert {"work tiles", "unit tma"} <= set(found)


def busy_ns(timeline: Timeline) -> dict[str, float]:
    """Nanoseconds of each unit that did something, over all CTAs."""
    busy: dict[str, float] = {}
    for cta in timeline.ctas:
        for piece in cta.unit_slices:
            busy[piece.unit] = busy.get(piece.unit, 0.0) + piece.end - piece.start
    return {unit: 1e9 * cycles / timeline.machine.clock_hz for unit, cycles in busy.items()}


@pytest.mark.parametrize("name", CALLS)
def test_counters_have_tracks(name: str, load: Load) -> None:
    """Units busy, bytes in flight and, where there is one, tensor memory; all end at nothing."""
    timeline = timeline_of(name, tiles=2, kv_tiles=6)
    found = {row["track"]: row for row in load(json.dumps(chrome_trace(timeline))).query(TRACKS)}
    columns = max((b.stop for b in timeline.plan.buffers if b.space == "tmem"), default=0)
    assert set(found) == {"busy units", "copies bytes in flight"} | (
        {"tensor memory columns in use"} if columns else set()
    )
    assert 2 <= found["busy units"]["most"] <= len(timeline.units)
    assert found["copies bytes in flight"]["most"] > 16 * 1024
    if columns:
        assert columns / 2 < found["tensor memory columns in use"]["most"] <= columns
    assert all(row["least"] == 0 for row in found.values())


def test_who_waits_can_be_asked(load: Load) -> None:
    """The question on the page of the simulator finds the stalls of the timeline, by role."""
    timeline = timeline_of("pairs", tiles=2, kv_tiles=6)
    (question,) = re.findall(
        r"^```sql\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    rows = load(json.dumps(chrome_trace(timeline))).query(question)
    events = [event for cta in timeline.ctas for event in cta.events if event.kind == "wait"]
    told: Counter[str] = Counter()
    for event in events:
        told[f"role {event.role}"] += event.stalled
    assert {row["name"]: row["cycles"] for row in rows} == pytest.approx(dict(told))


def test_nested_ranges_stay_nested(load: Load, tmp_path: Path) -> None:
    """Measured ranges lie in lanes of their own, the inner one below the outer."""
    timeline = timeline_of("pairs", tiles=1, kv_tiles=3)
    warp = location(timeline.plan.role("mma").warps[0])
    file = write(tmp_path / "i.json", span("tile", 0, 960, warp), span("QK", 32, 320, warp))
    processor = load(trace_text(timeline, read_measured(file)))
    assert processor.query(UNREAD) == []
    rows = processor.query("select name, dur, depth from slice where category = 'measured'")
    assert [tuple(row.values()) for row in rows] == [("tile", 960, 0), ("QK", 288, 1)]


def test_what_the_emulator_saw_arrives(load: Load) -> None:
    """Each instruction, wait and asynchronous operation, in the lane of its warp or unit."""
    counted(CANCEL, events=(recorder := Recorder()))
    processor = load(json.dumps(recorder.perfetto()))
    assert processor.query(UNREAD) == []
    rows = processor.query("select category, count(*) as n from slice group by category")
    assert {row["category"]: row["n"] for row in rows} == Counter(e.kind for e in recorder.events)


@pytest.mark.parametrize("fault", ["slices that overlap", "an arrow from nowhere"])
def test_what_cannot_be_read_is_noticed(fault: str, load: Load) -> None:
    """Perfetto counts what it had to leave out."""
    document = chrome_trace(timeline_of("pairs", tiles=1, kv_tiles=2))
    events = document["traceEvents"]
    longest = max((event for event in events if event["ph"] == "X"), key=lambda x: x["dur"])
    half = longest | {"ts": longest["ts"] + longest["dur"] / 2}
    end = next(event for event in events if event["ph"] == "f") | {"id": 10**6}
    events.append(half if fault == "slices that overlap" else end)
    assert load(json.dumps(document)).query(UNREAD) != []
