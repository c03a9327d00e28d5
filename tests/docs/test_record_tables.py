"""Pages say how old the records are that they quote."""

from __future__ import annotations

import re

import pytest

from lab.pages import record_tables
from lab.pages.record_tables import HARDWARE, PAGE, pages, quoted, tables_of
from lab.records import OLDER
from lab.table import BY_NAME


def test_pages_are_those_of_the_ledger() -> None:
    """If not: python -m lab.pages.record_tables. A page that quotes a record has one."""
    found = list(pages())
    assert {"hopper.md", "throughput.md", "verify.md"} <= {path.name for path in found}
    for path in found:
        assert list(tables_of(path).stale(path.read_text("utf-8"))) == [], path


def test_a_quotation_is_found() -> None:
    """By the marker of a number, a file, the program of a table; what tests hold is not listed."""
    for text in (
        "about <!--=hopper_bench: calls-->70 calls",
        "see `lab/hardware/results/hopper_bench.json`",
        "<!-- calls: written by python -m lab.pages.hopper_speed -->",
    ):
        assert BY_NAME["hopper_bench"] in quoted(text)
    assert (
        quoted("<!--=claims: backward pairs-->24%, lab/benchmarks/results/predictions.json") == []
    )


def test_a_record_that_ages_changes_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both lists and where it is quoted; one that tests compute again has no age."""
    before = {path: tables_of(path).sections["records"]() for path in pages()}
    monkeypatch.setattr(record_tables, "state_of", lambda name, tree: f"{OLDER}, planted")
    after = {path: tables_of(path).sections["records"]() for path in pages()}
    assert all(before[path] != after[path] for path in before)
    assert {PAGE, HARDWARE} < set(after)
    (claims,) = re.findall(r"\n\| \[claims\].*", after[PAGE])
    assert claims.endswith("of this code |") and claims in before[PAGE]
