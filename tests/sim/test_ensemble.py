"""Sets of constants that fit as well: the record is what the model says, and verdicts follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4.figures.accuracy import B200_FILE
from fa4.sim.ablate import ablate
from fa4.sim.cost_table import FREE_CONSTANTS, CostTable
from fa4.sim.ensemble import (
    CONSTANTS_FILE,
    ERROR_COLUMN,
    Interval,
    constant_sets,
    ensemble_of,
    seconds_of,
    speedup_interval,
)
from fa4.sim.machine import find_machine
from fa4.sim.measurements import read_measurements, select_rows
from fa4.sim.options import build
from fa4.sim.validation import compare
from tests.sim.test_commands_predict import run_json

WITHIN = 0.005


def errors() -> list[float]:
    """The mean errors that the record states."""
    lines = CONSTANTS_FILE.read_text("utf-8").splitlines()
    column = lines[0].split(",").index(ERROR_COLUMN)
    return [float(line.split(",")[column]) for line in lines[1:]]


def test_recorded_sets_fit_as_well_as_the_best() -> None:
    """A few dozen, within half a point, inside their intervals; two of them computed again."""
    machine, sets = find_machine("b200"), constant_sets()
    assert len(sets) >= 20 and max(errors()) <= min(errors()) + WITHIN
    limits = dict(CostTable.intervals()) | {
        name: (least, most) for name, (least, most, _) in FREE_CONSTANTS.items()
    }
    for found in sets:
        assert all(limits[name][0] <= value <= limits[name][1] for name, value in found.items())
    rows = select_rows(read_measurements(B200_FILE), machine)[0]
    for number in (0, len(sets) // 2):
        member = ensemble_of(machine)[number]
        assert compare(rows, member).mape == pytest.approx(errors()[number], abs=1e-4)
    assert compare(rows, machine).mape <= min(errors()) + WITHIN


def test_an_ensemble_keeps_what_the_caller_gave() -> None:
    """A figure given stays in every set; machines without tensor memory have no sets."""
    request = build({"costs.vector_efficiency": 0.9})
    members = ensemble_of(request.machine)
    assert members and {m.costs.vector_efficiency for m in members} == {0.9}
    assert len({m.costs.math_latency_cycles for m in members}) > 1
    assert ensemble_of(find_machine("h200")) == ()
    hopper = build({"machine": "h200", "seqlen": "1k"})
    assert seconds_of(hopper) == (hopper.predict().seconds,)


def test_a_ratio_is_undecided_where_sets_disagree() -> None:
    """And only there."""
    assert Interval(least=0.95, most=1.04, sets=24).undecided
    for least, most in ((1.002, 1.04), (0.9, 1.0)):
        assert not Interval(least=least, most=most, sets=24).undecided
    found = speedup_interval((2.0, 3.0), (2.0, 4.0))
    assert found == Interval(least=0.75, most=1.0, sets=1)
    assert speedup_interval((2.0,), (1.0,)) is None and speedup_interval((), (1.0,)) is None


def test_predictions_carry_their_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Around the prediction; a comparison says whether its sign is known."""
    report = run_json(capsys, "predict", "--seqlen", "4k", "--no-why", "--compare", "cta_group=1")
    interval = report["a"]["interval"]
    assert interval["least_tflops"] <= report["a"]["tflops"] <= interval["most_tflops"]
    least, most = report["speedup_interval"]
    assert least <= report["speedup"] <= most
    assert report["undecided"] == (least < 0.999 and most > 1.001)
    bare = run_json(capsys, "predict", "--seqlen", "4k", "--no-why", "--no-interval")
    assert bare["interval"] is None and bare["tflops"] == report["a"]["tflops"]


def test_ablations_carry_intervals_if_asked() -> None:
    """Each idea that runs."""
    for outcome in ablate({"seqlen": "1k"}, intervals=True).outcomes:
        assert (outcome.interval is None) == (outcome.prediction is None)
        if outcome.interval is not None and outcome.speedup is not None:
            assert outcome.interval.least <= outcome.speedup <= outcome.interval.most
    assert all(outcome.interval is None for outcome in ablate({"seqlen": "1k"}).outcomes)


@pytest.mark.parametrize("length", ["8k", "16k"])
def test_one_cta_against_a_pair_that_spills(length: str) -> None:
    """FA pull request 2741: 1.205 times as fast (1.105 to 1.560); 2869: 1.265 without the spills.

    By every set of constants the sign is right.
    """
    asked: dict[str, object] = {"seqlen": length, "kernel": "published"}
    pair, one = (seconds_of(build({**asked, "cta_group": group})) for group in (2, 1))
    found = speedup_interval(pair, one)
    assert found is not None and found.least >= 1.10
    kept = build({**asked, "cta_group": 2, "kernel": "blackwell"}).predict().seconds
    assert pair[0] / kept == pytest.approx(1.265, abs=0.05)


def test_reloads_are_what_makes_a_pair_slow() -> None:
    """With reloads for nothing pairs differ by half as much; GB300 has no spills."""
    free: dict[str, object] = {"cta_group": 2, "costs.local_load_latency_cycles": 0}
    ours, published = (
        build({**free, "kernel": name}).predict().seconds for name in ("blackwell", "published")
    )
    assert published / ours < 1.15  # what is left: cycles of the shared-memory port
    request = build({"machine": "gb300", "kernel": "published"})
    same = replace(request.pipeline, published=False)
    assert replace(request, pipeline=same).predict().seconds == request.predict().seconds
