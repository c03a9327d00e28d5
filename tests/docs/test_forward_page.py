"""docs/forward.md: its tables are the present ones, and the files and commands it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fa4.plan.schema import Arrive, Wait, walk
from lab.pages.forward_tables import SECTIONS, SHOWN, fill, render_order, render_prediction, stale
from lab.records import read_record, record_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "forward.md"
DOCUMENT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.forward_tables."""
    assert list(stale(DOCUMENT)) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_table_is_found_and_mended(name: str) -> None:
    """Planted: one changed digit or letter in a table, or a table that is not there."""
    table = SECTIONS[name]()
    changed = DOCUMENT.replace(table, table[:-1] + "?")
    assert list(stale(changed)) == [name]
    assert fill(changed) == DOCUMENT
    with pytest.raises(ValueError, match=f"end of {name}"):
        fill(DOCUMENT.replace(f"<!-- end of {name} -->", ""))


def test_order_has_every_step() -> None:
    """The unrolled work tile names every signal and every kind of work of the plan."""
    words = set(render_order(SHOWN.plan).split())
    for role in SHOWN.plan.roles:
        for step in walk(role.program):
            if isinstance(step, Wait):
                assert f"<{step.signal}" in words
            elif isinstance(step, Arrive):
                assert f">{step.signal}" in words
            else:
                assert step.what.replace(" ", "_") in words


def test_the_shipped_kernel_is_marked(tmp_path: Path) -> None:
    """Each call has one bold figure, the one its verdict has."""
    path, report = record_path("forward_prediction"), read_record("forward_prediction")
    bold = re.findall(r"\*\*(\d+)\*\*", render_prediction())
    assert bold == [f"{found['tflops']:.0f}" for found in report["verdicts"]]
    report["verdicts"][0]["reached"] = not report["verdicts"][0]["reached"]
    (tmp_path / path.name).write_text(json.dumps(report))
    assert render_prediction(tmp_path) != render_prediction()


def test_what_it_links_to_exists() -> None:
    """Files linked to, and files and folders named in the table of checks."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", DOCUMENT)
    named = re.findall(r"`((?:tests|lab)/[\w/.]+)`", DOCUMENT)
    paths = [PAGE.parent / link for link in links] + [ROOT / name for name in named]
    assert len(links) > 10 and len(named) > 5
    assert [path for path in paths if not path.exists()] == []


def test_every_module_of_the_kernel_is_listed() -> None:
    """The table of files names each module of the forward kernel that is a part of it."""
    helpers = {"__init__", "spec", "units"}
    folders = (ROOT / "fa4" / name for name in ("sm100/forward", "kit"))
    modules = {path.stem for folder in folders for path in folder.rglob("*.py")} - helpers
    assert modules <= set(re.findall(r"`(\w+)\.py`", DOCUMENT))
