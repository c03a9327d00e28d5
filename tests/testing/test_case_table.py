"""The table of cases in tests/README.md names tests and properties that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fa4.testing import PROPERTIES

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(
    r"^\| (\d+) \| (.+?) \| (.*?) \| (.*?) \|$", (TESTS / "README.md").read_text("utf-8"), re.M
)


def test_every_case_has_a_row() -> None:
    """1 to 55, in order, each with a test, a property or the part it belongs to."""
    assert [int(row[0]) for row in ROWS] == list(range(1, 56))
    assert all(row[2] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_row_is_true(row: tuple[str, ...]) -> None:
    """Its test function and its properties exist."""
    number, _, case, properties = row
    source = (TESTS / "reference" / "test_cases.py").read_text("utf-8")
    defined = set(re.findall(r"^def (test_case_\d\d)(?=_)", source, re.M))
    named = re.findall(r"`(\w+)`", case)
    assert all(name in defined and name.endswith(f"{int(number):02d}") for name in named)
    assert named or case in ("kernel/simulator part", "property alone")
    assert set(re.findall(r"`(\w+)`", properties)) <= {prop.name for prop in PROPERTIES}
    assert case != "property alone" or properties
