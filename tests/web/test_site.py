"""The site of `make docs` in a browser, from the disk: every page opens, and the search finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.pages.browser import Tab, open_tab
from tests.web.conftest import NARROW, WIDE

pytestmark = [pytest.mark.web, pytest.mark.timeout(600)]

SITE = Path(__file__).parents[2] / "out" / "site"
# One page of each kind: text, wide tables, a picture, code beside what it prints, generated.
KINDS = ("index", "glossary", "hopper", "tile", "ladder/06-barriers", "symptoms", "commands")
WORDS = ("CTA", "tensor-memory", "MUFU", "TMA", "mbarrier", "LPT", "signal-name")


@pytest.fixture(scope="module")
def pages() -> list[Path]:
    found = sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)
    assert len(found) > 30, f"no site in {SITE}; make docs builds it"
    return found


@pytest.fixture
def tabs(browser: Any) -> Iterator[list[Tab]]:
    opened: list[Tab] = []
    yield opened
    for tab in opened:
        tab.page.close()


def elsewhere(tab: Tab) -> list[str]:
    """What a page said, and asked for that is no file of the disk."""
    return tab.problems + [url for url in tab.requests if not url.startswith(("file:", "data:"))]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_page_opens_from_the_disk(
    width: int, pages: list[Path], browser: Any, tabs: list[Tab]
) -> None:
    """Nothing is asked of a network, nothing goes wrong, nothing is wider than the window."""
    tabs.append(tab := open_tab(browser, pages[0], width=width))
    wrong = []
    for page in pages:
        tab.page.goto(page.as_uri())
        assert tab.page.locator("article").count() == 1, page
        if tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0:
            wrong.append(page.name)
    assert wrong == [] == elsewhere(tab)


def test_a_page_that_is_too_wide_is_noticed(tmp_path: Path, browser: Any, tabs: list[Tab]) -> None:
    file = tmp_path / "page.html"
    file.write_text("<h1>x</h1><p style='width: 2000px'>planted</p>")
    tabs.append(tab := open_tab(browser, file, width=NARROW))
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0


@pytest.mark.parametrize(
    ("asked", "leads_to"),
    [
        ("mbarrier", "glossary.html"),
        ("rescaling", "03-rescaling.html"),
        ("explorer", "explore.html"),
    ],
)
def test_the_search_finds(
    asked: str, leads_to: str, pages: list[Path], browser: Any, tabs: list[Tab]
) -> None:
    assert SITE / "index.html" in pages
    tabs.append(tab := open_tab(browser, SITE / "index.html", width=WIDE))
    box = tab.page.locator("input[name=q]").first
    box.fill(asked)
    box.press("Enter")
    # The page appends its results one after the other: the first of them is not all of them.
    tab.page.locator(f"#search-results li a[href*='{leads_to}']").first.wait_for()
    assert elsewhere(tab) == []


def test_the_words_have_places_in_the_glossary(
    pages: list[Path], browser: Any, tabs: list[Tab]
) -> None:
    tabs.append(tab := open_tab(browser, SITE / "glossary.html", width=WIDE))
    for word in WORDS:
        assert tab.page.locator(f"[id='term-{word}' i]").count() == 1, word


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(
    name: str, scheme: str, pages: list[Path], browser: Any, tabs: list[Tab], axe: str
) -> None:
    """axe finds nothing serious."""
    assert SITE / f"{name}.html" in pages
    tabs.append(tab := open_tab(browser, SITE / f"{name}.html", width=WIDE, color_scheme=scheme))
    tab.page.evaluate(axe)
    # It would read the style sheets as files again, which a browser does not allow.
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    serious = [
        (one["id"], [node["html"][:120] for node in one["nodes"]][:3])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
