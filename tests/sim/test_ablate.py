"""Ablations and `fa4 ablate`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer.testing

from fa4.commands.ablate import ablate as command
from fa4.designs.ideas import BACKWARD_IDEAS, FORWARD_IDEAS
from fa4.sim.ablate import OFF_RESCALE_RATE, Ablation, ablate
from fa4.sim.options import build
from fa4.sim.predict import REAL_RESCALE_RATE


def outcomes(done: Ablation) -> dict[str, Any]:
    """Outcomes by the idea's name."""
    return {outcome.idea.name: outcome for outcome in done.outcomes}


def test_each_idea_changes_only_itself() -> None:
    """The prediction is that of the settings with the idea's own settings on top."""
    settings = {"seqlen": "2k", "batch": "2", "rescale_rate": "0.05"}
    done = ablate(settings)
    assert done.base == build(settings).predict()
    assert [outcome.idea for outcome in done.outcomes] == list(FORWARD_IDEAS)
    for outcome in done.outcomes:
        if outcome.prediction is not None:
            own = dict(outcome.idea.settings)
            if outcome.idea.name == "conditional rescaling":
                own["rescale_rate"] = OFF_RESCALE_RATE
            changed = build(settings | own).predict()
            assert outcome.prediction == changed, outcome.idea.name
            assert outcome.speedup == changed.seconds / done.base.seconds


def test_the_baseline_is_what_predict_says() -> None:
    """Of the same settings, whatever they are."""
    for settings in ({}, {"tau": "0"}, {"rescale_rate": REAL_RESCALE_RATE}):
        assert ablate(settings).base == build(settings).predict()


def test_big_ideas_are_gains() -> None:
    """Without two Q tiles, ping-pong or P in tensor memory the kernel is clearly slower."""
    found = outcomes(ablate({"rescale_rate": REAL_RESCALE_RATE}))
    for name in ("two Q tiles", "ping-pong", "P in tensor memory", "conditional rescaling",
                 "correction warpgroup"):  # fmt: skip
        assert found[name].speedup > 1.02, name


def test_ideas_not_in_use_say_so() -> None:
    """No pairs and no software exp2 here, no LPT without a mask; one Q tile cannot ping-pong."""
    masked = outcomes(ablate({"causal": "yes", "seqlen": "8k", "exp2_frequency": "0"}))
    assert masked["CTA pairs"].note == masked["software exp2"].note == "not used here"
    assert masked["longest first (LPT)"].speedup > 1.0
    single = outcomes(ablate({"q_tiles": "1", "seqlen": "2k", "split_p": "1", "tau": "0"}))
    unused = ("two Q tiles", "ping-pong", "split P", "conditional rescaling",
              "longest first (LPT)")  # fmt: skip
    assert {name for name, outcome in single.items() if outcome.note} == set(unused)
    assert single["ping-pong"].prediction is None and single["ping-pong"].speedup is None


def test_ideas_that_cannot_be_switched_off_say_why() -> None:
    """Causal head dim 128: shared memory does not hold P as well."""
    found = outcomes(ablate({"causal": "yes", "seqlen": "2k"}))["P in tensor memory"]
    assert found.prediction is None
    assert found.note.startswith("cannot run: shared memory plan needs")


def test_backward() -> None:
    """Pairs and the order of sums; what is off already is not switched off."""
    settings = {"pass": "bwd", "seqlen": "4k"}
    done = ablate(settings)
    assert [outcome.idea for outcome in done.outcomes] == list(BACKWARD_IDEAS)
    assert all(outcome.speedup > 1.0 for outcome in done.outcomes)
    off = outcomes(ablate(settings | {"cta_group": "1", "deterministic": "yes"}))
    assert {outcome.note for outcome in off.values()} == {"not used here"}


def test_rescale_rate_without_a_threshold() -> None:
    """A measured rate takes the place of 1."""
    always, half = (
        outcomes(ablate({"seqlen": "2k"}, off_rescale_rate=rate))["conditional rescaling"].speedup
        for rate in (1.0, 0.5)
    )
    assert always > half > 1.0


def test_machines_without_tensor_memory_are_refused() -> None:
    """FlashAttention-4's ideas make no sense there."""
    with pytest.raises(ValueError, match="need tensor memory; H200 has none"):
        ablate({"machine": "h200"})


def run(*arguments: str) -> typer.testing.Result:
    """`fa4 ablate <arguments>`, run in this process."""
    app = typer.Typer()
    app.command()(command)
    return typer.testing.CliRunner().invoke(app, arguments)


def test_command() -> None:
    """A row per idea, then why some have no number."""
    done = run("--seqlen", "2k", "--causal", "--set", "heads=8")
    assert done.exit_code == 0, done.output
    for idea in FORWARD_IDEAS:
        assert idea.name in done.stdout
    assert "CTA pairs: not used here" in done.stdout
    assert "P in tensor memory: cannot run: shared memory plan needs" in done.stdout


def test_command_as_json() -> None:
    """The same as data."""
    report = json.loads(run("--seqlen", "2k", "--pass", "bwd", "--json").stdout)
    assert report["schema_version"] == 1 and report["machine"] == "B200"
    assert [row["idea"] for row in report["ideas"]] == [idea.name for idea in BACKWARD_IDEAS]
    for row in report["ideas"]:
        ratio = row["result"]["microseconds"] / report["with_all"]["microseconds"]
        assert row["speedup"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tile-n", "256"), "TMEM plan needs 768 columns"),
        (("--off-rescale-rate", "2"), "off_rescale_rate must be between 0 and 1; got 2.0"),
        (("--set", "x"), "expected NAME=VALUE"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    """One sentence with the rule and the value."""
    done = run(*arguments)
    assert isinstance(done.exception, ValueError) and message in str(done.exception)
