"""A browser for pictures of the pages, and for the tests of what is in them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MILLISECONDS = 30_000


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


def find_browser() -> str:
    """The browser's program. Raises FileNotFoundError where there is none."""
    named = os.environ.get("FA4_BROWSER")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None or not Path(found).exists():
        wanted = f"{named} is not there" if named else f"none of {', '.join(BROWSERS)} is there"
        raise FileNotFoundError(
            f"no browser: {wanted}; apt-get install chromium, or name one with FA4_BROWSER"
        )
    return found


def open_tab(browser: Any, file: Path, fragment: str = "", *, width: int, **options: Any) -> Tab:
    """The file in a page of its own, which notes what it says and asks for."""
    tab = Tab(browser.new_page(viewport={"width": width, "height": 950}, **options))
    tab.page.set_default_timeout(MILLISECONDS)
    tab.page.on("console", lambda said: tab.problems.append(f"{said.type}: {said.text}"))
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on("request", lambda asked: tab.requests.append(asked.url))
    tab.page.goto(f"{file.as_uri()}#{fragment}")
    return tab
