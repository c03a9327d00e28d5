"""docs/verify.md: the table of kernels is what a GPU's run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.hardware import verify_gpu
from lab.pages.report_picture import PICTURE, SIZE
from lab.pages.verify_tables import JSON_PAGE, JSON_TABLES, TABLES
from lab.records import read_record
from tests.docs.test_explorer_picture import MOST_BYTES, size_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
RECORDED = read_record("verify_gpu")


def test_the_table_of_kernels_is_the_recorded_one() -> None:
    """Word for word; another figure would be seen."""
    assert verify_gpu.table(RECORDED["backends"]) in PAGE
    backends: dict[str, Any] = json.loads(json.dumps(RECORDED["backends"]))
    backends["torch-sdpa-cudnn"]["cases"] += 1
    assert verify_gpu.table(backends) not in PAGE


def test_the_table_of_coverage_is_up_to_date() -> None:
    """If not: python -m lab.pages.verify_tables; and another figure would be seen."""
    assert list(TABLES.stale(PAGE)) == []
    assert list(TABLES.stale(PAGE.replace("| dQ | ", "| dQ | 1"))) == ["coverage"]


def test_the_keys_of_a_report_are_up_to_date() -> None:
    """On a page of their own, to which this one leads."""
    document = JSON_PAGE.read_text(encoding="utf-8")
    assert list(JSON_TABLES.stale(document)) == [] and f"]({JSON_PAGE.name})" in PAGE
    assert list(JSON_TABLES.stale(document.replace("| `seed` |", "| `seeds` |"))) == ["schema"]


def test_the_picture_of_a_report_is_small_and_whole() -> None:
    """As the script takes it; if not: python -m lab.pages.report_picture."""
    content = PICTURE.read_bytes()
    assert size_of(content) == SIZE and len(content) <= MOST_BYTES
    assert "](pictures/report.png)" in PAGE and "python -m lab.pages.report_picture" in PAGE


def test_the_page_names_machine_and_versions() -> None:
    """Releases as recorded; the GPU is a claim (test_claims_of_pages.py)."""
    version = RECORDED["cudnn"]
    assert f"cuDNN {version // 10000}.{version // 100 % 100}" in PAGE
    assert f"torch {RECORDED['torch'].rpartition('.')[0]}" in PAGE
    assert len(RECORDED["commit"]) == 40


def test_every_option_of_the_page_exists() -> None:
    """The table of options against the command's own."""
    import re

    import typer

    from fa4.cli import build_app

    command = typer.main.get_command(build_app(["verify"])).commands["verify"]  # type: ignore[attr-defined]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    rows = PAGE[PAGE.index("| option | |") : PAGE.index("Exit code 0")]
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rows))
    assert len(named) >= 10 and named <= known, named - known
