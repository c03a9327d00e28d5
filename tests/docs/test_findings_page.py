"""docs/findings: short scripts that need one library, and a page of what they printed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lab.hardware.run_findings import SCRIPTS, run_script
from lab.pages.findings_tables import PAGE, TABLES, printed, record

PATHS = sorted(SCRIPTS.glob("*.py"))


def test_the_page_is_up_to_date() -> None:
    """If not: python -m lab.pages.findings_tables."""
    text = PAGE.read_text(encoding="utf-8")
    assert list(TABLES.stale(text)) == []
    assert list(TABLES.stale(text.replace("dQ", "dK", 1))) == ["findings"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_script_is_short_and_needs_one_library(path: Path) -> None:
    """torch and flash_attn are all that is imported; what was run on a GPU is on the page."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported <= {"torch", "flash_attn"}
    assert len(tree.body) <= 14
    (title,) = (ast.get_docstring(tree) or "").splitlines()[:1]
    shown = f"## {title.rstrip('.').replace('`', '')}\n" in PAGE.read_text(encoding="utf-8")
    assert shown == (path.stem in record()["results"])


def test_the_page_tells_how_a_script_ends() -> None:
    """Lines of one that ends well, CUDA's name of the error of another."""
    assert printed({"code": 0, "lines": ["a", "b"]}) == "a\nb"
    assert printed({"code": 1, "lines": ["see `cudaErrorX' in"]}) == "ends with cudaErrorX"
    assert record()["gpu"]


def test_a_script_that_fails_is_recorded(tmp_path: Path) -> None:
    """Its exit code and the end of what it says."""
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit('no GPU here')")
    assert run_script(bad) == {"code": 1, "lines": ["no GPU here"]}
