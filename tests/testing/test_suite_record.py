"""What the suite asks by default is what was recorded (`suite_record` says why, and records)."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest

from fa4.testing import PROPERTIES
from fa4.testing.values import REGIMES
from tests.testing import suite_record

RECORDED: dict[str, Any] = json.loads(suite_record.FILE.read_text(encoding="utf-8"))
AGAIN = "if that is meant: python -m tests.testing.suite_record"


@pytest.fixture
def same_hypothesis() -> None:
    """Another version draws other cases from the same strategies."""
    recorded, there = RECORDED["hypothesis"], hypothesis.__version__
    if recorded != there:
        pytest.skip(f"recorded with Hypothesis {recorded}; here is {there}")


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_what_a_property_asks(prop) -> None:
    """Needs, types and the cases of the design, with the levels that they count for."""
    recorded = dict(RECORDED["properties"][prop.name])
    assert ("drawn" in recorded) == (prop.strategy is not None)
    recorded.pop("drawn", None)
    assert suite_record.asked_by(prop) == recorded, AGAIN


@pytest.mark.usefixtures("same_hypothesis")
@pytest.mark.parametrize("prop", [x for x in PROPERTIES if x.strategy], ids=lambda prop: prop.name)
def test_what_is_drawn_for_a_property(prop) -> None:
    """The cases beyond the design."""
    assert suite_record.drawn_by(prop) == RECORDED["properties"][prop.name]["drawn"], AGAIN


def test_no_property_is_lost() -> None:
    """In the order in which they run."""
    assert [prop.name for prop in PROPERTIES] == list(RECORDED["properties"]), AGAIN


@pytest.mark.usefixtures("same_hypothesis")
@pytest.mark.parametrize("name", suite_record.public_strategies())
def test_what_a_strategy_draws(name: str) -> None:
    """Those that users give to their own tests, whether or not the suite uses them."""
    strategy = suite_record.public_strategies()[name]()
    assert suite_record.drawn_from(strategy) == RECORDED["strategies"][name], AGAIN


@pytest.mark.usefixtures("same_hypothesis")
@pytest.mark.parametrize("name", suite_record.session_steps())
def test_what_a_session_draws(name: str) -> None:
    """The arguments of a step of a walk."""
    steps = suite_record.session_steps()[name]
    assert suite_record.drawn_from(steps) == RECORDED["sessions"][name], AGAIN


@pytest.mark.parametrize("prop", suite_record.LISTED, ids=lambda prop: prop.name)
def test_what_a_case_is_built_to(prop) -> None:
    """Arrays and options of a call: the same for the same case, whatever the version."""
    assert suite_record.arrays_of(prop) == RECORDED["arrays"][prop.name], AGAIN


@pytest.mark.parametrize("prop", suite_record.SESSION_PROPERTIES, ids=lambda prop: prop.name)
def test_what_a_walk_calls(prop) -> None:
    """Each call of the steps that are listed."""
    assert suite_record.calls_of(prop) == RECORDED["calls"][prop.name], AGAIN


def test_what_mods_compute() -> None:
    """Masks, score functions and their derivatives."""
    assert suite_record.mods() == RECORDED["mods"], AGAIN


def test_what_the_atlas_asks() -> None:
    """The minimal cases of the bugs, in their order."""
    assert suite_record.atlas() == RECORDED["atlas"], AGAIN
    assert list(suite_record.atlas()) == list(RECORDED["atlas"]), AGAIN


@pytest.mark.parametrize("name", [f"{x} {dtype}" for x in REGIMES for dtype in ("fp32", "fp16")])
def test_values_of_a_regime(name: str, regimes: dict[str, Any]) -> None:
    """Size, sign and spread of q, k and v; the last digits are the machine's."""
    for letter, figures in RECORDED["values"][name].items():
        size = max(map(abs, figures))
        near = pytest.approx(figures, rel=1e-3, abs=1e-6 * size)
        assert regimes[name][letter] == near, (letter, AGAIN)


@pytest.fixture(scope="module")
def regimes() -> dict[str, Any]:
    return suite_record.values()
