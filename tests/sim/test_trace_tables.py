"""Traces asked by SQL: lanes, counters, arrows and measured ranges."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4 import cli
from fa4.sim.counters import add_up, bytes_in_flight, tensor_columns, units_busy
from fa4.sim.iket_ranges import MeasuredRange, read_measured
from fa4.sim.timeline import Timeline
from fa4.sim.trace import trace_text
from tests.sim.chrome_json import load
from tests.sim.test_trace import CALLS, timeline_of

INTEGRAL = """
SELECT SUM(value * (following - ts)) FROM
  (SELECT value, ts, LEAD(ts) OVER (ORDER BY ts) AS following FROM counter
   WHERE pid = 0 AND name = ?)
"""


@pytest.fixture(scope="module", params=[*CALLS, "d64 causal"])
def loaded(request: pytest.FixtureRequest) -> tuple[Timeline, sqlite3.Connection]:
    """A timeline of two work tiles, and the tables of its trace."""
    calls = {"d64 causal": {"head_dim": "64", "causal": "yes"}}
    timeline = timeline_of(request.param, calls, tiles=2, kv_tiles=6)
    return timeline, load(trace_text(timeline))


def one(tables: sqlite3.Connection, question: str, *values: Any) -> Any:
    """The only value of the only row."""
    (row,) = tables.execute(question, values).fetchall()
    return row[0]


def test_every_trace_has_copies_in_the_tma_lane(
    loaded: tuple[Timeline, sqlite3.Connection],
) -> None:
    """And the role that issues them has its slices; lanes stand in the order roles, units."""
    timeline, tables = loaded
    count = (
        "SELECT COUNT(*) FROM slice JOIN thread USING (pid, tid) WHERE thread.name = ? AND dur > 0"
    )
    assert one(tables, count, "unit tma") > 4
    assert one(tables, count, "role load") > 4
    names = [name for (name,) in tables.execute(
        "SELECT name FROM thread WHERE pid = 0 ORDER BY sort_index")]  # fmt: skip
    roles = [f"role {role.name}" for role in timeline.plan.roles]
    assert names == ["work tiles", *roles, *(f"unit {unit}" for unit in timeline.units)]


def test_busy_units_add_up_to_the_slices_of_units(
    loaded: tuple[Timeline, sqlite3.Connection],
) -> None:
    """The counter's integral is the time in slices; it begins and ends at 0."""
    timeline, tables = loaded
    busy = one(tables, "SELECT SUM(dur) FROM slice WHERE cat = 'unit' AND pid = 0")
    number = one(tables, "SELECT COUNT(*) FROM slice WHERE cat = 'unit' AND pid = 0")
    assert one(tables, INTEGRAL, "busy units") == pytest.approx(busy, abs=number)
    last = "SELECT value FROM counter WHERE pid = 0 AND name = ? ORDER BY ts {} LIMIT 1"
    for name in ("busy units", "copies bytes in flight"):
        assert [one(tables, last.format(end), name) for end in ("", "DESC")] == [0, 0]
        first = "SELECT MIN(ts) FROM counter WHERE pid = 0 AND name = ?"
        cta = timeline.ctas[0]  # from its first cycle on
        start_ns = 1e9 / timeline.machine.clock_hz * (cta.launch + cta.start_cycles)
        assert one(tables, first, name) == round(start_ns)


def test_tensor_memory_fills_up_and_empties(
    loaded: tuple[Timeline, sqlite3.Connection],
) -> None:
    """At most what the plan has, which is reached; Hopper has none."""
    timeline, tables = loaded
    columns = timeline.plan.bytes_used("tmem")
    most = "SELECT MAX(value) FROM counter WHERE name = 'tensor memory columns in use'"
    assert one(tables, most) == (columns or None)
    assert one(tables, "SELECT MIN(value) FROM counter") == 0
    ends = [tensor_columns(timeline.plan, cta)[-1:] for cta in timeline.ctas]
    assert all(steps[0][1] == 0 for steps in ends if steps)


def test_bytes_in_flight_fit_into_shared_memory(
    loaded: tuple[Timeline, sqlite3.Connection],
) -> None:
    """What is on its way has a place to land; and there is something on its way."""
    timeline, tables = loaded
    most = one(tables, "SELECT MAX(value) FROM counter WHERE name = 'copies bytes in flight'")
    assert 16 * 1024 <= most <= timeline.plan.bytes_used("smem")


