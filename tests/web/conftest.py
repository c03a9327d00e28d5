"""A browser with the explorer's page in it. Without a browser these tests fail: none is skipped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fa4.explore.controls import controls
from fa4.explore.packing import pack, unpack
from fa4.explore.page import build_page
from fa4.explore.recording import record_grid
from fa4.explore.verdicts import read_verdicts

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PICTURES = Path(__file__).parents[2] / "out" / "web"  # screenshots, to be looked at
WIDE, NARROW = 1440, 390
MILLISECONDS = 30_000


@dataclass(frozen=True)
class Explorer:
    """The page's file, and the data that is in it."""

    file: Path
    head: dict[str, Any]
    columns: dict[str, Any]


@dataclass
class Tab:
    """An open page, and what it said and asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of the first element."""
        found: str = self.page.locator(selector).first.inner_text()
        return found

    @property
    def tflops(self) -> float | None:
        """The first prediction that is shown, None if there is none."""
        shown = self.page.locator("[data-tflops]")
        return float(shown.first.get_attribute("data-tflops")) if shown.count() else None

    @property
    def picture(self) -> str:
        """The timeline as it is drawn, without its cursor."""
        found: str = self.page.evaluate(
            "[...document.querySelectorAll('#timeline svg > :not(.cursor)')]"
            ".map((one) => one.outerHTML).join('')"
        )
        return found

    def until(self, condition: str) -> None:
        """Wait until a condition in JavaScript holds, which the page may not evaluate by itself."""
        for _ in range(MILLISECONDS // 50):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never became true: {condition}")

    def choose(self, key: str, choice: str) -> None:
        """Pick a position of a control."""
        self.page.locator(f"label[for='{key}-{choice}']").click()


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


def find_browser() -> str:
    """The browser's program; fails where there is none."""
    named = os.environ.get("FA4_BROWSER")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None or not Path(found).exists():
        pytest.fail(
            f"no browser: {named or 'none of ' + ', '.join(BROWSERS)} is there; "
            "apt-get install chromium, or name one with FA4_BROWSER"
        )
    return found


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


def open_tab(
    browser: Any, file: Path, fragment: str = "", *, width: int = WIDE, **options: Any
) -> Tab:
    """The file in a page of its own, which notes what it says and asks for."""
    tab = Tab(browser.new_page(viewport={"width": width, "height": 950}, **options))
    tab.page.set_default_timeout(MILLISECONDS)
    tab.page.on("console", lambda said: tab.problems.append(f"{said.type}: {said.text}"))
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on("request", lambda asked: tab.requests.append(asked.url))
    tab.page.goto(f"{file.as_uri()}#{fragment}")
    return tab


def what_is_wrong(tab: Tab, file: Path) -> list[str]:
    """What the page said on its console, and what it asked for but itself."""
    asked = {url.partition("#")[0] for url in tab.requests} - {"data:,", file.as_uri()}
    return tab.problems + sorted(asked)


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checker, axe-core, as a script."""
    return files("axe_playwright_python").joinpath("axe.min.js").read_text()
