"""The explorer's data is what the commands say of the same point, for every point of the grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.base.role_styles import ROLES
from fa4.commands.predict import describe
from fa4.config import BackwardPipeline, WarpgroupPipeline
from fa4.designs import plan_of
from fa4.explore.controls import (
    CONTROLS,
    QUICK,
    combinations,
    controls,
    settings_of,
    shape_keys,
    with_machines,
)
from fa4.explore.packing import SCHEMA_VERSION, pack, unpack
from fa4.explore.programs import Touches, lines_of, unrolled
from fa4.explore.recording import (
    CONTEXT,
    STATIC_CAUSAL,
    automatic,
    contexts,
    count_shapes,
    record_grid,
)
from fa4.explore.steps import LEAD_TICKS, place_events
from fa4.explore.verdicts import read_verdicts
from fa4.sim.options import build
from fa4.sim.timeline import record
from fa4.sim.why import step_chain
from tests.explore.conftest import Small, assert_as_predicted, points


def test_every_point_has_numbers_or_a_reason(small: Small) -> None:
    found = list(points(small))
    refused = [result for _, result, _ in found if result < 0]
    assert 20 < len(refused) < len(found) - 20
    assert min(refused) >= -len(small.head["reasons"])
    assert max(result for _, result, _ in found) == len(small.columns["tflops"]) - 1
    assert {step for _, _, step in found if step >= 0} == set(range(len(small.head["steps"])))
    covered = sum(entry.get("shapes", 0) for entry in small.head["contexts"])
    assert covered == len(small.columns["shape_steps"])


def test_numbers_are_those_of_predict(small: Small) -> None:
    """All of them, as `fa4 predict --json` prints them."""
    shown = [point for point in points(small) if point[1] >= 0]
    for point in shown:
        assert_as_predicted(small, point)
    assert len(shown) > 20


def test_what_is_automatic_can_be_chosen() -> None:
    """FlashAttention's choice for each context is a choice of its controls."""
    keys = {control.key: {choice.key for choice in control.choices} for control in CONTROLS}
    seen = 0
    for context in contexts(CONTROLS):
        try:
            chosen = automatic(build(settings_of(context) | {"seqlen": "32k"}))
        except ValueError:
            continue
        assert set(chosen) == set(shape_keys(context["pass"].key, context["kernel"].key))
        assert all(choice in keys[key] for key, choice in chosen.items()), (context, chosen)
        seen += 1
    assert seen > 30


@pytest.mark.parametrize("kernel", ["hopper", "fa2"])
def test_a_shape_is_the_same_kernel_at_every_length(kernel: str) -> None:
    """Of what a shape leaves open, nothing depends on the length, so that one step serves all."""
    for head_dim in ("64", "128"):
        for shape in combinations(CONTROLS, shape_keys("fwd", kernel)):
            found = []
            for length in ("1k", "32k"):
                given = {
                    "machine": "h200",
                    "kernel": kernel,
                    "head_dim": head_dim,
                    "seqlen": length,
                }
                try:
                    found.append(build(settings_of(shape) | given).pipeline)
                except ValueError as error:
                    found.append(str(error))
            assert found[0] == found[1]


def test_numbers_of_another_point_are_noticed(small: Small) -> None:
    shown = {result: (settings, result, step) for settings, result, step in points(small)
             if result >= 0}  # fmt: skip
    (settings, _, step), (_, other, _) = shown[0], shown[1]
    with pytest.raises(AssertionError):
        assert_as_predicted(small, (settings, other, step))


def test_reasons_are_those_of_predict(small: Small) -> None:
    seen = set()
    for settings, result, _ in points(small):
        if result >= 0:
            continue
        reason = small.head["reasons"][-1 - result]
        seen.add(reason)
        if reason == STATIC_CAUSAL:
            assert settings["causal"] == "yes" and settings["scheduler"] == "static"
            continue
        with pytest.raises(ValueError) as refused:
            describe(settings)
        assert str(refused.value) == reason
    assert any("TMEM" in reason for reason in seen), seen
    assert any("backward" in reason for reason in seen)
    assert STATIC_CAUSAL in seen


def test_longest_first_is_in_order_where_all_are_equal() -> None:
    """What the recording shares between the two, simulated apart."""
    for length in ("1k", "8k"):
        seconds = {
            scheduler: build({"seqlen": length, "scheduler": scheduler}).predict().seconds
            for scheduler in ("lpt", "naive")
        }
        assert seconds["lpt"] == seconds["naive"]


