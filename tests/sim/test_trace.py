"""Timelines, their Chrome traces and pictures, and `fa4 trace`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing
from hypothesis import given
from hypothesis import strategies as st

from fa4.base.role_styles import ROLES
from fa4.commands.trace import trace
from fa4.sim import engine
from fa4.sim.code import ARRIVE, WORK
from fa4.sim.figure import (
    COLOURLESS,
    STRENGTHS,
    WAITING,
    draw_timeline,
    ink_on,
    luminance,
    mix_with_white,
    rows_of,
    steady_window,
    title_of,
    unit_shares,
)
from fa4.sim.options import build
from fa4.sim.predict import make_runner
from fa4.sim.timeline import Timeline, record, shorten
from fa4.sim.trace import UNIT_TID, chrome_trace, trace_text

CALLS: dict[str, dict[str, str]] = {
    "pairs": {},
    "causal": {"causal": "yes", "seqlen": "8k"},
    "d64": {"head_dim": "64", "seqlen": "4k"},
    "inline": {"correction": "inline", "seqlen": "4k"},
    "one Q tile": {"q_tiles": "1", "seqlen": "4k"},
    "backward": {"pass": "bwd", "seqlen": "4k"},
    "backward d64": {"pass": "bwd", "seqlen": "4k", "head_dim": "64"},
    "hopper": {"machine": "h200", "seqlen": "4k"},
}


def timeline_of(
    name: str, others: Mapping[str, dict[str, str]] | None = None, **how: Any
) -> Timeline:
    """Timeline of one of CALLS, or of other ones."""
    request = build({**CALLS, **(others or {})}[name])
    return record(request.problem, request.pipeline, request.machine, request.simulation, **how)


@pytest.fixture(scope="module", params=CALLS)
def timeline(request: pytest.FixtureRequest) -> Timeline:
    """Two work tiles of six steps of every call."""
    return timeline_of(request.param, tiles=2, kv_tiles=6)


def test_trace_has_the_structure_that_viewers_need(timeline: Timeline) -> None:
    """Valid JSON; complete slices that never overlap on a tid; monotone; every tid named."""
    document = json.loads(trace_text(timeline))
    events = document["traceEvents"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times) and times[0] >= 0
    assert {event["ph"] for event in events} <= {"M", "X", "i", "s", "f", "C"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert length >= 0
            slices[event["pid"], event["tid"]].append((start, start + length))
    for spans in slices.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(spans)))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
    assert used <= named
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {f"role {role.name}" for role in timeline.plan.roles} <= names
    assert {f"unit {unit}" for unit in timeline.units} <= names


def test_arrows_come_in_pairs_inside_slices(timeline: Timeline) -> None:
    """Each flow starts and ends inside a slice, forward in time, with an id of its own."""
    events = chrome_trace(timeline)["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    flows: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    assert len(flows) > 10
    for pair in flows.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for event in pair.values():
            where = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in where)


def test_every_stall_has_a_cause_and_nothing_else_has(timeline: Timeline) -> None:
    """An arrow leads to each wait that took time, unless what ended it was free from the start."""
    for cta in timeline.ctas:
        targets = [id(arrow.target) for arrow in cta.arrows]
        assert len(set(targets)) == len(targets)
        stalled = [event for event in cta.events if event.stalled > 0]
        assert set(targets) <= {id(event) for event in stalled}
        assert len(targets) >= 0.9 * len(stalled) > 0


def test_an_arrival_behind_a_unit_names_it(timeline: Timeline) -> None:
    """Of every unit that arrives, not only of the first."""
    arrivals = [event for cta in timeline.ctas for event in cta.events if event.kind == "arrive"]
    assert {"tensor", "tma"} <= {event.unit for event in arrivals}


def test_slices_say_their_cycles(timeline: Timeline) -> None:
    """Start and length in cycles of the CTA beside the viewer's microseconds, which are rounded."""
    scale = 1e9 / timeline.machine.clock_hz
    events = chrome_trace(timeline)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and "start_cycles" in e["args"]]
    assert len(spans) > 100
    begun = {e["pid"]: 1000 * e["ts"] - scale * e["args"]["start_cycles"] for e in spans}
    for event in spans:
        told = begun[event["pid"]] + scale * event["args"]["start_cycles"]
        assert 1000 * event["ts"] == pytest.approx(told, abs=1.01)
        assert 1000 * event["dur"] == pytest.approx(scale * event["args"]["cycles"], abs=1.01)


def test_metadata_says_what_ran(timeline: Timeline) -> None:
    """Schema version, machine, clock, plan, problem, time base."""
    about = chrome_trace(timeline)["otherData"]
    assert about["schema_version"] == 1 and about["base_time_ns"] == 0
    assert about["machine"] == timeline.machine.name
    assert about["clock_hz"] == timeline.machine.clock_hz
    assert about["plan"] == timeline.plan.name
    assert about["problem"]["seqlen_k"] == timeline.problem.seqlen_k
    assert about["shortened"] is True


