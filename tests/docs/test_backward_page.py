"""docs/backward.md: its tables are the present ones, and the files it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from lab.pages.backward_tables import (
    PLANS,
    SECTIONS,
    TABLES,
    render_code,
    render_prediction,
    render_traffic,
)
from lab.records import read_record, record_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "backward.md"
DOCUMENT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.backward_tables."""
    assert list(TABLES.stale(DOCUMENT)) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_table_is_found_and_mended(name: str) -> None:
    """Planted: one changed digit or letter in a table, or a table that is not there."""
    table = SECTIONS[name]()
    changed = DOCUMENT.replace(table, table[:-1] + "?")
    assert list(TABLES.stale(changed)) == [name]
    assert TABLES.fill(changed) == DOCUMENT
    with pytest.raises(ValueError, match=f"end of {name}"):
        TABLES.fill(DOCUMENT.replace(f"<!-- end of {name} -->", ""))


def test_a_count_that_differs_from_the_plan_is_shown(tmp_path: Path) -> None:
    """Planted: a byte more of products in one CTA of a pair."""
    path, report = record_path("backward_traffic"), read_record("backward_traffic")
    report["d 128, pair"]["counted"][1]["products"] += 1
    (tmp_path / path.name).write_text(json.dumps(report))
    found = render_traffic(tmp_path)
    assert "196608, counted [196609]" in found and "294912, counted [294913]" in found


def test_what_a_kernel_misses_is_said(tmp_path: Path) -> None:
    path, report = record_path("codegen"), read_record("codegen")
    for case in report["backward"]:
        case["goals_missed"] = {}
    (tmp_path / path.name).write_text(json.dumps(report))
    assert render_code(tmp_path).endswith("Goals missed:\n\nnone")
    report["backward"][0]["goals_missed"] = {"ours": ["mma_slots"]}
    (tmp_path / path.name).write_text(json.dumps(report))
    assert render_code(tmp_path).endswith("Goals missed:\n\n- (128, 128) full, ours: mma_slots")


def test_predictions_count_instructions(tmp_path: Path) -> None:
    """Planted: ten times the exponentials in one kernel; a case that is gone."""
    path, report = record_path("codegen"), read_record("codegen")
    (kernel,) = (one for one in report["backward"][0]["kernels"] if one["name"] == "ours 2 CTA")
    kernel["columns"]["gradients"]["MUFU.EX2"] *= 10
    (tmp_path / path.name).write_text(json.dumps(report))
    before, after = (
        text.splitlines() for text in (render_prediction(), render_prediction(tmp_path))
    )
    changed = [line for line in after if line not in before]
    assert [line.split(" | ")[0] for line in changed] == ["| d 128, pair"]
    assert re.search(r"\| \d+ \(\d+\) \|", changed[0])
    report["backward"] = report["backward"][:2]
    (tmp_path / path.name).write_text(json.dumps(report))
    with pytest.raises(ValueError, match="has no backward kernel for"):
        render_prediction(tmp_path)


def test_every_signal_and_role_is_listed() -> None:
    words = set(re.findall(r"\w+", SECTIONS["signals"]() + SECTIONS["roles"]()))
    for plan in PLANS.values():
        assert {one.name for one in (*plan.roles, *plan.signals)} <= words


def test_what_it_links_to_exists() -> None:
    """Files linked to, and files and folders named."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", DOCUMENT)
    named = re.findall(r"`((?:tests|lab)/[\w/.]+)`", DOCUMENT)
    paths = [PAGE.parent / link for link in links] + [ROOT / name for name in named]
    assert len(links) > 10 and len(named) > 5
    assert [path for path in paths if not path.exists()] == []


def test_every_module_of_the_kernels_is_listed() -> None:
    """The tables of files name each module of the backward kernels that is a part of them."""
    modules = {path.stem for path in (ROOT / "fa4/sm100/backward").glob("*.py")}
    assert modules - {"__init__", "spec"} <= set(re.findall(r"`(\w+)\.py`", DOCUMENT))