def read_step(small: Small, number: int) -> dict[str, Any]:
    """A recorded step, as data.js reads it."""
    starts = small.columns["step_starts"]
    numbers = small.columns["step_numbers"][starts[number] : starts[number + 1]].astype(int)
    ticks, events, slices, counts = (int(x) for x in numbers[:4])
    sizes = [events] * 7 + [slices] * 4 + [counts] * 3
    parts = np.split(numbers[4:], np.cumsum(sizes))[:-1]
    assert len(numbers) == 4 + sum(sizes)
    names = ("role", "line", "touch", "start", "length", "rest", "stalled", "asked", "unit",
             "begun", "span", "signal", "arriver", "before")  # fmt: skip
    found: dict[str, Any] = dict(zip(names, parts, strict=True))
    for name in ("start", "begun"):
        found[name] = (np.cumsum(found[name]) % 65536 - LEAD_TICKS) / ticks
    for name in ("length", "rest", "stalled", "span"):
        found[name] = found[name] / ticks
    return found | {"ticks": ticks}


def test_steps_are_those_of_the_timeline(small: Small) -> None:
    """Events of the packed window, and the chain through them, against a recording of its own."""
    settings = {"machine": "b200", "head_dim": "128", "seqlen": "1k", "heads": "16"}
    request = build(settings)
    number = next(
        step for given, _, step in points(small)
        if step >= 0 and build(given).pipeline == request.pipeline
        and given["machine"] == "b200" and given["rescale_rate"] == "0"
    )  # fmt: skip
    long = replace(request.problem, seqlen_q=32768, seqlen_k=32768)
    timeline = record(long, request.pipeline, request.machine, kv_tiles=40)
    products = [e.start for e in timeline.ctas[0].events if e.what == "QK0" and e.kind == "issue"]
    about = small.head["steps"][number]
    assert about["step_cycles"] == pytest.approx((products[30] - products[20]) / 10, rel=1e-9)
    step = read_step(small, number)
    plan = small.head["plans"][about["plan"]]
    roles = [small.head["parts"]["roles"][role] for role in plan["roles"]]
    texts = [roles[r]["lines"][line][2] for r, line in zip(step["role"], step["line"], strict=True)]
    starts = sorted(s for s, text in zip(step["start"], texts, strict=True) if text == "QK0")
    expected = [x - products[12] for x in products]
    for start in starts:
        assert min(abs(start - x) % about["step_cycles"] for x in expected) <= 2 / step["ticks"]
    assert len(starts) in (2, 3)
    chain = about["chain"]
    assert sum(chain["cycles"]) / chain["steps"] == pytest.approx(about["step_cycles"], rel=1e-4)


def test_chains_are_those_of_predict(small: Small) -> None:
    """Of every step, also where an equal one lent it: the rows of `fa4 predict`, in a circle."""
    seen = set()
    for settings, _, step in points(small):
        if step < 0 or step in seen:
            continue
        seen.add(step)
        asked = build(settings)
        plain = replace(asked.problem, causal=False, window_size=(None, None))  # steps are shown
        chain = step_chain(replace(asked, problem=plain))
        assert chain is not None
        recorded = small.head["steps"][step]
        about = recorded["chain"]
        links = [small.head["parts"]["links"][link] for link in about["links"]]
        expected = [[row.role, row.what, row.unit, row.reason] for row in chain.rows]
        assert sorted(map(str, links)) == sorted(map(str, expected)), settings
        assert sum(about["cycles"]) == pytest.approx(chain.cycles, abs=0.1), settings
        if about["settled"]:  # rescaling or not: of the step that is shown
            mean = sum(about["cycles"]) / about["steps"]
            assert mean == pytest.approx(recorded["step_cycles"], rel=0.02), settings
    assert len(seen) == len(small.head["steps"]) > 10


def test_lines_and_memory_of_every_event(small: Small) -> None:
    """Each event has a line of its kind, and touches memory that its buffers have."""
    for number, about in enumerate(small.head["steps"]):
        step = read_step(small, number)
        plan = small.head["plans"][about["plan"]]
        parts = {name: small.head["parts"][name] for name in small.head["parts"]}
        touches = parts["touches"][plan["touches"]]
        regions = parts["regions"][plan["regions"]]
        sizes = {"smem": plan["smem_bytes"], "tmem": plan["tmem_cols"]}
        assert all(stop <= sizes[space] for _, space, spans in regions for _, stop in spans)
        for role, line, touch in zip(step["role"], step["line"], step["touch"], strict=True):
            kind = parts["roles"][plan["roles"][role]]["lines"][line][1]
            assert small.head["kinds"][kind] in ("wait", "arrive", "work")
            assert touch < len(touches) and (touch == 0 or small.head["kinds"][kind] == "work")
        assert set(parts["roles"][role]["name"] for role in plan["roles"]) <= set(ROLES)