def test_timeline_repeats_the_engine(timeline: Timeline) -> None:
    """Unit slices add up to the engine's busy cycles, waits to its stalls, ends to its ends."""
    for cta in timeline.ctas:
        simulation = build({}).simulation
        code = make_runner(timeline.plan, timeline.machine, simulation).code
        run = engine.execute(code, np.array(cta.trips), log=True)
        busy = dict.fromkeys(code.unit_names, 0.0)
        for piece in cta.unit_slices:
            busy[piece.unit] += piece.end - piece.start
        assert list(busy.values()) == pytest.approx(run.busy.tolist())
        stalled = sum(event.stalled for event in cta.events)
        assert stalled == pytest.approx(run.stalled.sum(), abs=1e-3)
        assert cta.tile_ends == pytest.approx(run.tile_ends.tolist())
        done, last = [], {}  # of a piece of work its last instruction's
        for role, at, _, _, end in run.log:
            op, work = code.instructions[int(at), :2]
            if op == WORK and code.work_follows[work]:
                done[last[role]] = end
            elif op != ARRIVE:
                last[role] = len(done)
                done.append(end)
        assert [event.done for event in cta.events if event.kind != "arrive"] == pytest.approx(done)


def test_units_serve_one_request_at_a_time(timeline: Timeline) -> None:
    """Slices of a unit follow each other in the order of the requests."""
    for cta in timeline.ctas:
        ends: dict[str, float] = defaultdict(float)
        for piece in cta.unit_slices:
            assert piece.start >= ends[piece.unit]
            ends[piece.unit] = piece.end


def test_a_queue_on_a_unit_shows() -> None:
    """QK1 is issued while QK0 runs, and its slice starts where that of QK0 ends."""
    cta = timeline_of("causal", kv_tiles=4).ctas[0]
    first, second = (
        next(piece for piece in cta.unit_slices if (piece.what, piece.unit) == (what, "tensor"))
        for what in ("QK0", "QK1")
    )
    issue = next(event for event in cta.events if event.what == "QK1")
    assert issue.kind == "issue" and issue.start < first.end
    assert second.start == first.end
    assert issue.end < second.start


def test_persistent_ctas_continue_and_others_start_anew() -> None:
    """Static scheduling: one CTA for all work tiles; longest first: one each, side by side."""
    static, lpt = timeline_of("pairs", tiles=3, kv_tiles=3), timeline_of("causal", tiles=3)
    assert len(static.ctas) == 1 and len(static.ctas[0].tile_ends) == 3
    assert [cta.launch for cta in lpt.ctas] == [0.0] * 3
    assert "block 31" in lpt.ctas[0].name
    assert not lpt.shortened
    assert chrome_trace(lpt)["traceEvents"][-1]["pid"] in (0, 1, 2)


def test_more_ctas_than_sms_wait_for_a_free_one() -> None:
    """The 149th CTA of 148 SMs starts when the first is done."""
    many = timeline_of("backward d64", tiles=149, kv_tiles=1)
    first = many.ctas[0]
    assert many.ctas[147].launch == 0.0
    assert many.ctas[148].launch == pytest.approx(first.start_cycles + first.tile_ends[-1])


def test_shorten_keeps_masked_steps_first() -> None:
    """Total and plain steps shrink; masked ones only if there are more than asked for."""
    trips = np.array([[10, 2, 8], [1, 1, 0], [9, 9, 0]])
    assert shorten(trips, 4).tolist() == [[4, 2, 2], [1, 1, 0], [4, 4, 0]]
    assert shorten(trips, None) is trips
    passing = np.array([[10, 2, 8, 4, 1, 5]])  # whoever passes over tiles does it first
    assert shorten(passing, 4).tolist() == [[4, 2, 2, 3, 1, 0]]
    assert shorten(passing, 7).tolist() == [[7, 2, 5, 4, 1, 2]]


@pytest.mark.parametrize(
    ("how", "message"),
    [({"tiles": 0}, "tiles must be between"), ({"kv_tiles": 0}, "kv_tiles must be between")],
)
def test_wrong_sizes_are_refused(how: dict[str, int], message: str) -> None:
    """Before anything is simulated."""
    with pytest.raises(ValueError, match=message):
        timeline_of("causal", **how)


def test_an_empty_problem_is_refused() -> None:
    """Nothing to show."""
    request = build({"batch": "0"})
    with pytest.raises(ValueError, match="no work tiles"):
        record(request.problem, request.pipeline, request.machine)


def test_steady_window_measures_the_period() -> None:
    """Two whole steps, equally long once the pipeline is steady."""
    long = timeline_of("causal", kv_tiles=24)
    two, four = steady_window(long, 2), steady_window(long, 4)
    assert two.period == pytest.approx(four.period, rel=0.01)
    assert two.end - two.start == pytest.approx(2 * two.period)
    shares = unit_shares(long, two)
    assert 0.5 < shares["tensor"] < 1.0
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    unit = next(iter(shares))
    assert f"{unit} is the busiest unit ({shares[unit]:.0%})" in title_of(long, two)
    assert f"{two.period:,.0f} cycles" in title_of(long, two)


