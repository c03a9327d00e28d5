"""What tests/conftest.py sees to: one profile of Hypothesis for all tests, and the collector."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, errors, given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parent
OF_THE_PROFILE = {"deadline"}
# Settings of a search outside pytest, which loads no profile.
OUTSIDE = {"testing/suite_record.py"}


def own_settings(text: str) -> list[str]:
    """Calls of `settings` in a test that say themselves what the profile says."""
    return [
        f"line {node.lineno}: {keyword.arg}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "settings"
        for keyword in node.keywords
        if keyword.arg in OF_THE_PROFILE
    ]


def test_no_test_sets_what_the_profile_sets() -> None:
    """So that the profile is the only place to change it."""
    own = Path(__file__).name
    found = {
        str(path.relative_to(TESTS)): own_settings(path.read_text(encoding="utf-8"))
        for path in TESTS.rglob("*.py")
    }
    assert {name for name, calls in found.items() if calls} == {own, *OUTSIDE}
    assert own_settings("@settings(max_examples=4, deadline=None)\ndef f(): ...") == [
        "line 1: deadline"
    ]


def test_the_profile_is_loaded() -> None:
    """In this process, which may be a worker of pytest-xdist."""
    assert settings.default is not None
    for kept in (settings.default, settings(max_examples=3)):
        assert kept.deadline is None and HealthCheck.too_slow in kept.suppress_health_check


def test_a_slow_example_fails_nothing() -> None:
    """Beyond Hypothesis' own limit of 200 ms; with that limit the same test fails."""

    def slow(value: bool) -> None:
        time.sleep(0.25)

    settings(max_examples=1)(given(st.booleans())(slow))()
    with pytest.raises((errors.DeadlineExceeded, errors.Flaky)):
        settings(max_examples=1, deadline=200)(given(st.booleans())(slow))()


@pytest.mark.parametrize("repeated", [True, False])
def test_a_ci_repeats_its_draws(repeated: bool) -> None:
    """With CI in the environment, and seeds outside Hypothesis too."""
    command = "import tests.conftest, tests.drawn as d; print(d.draw_seed(), d.draw_seed())"
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=TESTS.parent,
        env=environment | ({"CI": "true"} if repeated else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    seeds = done.stdout.split()
    assert (seeds == ["0", "0"]) is repeated and (seeds[0] == seeds[1]) is repeated


def test_the_collector_runs_behind_what_the_collection_made() -> None:
    """In the process of the tests, whether pytest started it or a worker of xdist."""
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
