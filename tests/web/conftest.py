"""A browser with the explorer's page in it. Without a browser these tests fail: none is skipped."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fa4.explore.controls import controls
from fa4.explore.packing import pack, unpack
from fa4.explore.page import build_page
from fa4.explore.recording import record_grid
from fa4.explore.verdicts import read_verdicts
from lab.pages.browser import Tab, find_browser, open_tab

PICTURES = Path(__file__).parents[2] / "out" / "web"  # screenshots, to be looked at
WIDE, NARROW = 1440, 390


@dataclass(frozen=True)
class Explorer:
    """The page's file, and the data that is in it."""

    file: Path
    head: dict[str, Any]
    columns: dict[str, Any]


Open = Callable[..., Tab]


@pytest.fixture(scope="session")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    """The small page, or the one that FA4_PAGE names, as `fa4 explore` wrote it."""
    if "FA4_PAGE" in os.environ:
        written = Path(os.environ["FA4_PAGE"]).resolve()
        found = re.search(r'id="data">([^<]+)<', written.read_text())
        assert found, f"{written} holds no data"
        return Explorer(written, *unpack(found[1]))
    text = pack(record_grid(controls(quick=True), lambda: None), read_verdicts())
    file = tmp_path_factory.mktemp("page") / "explore.html"
    file.write_text(build_page(text))
    return Explorer(file, *unpack(text))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = find_browser()
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with one
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=options)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, explorer: Explorer) -> Iterator[Open]:
    """A function that opens the page; nothing may go wrong in it, or be asked for by it."""
    tabs: list[Tab] = []

    def show(fragment: str = "", width: int = WIDE, **options: Any) -> Tab:
        tabs.append(open_tab(browser, explorer.file, fragment, width=width, **options))
        tabs[-1].page.wait_for_selector("html[data-ready=yes]", state="attached")
        return tabs[-1]

    yield show
    for tab in tabs:
        tab.page.close()
        assert what_is_wrong(tab, explorer.file) == []


def what_is_wrong(tab: Tab, file: Path) -> list[str]:
    """What the page said on its console, and what it asked for but itself."""
    asked = {url.partition("#")[0] for url in tab.requests} - {"data:,", file.as_uri()}
    return tab.problems + sorted(asked)


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checker, axe-core, as a script."""
    return files("axe_playwright_python").joinpath("axe.min.js").read_text()