def test_a_step_out_of_order_is_noticed() -> None:
    """A timeline whose events do not follow the programs is refused."""
    request = build({"seqlen": "4k"})
    timeline = record(request.problem, request.pipeline, request.machine, kv_tiles=4)
    assert len(place_events(timeline, Touches())) == len(timeline.ctas[0].events)
    cta = timeline.ctas[0]
    load = next(i for i, e in enumerate(cta.events) if e.role == "load")
    short = replace(cta, events=cta.events[:load] + cta.events[load + 1 :])
    with pytest.raises(RuntimeError, match="load has"):
        place_events(replace(timeline, ctas=(short,)), Touches())
    other = replace(cta.events[load], what="load W")
    changed = replace(cta, events=(*cta.events[:load], other, *cta.events[load + 1 :]))
    with pytest.raises(RuntimeError, match="load W stands for line"):
        place_events(replace(timeline, ctas=(changed,)), Touches())


def test_lines_are_the_steps() -> None:
    """The line of each unrolled step is the one with its text."""
    for settings in ({}, {"pass": "bwd"}, {"machine": "h200"}, {"kernel": "fa2"}):
        request = build(settings)
        plan = plan_of(request.pipeline, request.machine.gpu)
        trips = dict(zip(plan.trips, (5, 2, 3), strict=True))
        for role in plan.roles:
            lines = lines_of(role)
            for number, step in unrolled(role, trips):
                text = lines[number].text
                assert getattr(step, "what", text) == text
                assert getattr(step, "signal", "") == lines[number].signal


def test_what_is_automatic_is_what_the_simulator_takes(small: Small) -> None:
    """A context's own choices give the same pipeline as naming none."""
    for context, entry in zip(contexts(small.controls), small.head["contexts"], strict=True):
        if "reason" in entry or any(
            entry["auto"][key] not in {c.key for c in small.recording.choices(key)}
            for key in entry["auto"]
        ):
            continue
        shape = {key: next(c for c in small.recording.choices(key) if c.key == name)
                 for key, name in entry["auto"].items()}  # fmt: skip
        length = {"seqlen": small.recording.choices("seqlen")[0]}
        named = build(settings_of({**context, **shape, **length})).pipeline
        own = build(settings_of({**context, **length})).pipeline
        if isinstance(own, BackwardPipeline):
            own, named = (replace(p, scheduler="naive") for p in (own, named))
        if isinstance(own, WarpgroupPipeline):  # what only a tuned tile has; no control names it
            named = replace(named, ahead=own.ahead, columns=own.columns, direct=own.direct)
            if own.scheduler == "queue":  # shown as its order, with a CTA for each work tile
                own = replace(own, scheduler="lpt")
        assert named == own, entry["choices"]


def test_the_grid_is_the_controls() -> None:
    assert tuple(c.key for c in CONTROLS if c.level == "context") == CONTEXT
    assert {key for key in QUICK} <= {c.key for c in CONTROLS}
    assert count_shapes(controls(quick=True)) * 20 < count_shapes(controls())
    for control in CONTROLS:
        assert len({choice.key for choice in control.choices}) == len(control.choices) > 1
        assert control.about.endswith(".")


def test_other_machines_take_their_place(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "b200"\n[gpu]\nexp_per_clk = 32\n')
    few = tuple(
        c.only("128") if c.key == "head_dim" else c.only("1k") if c.key == "seqlen"
        else c.only("blackwell") if c.key == "kernel" else c.only("bwd") if c.key == "pass" else c
        for c in with_machines(controls(quick=True), (str(path),))
    )  # fmt: skip
    done: list[None] = []
    recording = record_grid(few, lambda: done.append(None))
    assert len(done) == count_shapes(few)
    head, _ = unpack(pack(recording, read_verdicts()))
    assert head["machines"][str(path)]["name"] == "B200 (mine)"


def test_a_machine_without_pairs_refuses_them(tmp_path: Any) -> None:
    path = tmp_path / "one.toml"
    path.write_text('base = "b200"\n[gpu]\nsm_count = 1\n')
    few = tuple(
        c.only("128") if c.key == "head_dim" else c.only("1k") if c.key == "seqlen"
        else c.only("blackwell") if c.key == "kernel" else c.only("bwd") if c.key == "pass" else c
        for c in with_machines(controls(quick=True), (str(path),))
    )  # fmt: skip
    recording = record_grid(few, lambda: None)
    assert any("a CTA pair needs 2 SMs" in reason for reason in recording.reasons.values)
    assert recording.results and min(recording.point_results) < 0


def test_packing_is_repeatable_and_versioned(small: Small) -> None:
    verdicts = read_verdicts()
    assert pack(small.recording, verdicts) == small.text
    assert small.head["schema_version"] == SCHEMA_VERSION
    import base64
    import gzip

    whole = gzip.decompress(base64.b64decode(small.text))
    other = whole.replace(b'"schema_version":1', b'"schema_version":9', 1)
    with pytest.raises(ValueError, match=r"schema_version must be 1; got 9"):
        unpack(base64.b64encode(gzip.compress(other)).decode())