def test_a_copy_is_on_its_way_until_it_has_landed() -> None:
    """Not only while it is issued: the last one, a store of 128 x 128 in bf16, is alone."""
    timeline = timeline_of("pairs", kv_tiles=3)
    stores = [x for x in timeline.ctas[0].events if x.what.startswith("store O")]
    last, before = sorted(stores, key=lambda x: -x.done)[:2]
    late = [step for step in bytes_in_flight(timeline.plan, timeline.ctas[0])
            if step[0] >= max(last.start, before.done)]  # fmt: skip
    assert late == [(late[0][0], 128 * 128 * 2), (last.done, 0)]
    assert last.done > last.end


def test_accumulators_stay_and_scores_go() -> None:
    """O's columns are held from the first PV to the last read, those of S only while needed."""
    timeline = timeline_of("pairs", kv_tiles=6)
    cta = timeline.ctas[0]
    products = [x for x in cta.events if x.role == "mma" and x.what.startswith(("PV0", "PV1"))]
    least = min(
        value
        for moment, value in tensor_columns(timeline.plan, cta)
        if products[2].done < moment < products[-3].start
    )
    assert least >= 256  # both O
    assert {value for _, value in tensor_columns(timeline.plan, cta)} >= {0, 128, 256, 512}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(-5, 5))))
def test_steps_hold_what_has_begun_and_not_ended(spans: list[tuple[int, int, int]]) -> None:
    """For any spans, at any time; strictly increasing times."""
    changes = [(float(s), v) for s, _, v in spans] + [(float(s + n), -v) for s, n, v in spans]
    steps = add_up(changes)
    assert [t for t, _ in steps] == sorted({t for t, _ in steps})
    for moment in range(35):
        value = next((v for t, v in reversed(steps) if t <= moment), 0)
        assert value == sum(v for s, n, v in spans if s <= moment < s + n)


