"""docs/how-to/suites.md: what became of the tests of others, by their record."""

from __future__ import annotations

import pytest

from lab.benchmarks.strangers import PROJECTS
from lab.pages.stranger_tables import OTHER, PAGE, TABLES, finding_of, reason_of, render_counts
from lab.records import read_record

FINDING = """fa4.emulator.errors.EmulationFailed: _kernel: 2 finding(s)
  race (style): CTA 0 warp 1 lane 0 (PTX line 1: st.global.b32) overwrites what
    at PTX line 1 (a.py:3), CTA 0 warp 1
    style; PTX ISA 8.7.2: either order
  uninitialised: CTA 0 warp 2 lane 0 reads what nothing has written
    hazard; PTX ISA 5.4.4: memory
"""


def test_the_page_is_up_to_date() -> None:
    """If not: python -m lab.pages.stranger_tables."""
    text = PAGE.read_text(encoding="utf-8")
    assert list(TABLES.stale(text)) == []
    assert list(TABLES.stale(text.replace("passed", "failed", 1))) == ["suites"]


def test_every_project_and_every_failure_is_there() -> None:
    """At the commit that the command names; each test has one outcome, each failure its row."""
    record = read_record("strangers")
    assert list(record["projects"]) == [project.name for project in PROJECTS]
    rows = PAGE.read_text(encoding="utf-8").count(" | `test_")
    tests = [test for found in record["projects"].values() for test in found["tests"].values()]
    assert {test["outcome"] for test in tests} <= {"passed", "failed", "skipped"}
    assert rows == sum(test["outcome"] == "failed" for test in tests)
    for project in PROJECTS:
        found = record["projects"][project.name]
        assert found["commit"] == project.commit and project.name in render_counts()


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("Failed: Timeout (>60.0s) from pytest-timeout.", "takes longer than its time here"),
        (FINDING, "a finding"),
        (
            "NotImplementedError: Could not run 'aten::_x' with",
            "calls an operator of torch that has no CPU kernel",
        ),
        ("TypeError: no", OTHER),
    ],
)
def test_reasons(why: str, reason: str) -> None:
    """By what an error says."""
    assert reason_of(why) == reason


def test_a_finding_is_named_without_lesser_ones() -> None:
    """Kernel and kinds; a kernel that nobody has looked at says so."""
    assert finding_of(FINDING) == "`_kernel`: uninitialised; not judged"
    text = FINDING.replace("_kernel", "liger_cross_entropy_kernel")
    assert finding_of(text).startswith("`liger_cross_entropy_kernel`: uninitialised; right: ")