def test_rows_hold_roles_then_used_units(timeline: Timeline) -> None:
    """All roles, and the units with work, in a fixed order; waits are marked as such."""
    rows = rows_of(timeline, steady_window(timeline))
    roles = [role.name for role in timeline.plan.roles]
    assert list(rows)[: len(roles)] == roles
    assert list(rows)[len(roles)] == "tensor unit"
    assert all(bars for name, bars in rows.items() if name.endswith(" unit") and "tma" not in name)
    assert "tma unit" in rows
    assert {bar.kind for bars in rows.values() for bar in bars} <= {*COLOURLESS, *STRENGTHS}
    assert any(bar.kind == WAITING for bar in rows[roles[0]])


def test_bars_have_the_colour_of_their_role(timeline: Timeline) -> None:
    """Also on the units; weaker or as strong as the role's own; a wait has that of no role."""
    rows = rows_of(timeline, steady_window(timeline))
    roles = {role.name for role in timeline.plan.roles}
    assert roles <= set(ROLES)
    for name, bars in rows.items():
        for bar in bars:
            assert bar.role == name if name in roles else bar.role in roles
            own, (most, *_) = ROLES[bar.role].light, sorted(STRENGTHS.values(), reverse=True)
            if bar.kind in COLOURLESS:
                assert bar.colour == COLOURLESS[bar.kind]
            else:
                assert (bar.colour == own) == (STRENGTHS[bar.kind] == most == 1)


@given(st.sampled_from([style.light for style in ROLES.values()]), st.floats(0, 1))
def test_names_can_be_read_on_every_colour(colour: str, strength: float) -> None:
    """A contrast of at least 4.5 (WCAG 2.2, 1.4.3)."""
    assert (
        contrast(mix_with_white(colour, strength), ink_on(mix_with_white(colour, strength))) >= 4.5
    )


def contrast(colour: str, ink: str) -> float:
    """WCAG's ratio of a colour and black or white."""
    lights = [luminance(colour) + 0.05, luminance({"black": "#000000"}.get(ink, "#ffffff")) + 0.05]
    return max(lights) / min(lights)


def test_a_deep_ring_is_still_being_filled_in_the_window() -> None:
    """Head dim 64 under a mask loads far ahead: its last steps have no load left to show."""
    timeline = timeline_of("d64 causal", {"d64 causal": {"head_dim": "64", "causal": "yes"}},
                           kv_tiles=24)  # fmt: skip
    rows = rows_of(timeline, steady_window(timeline))
    assert {bar.names[0] for bar in rows["load"] if bar.kind != WAITING} == {"load K", "load V"}
    assert len(rows["tma unit"]) >= 4


def test_pictures() -> None:
    """PNG and SVG, the same SVG twice."""
    pytest.importorskip("matplotlib")
    timeline = timeline_of("backward", kv_tiles=7)
    assert draw_timeline(timeline).startswith(b"\x89PNG")
    assert draw_timeline(timeline, "svg") == draw_timeline(timeline, "svg")
    with pytest.raises(ValueError, match="png, svg"):
        draw_timeline(timeline, "pdf")


def test_picture_of_a_single_step() -> None:
    """One KV tile: no period to name."""
    pytest.importorskip("matplotlib")
    single = timeline_of("causal", kv_tiles=1)
    window = steady_window(single)
    assert window.period is None and window.start == 0.0
    assert "per KV tile" not in title_of(single, window)
    assert b"softmax0" in draw_timeline(single, "svg")


def run(*arguments: str) -> typer.testing.Result:
    """`fa4 trace <arguments>`, run in this process."""
    app = typer.Typer()
    app.command()(trace)
    return typer.testing.CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("suffix", ["json", "svg", "PNG"])
def test_command_writes_the_file(suffix: str, tmp_path: Path) -> None:
    """The path and a summary; nothing else in the folder."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / f"t.{suffix}"
    done = run("--seqlen", "4k", "--causal", "--set", "head_dim=64", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.stdout.replace("\n", "")
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert ("perfetto" in done.stdout) == (suffix == "json")


def test_command_as_json(tmp_path: Path) -> None:
    """Cycles per step, busy units, file."""
    out = tmp_path / "t.json"
    done = run("--seqlen", "4k", "--kv-tiles", "0", "--json", "--out", str(out))
    report = json.loads(done.stdout)
    assert report["schema_version"] == 1 and report["file"] == str(out)
    assert report["file_bytes"] == out.stat().st_size
    assert report["step_cycles"] > 1000 and not report["timeline"]["shortened"]
    assert json.loads(out.read_text())["otherData"]["cycles"] == report["timeline"]["cycles"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "t.pdf"), "must end in .json, .png, .svg"),
        (("--set", "tile_n"), "expected NAME=VALUE"),
        (("--set", "nope=1"), "unknown field 'nope'"),
        (("--set", "tile_n=256"), "TMEM plan needs 768 columns"),
        (("--tiles", "0"), "tiles must be between 1 and"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that names the rule; no file, not even a folder."""
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code != 0 and message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_tids_of_roles_and_units_are_apart(timeline: Timeline) -> None:
    """Roles from 1, units from UNIT_TID, whatever their number."""
    assert len(timeline.plan.roles) < UNIT_TID