def test_a_timeline_of_another_plan_is_noticed() -> None:
    """Events that do not follow the plan's programs would be counted wrongly."""
    one_tile, two = timeline_of("one Q tile", kv_tiles=2), timeline_of("pairs", kv_tiles=2)
    with pytest.raises(RuntimeError, match="events, not"):
        bytes_in_flight(two.plan, one_tile.ctas[0])
    assert units_busy(two.ctas[0])[-1][1] == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"ph": "X", "pid": 0, "tid": 1, "name": "a", "cat": "c", "ts": 0.5, "dur": 1},
         "without lying in it"),
        ({"ph": "X", "pid": 0, "tid": 9, "name": "a", "cat": "c", "ts": 0, "dur": 1},
         "without a name"),
        ({"ph": "X", "pid": 0, "tid": 1, "name": "a", "cat": "c", "ts": 2.0001, "dur": 1},
         "whole nanoseconds"),
        ({"ph": "i", "pid": 0, "tid": 1, "name": "a", "ts": -1}, "at least 0"),
        ({"ph": "C", "pid": 0, "tid": 0, "name": "n", "ts": 0, "args": {"u": "3"}}, "a number"),
        ({"ph": "C", "pid": 0, "tid": 0, "name": "k", "ts": 0, "args": {"u": 3}}, "two values"),
        ({"ph": "s", "pid": 0, "tid": 1, "name": "a", "ts": 0, "id": 4}, "one end"),
        ({"ph": "B", "pid": 0, "tid": 1, "name": "a", "ts": 0}, "unknown phases"),
    ],
)  # fmt: skip
def test_the_reader_notices(fault: dict[str, Any], said: str) -> None:
    """Planted faults in a trace that is right."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "x"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 1, "args": {"sort_index": 1}},
        {"ph": "X", "pid": 0, "tid": 1, "name": "b", "cat": "c", "ts": 0, "dur": 1},
        {"ph": "C", "pid": 0, "tid": 0, "name": "k", "ts": 0, "args": {"u": 3}},
    ]
    load(json.dumps({"traceEvents": events}))
    with pytest.raises(ValueError, match=said):
        load(json.dumps({"traceEvents": [*events, fault]}))


# Measured ranges


def location(warp: int, cta: tuple[int, int, int] = (0, 0, 0)) -> dict[str, Any]:
    """Where a range was measured, as run-iket writes it."""
    return {"smId": 0, "tpcId": 0, "gpcId": 0, "ctaId": list(cta), "warpId": warp}


def span(name: str, start: int, stop: int, *where: dict[str, Any]) -> dict[str, Any]:
    """A range, as run-iket writes it."""
    return {"rangeName": name, "rangeScope": 0, "startTs": start, "endTs": stop,
            "warpLocs": list(where), "internalEvents": []}  # fmt: skip


def write(path: Path, *ranges: dict[str, Any]) -> Path:
    """A file of one empty launch and one with ranges."""
    launches = [{"gridId": 0, "kernelName": "setup", "ranges": []},
                {"gridId": 1, "kernelName": "attention", "ranges": list(ranges),
                 "markers": [], "warpLifetimes": []}]  # fmt: skip
    path.write_text(json.dumps({"launches": launches}))
    return path


def test_measured_ranges_lie_below_their_role(tmp_path: Path) -> None:
    """Of the first CTA, from its first range on; nested ones in one lane, others beside them."""
    timeline = timeline_of("pairs", kv_tiles=3)
    warp = timeline.plan.role("mma").warps[0]
    file = write(
        tmp_path / "iket.json",
        span("late", 1, 2, location(warp, (1, 0, 0))),
        span("tile", 10_000, 10_960, location(warp)),
        span("QK", 10_032, 10_320, location(warp)),
        span("token", 10_640, 11_280, location(warp)),
        span("both", 10_064, 10_096, location(0), location(99)),
    )
    measured = read_measured(file)
    assert measured.about == {"kernel": "attention", "cta": [0, 0, 0], "launch": 1, "launches": 2,
                              "ctas": 2, "warps": 3, "ranges": 5}  # fmt: skip
    assert measured.lanes[1].ranges == (MeasuredRange("tile", 0, 960), MeasuredRange("QK", 32, 320))
    tables = load(trace_text(timeline, measured))
    found = tables.execute(
        "SELECT thread.name, slice.name, dur, depth FROM slice JOIN thread USING (pid, tid) "
        "WHERE cat = 'measured' ORDER BY sort_index, ts"
    ).fetchall()
    first = timeline.plan.role("softmax0").name
    assert set(found) == {
        (f"measured {first}, warp 0", "both", 32, 0), ("measured mma, warp 12", "tile", 960, 0),
        ("measured mma, warp 12", "QK", 288, 1), ("measured mma, warp 12 (2)", "token", 640, 0),
        ("measured no role, warp 99", "both", 32, 0),
    }  # fmt: skip
    begun = one(tables, "SELECT MIN(ts) FROM slice WHERE cat = 'measured'")
    assert begun == one(tables, "SELECT MIN(ts) FROM slice JOIN thread USING (pid, tid) "
                        "WHERE thread.name = 'role mma'")  # fmt: skip
    order = [name for (name,) in tables.execute("SELECT name FROM thread ORDER BY sort_index")]
    below = order.index("role mma") + 1
    assert order[below : below + 2] == ["measured mma, warp 12", "measured mma, warp 12 (2)"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no trace of run-iket"),
        ("[]", "must be an object"),
        ("{}", "must have a list launches"),
        ('{"launches": [3]}', r"launches\[0\] must be an object"),
        ('{"launches": [{"ranges": []}]}', "has no ranges"),
        (json.dumps({"launches": [{"ranges": [span("", 1, 2)]}]}), "rangeName must be a name"),
        (json.dumps({"launches": [{"ranges": [span("a", 2, 1)]}]}), "must not be before"),
        (json.dumps({"launches": [{"ranges": [span("a", -2, 1)]}]}), "startTs must be a whole"),
        (json.dumps({"launches": [{"ranges": [span("a", 1, 2, {"ctaId": [0]})]}]}), "ctaId"),
        ("[" * 100_000, "nested too deeply|no trace of run-iket"),
    ],
)
def test_other_files_are_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, which says what is wrong where; no trace is written."""
    file = tmp_path / "iket.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_measured(file)
    out = tmp_path / "trace.json"
    with pytest.raises(SystemExit):
        cli.main(["trace", "--measured", str(file), "--out", str(out)])
    error = capsys.readouterr().err
    assert error.startswith("fa4: error: ") and error.count("\n") == 1
    assert not out.exists()


def test_the_command_says_what_it_laid_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names kernel and CTA; a picture is refused."""
    file = write(tmp_path / "iket.json", span("tile", 0, 64, location(12)))
    call = ["trace", "--seqlen", "1k", "--measured", str(file), "--out"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*call, str(tmp_path / "t.json")])
    assert ended.value.code == 0
    assert "measured: CTA (0, 0, 0) of 1 of 'attention', launch 2 of 2" in capsys.readouterr().out
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["otherData"]["measured"]["ranges"] == 1
    with pytest.raises(SystemExit) as ended:
        cli.main([*call, str(tmp_path / "t.svg")])
    assert ended.value.code == 2 and "ends in .json" in capsys.readouterr().err
