"""docs/throughput.md lists every TFLOP/s figure of the pages: what they quote, and nothing else."""

from __future__ import annotations

import re

import pytest

from lab.pages.claims import ROOT, pages
from lab.pages.marked_tables import TABLE
from lab.pages.quotes import quotes
from lab.pages.throughput_tables import PAGE, PICTURES_ELSEWHERE, SECTIONS, TABLES, TABLES_ELSEWHERE

DOCUMENT = PAGE.read_text(encoding="utf-8")
OWN = "docs/throughput.md"
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in pages()}
PRINTED = re.compile(r"(\d[\d,]*) TFLOP/s")
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAWN = "ablation"  # the one picture of `fa4 figures` whose call the page says in full


def printed(text: str) -> set[str]:
    """Figures that a page's programs print."""
    return {x.replace(",", "") for block in OUTPUT.findall(text) for x in PRINTED.findall(block)}


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.throughput_tables."""
    assert list(TABLES.stale(DOCUMENT)) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_table_is_found_and_mended(name: str) -> None:
    """Planted: one changed digit or letter in a table, or a table that is not there."""
    table = SECTIONS[name]()
    changed = DOCUMENT.replace(table, table[:-3] + "?" + table[-2:])
    assert list(TABLES.stale(changed)) == [name]
    assert TABLES.fill(changed) == DOCUMENT
    with pytest.raises(ValueError, match=f"end of {name}"):
        TABLES.fill(DOCUMENT.replace(f"<!-- end of {name} -->", ""))


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_prints_is_listed(name: str) -> None:
    """With its call; and each call that is listed for a page stands there."""
    listed = {f"{one.prediction.tflops:.0f}" for one in quotes() if one.page == name}
    assert printed(TEXTS[name]) <= listed
    outputs = " ".join(OUTPUT.findall(TEXTS[name])) if name != "docs/simulator.md" else TEXTS[name]
    assert listed <= set(re.findall(r"\d+", outputs))


def test_a_figure_that_is_not_listed_is_found() -> None:
    """Planted: another one in an output of chapter 7."""
    name = "docs/ladder/07-tensor-memory.md"
    (figure,) = printed(TEXTS[name])
    wrong = TEXTS[name].replace(f"{figure} TFLOP/s", "4605 TFLOP/s")
    listed = {f"{one.prediction.tflops:.0f}" for one in quotes() if one.page == name}
    assert printed(wrong) - listed == {"4605"}


def tables_with_throughput(texts: dict[str, str]) -> set[tuple[str, str]]:
    """Pages and names of the tables in them that speak of TFLOP/s, in the table or before it."""
    return {
        (page, match["name"])
        for page, text in texts.items()
        for match in TABLE.finditer(text)
        if "TFLOP/s" in match.group()
        or re.search(r"TFLOP/s by [^\n]*\n*\Z", text[: match.start()][-200:])
    }


def test_tables_with_throughput_are_listed() -> None:
    """All, but for this page's own; those without the word say it in the sentence before."""
    others = {name: text for name, text in TEXTS.items() if name != OWN}
    unsaid = {("docs/hopper.md", "kernel"), ("docs/backward.md", "prediction")}
    assert tables_with_throughput(others) == set(TABLES_ELSEWHERE) - unsaid
    for page, name in TABLES_ELSEWHERE:
        assert f"<!-- {name}: written by" in TEXTS[page]
    new = "<!-- x: written by python y.py -->\n\n| TFLOP/s |\n\n<!-- end of x -->"
    assert ("a.md", "x") in tables_with_throughput({"a.md": new})


def test_pictures_with_throughput_are_listed() -> None:
    """By the words in them; the files that are named as sources exist."""
    found = {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")
             if "TFLOP/s" in path.read_text("utf-8")}  # fmt: skip
    assert found == {*PICTURES_ELSEWHERE, DRAWN}
    sources = [x[-1] for x in (*TABLES_ELSEWHERE.values(), *PICTURES_ELSEWHERE.values())]
    for name in ", ".join(sources).split(", "):
        assert (ROOT / name).is_file(), name


def test_readers_find_the_page() -> None:
    """From the README, the simulator's page and the table of contents."""
    assert "(docs/throughput.md)" in TEXTS["README.md"]
    assert "(throughput.md)" in TEXTS["docs/simulator.md"]
    assert "<throughput>" in TEXTS["docs/index.md"]
