"""Writes docs/pictures/explorer.png: the explorer's page in a browser, at one moment of a step.

    python -m lab.pages.explorer_picture [FILE]

Needs chromium and the extra `web`. The page is that of `fa4 explore --quick`; what it shows is
predicted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fa4.explore.controls import controls
from fa4.explore.packing import pack
from fa4.explore.page import build_page
from fa4.explore.recording import record_grid
from fa4.explore.verdicts import read_verdicts
from lab import ROOT
from lab.pages.browser import find_browser, open_tab

PICTURE = ROOT / "docs/pictures/explorer.png"
SIZE = 1200, 860
EVENTS = 25  # from the first one on: as many presses of the key for the next


def take_picture(out: Path) -> None:
    """The page as it opens, the cursor some events into the step."""
    from playwright.sync_api import sync_playwright

    page = build_page(pack(record_grid(controls(quick=True), lambda: None), read_verdicts()))
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "explore.html"
        file.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=find_browser(), args=options)
        tab = open_tab(browser, file, width=SIZE[0], color_scheme="light")
        tab.page.set_viewport_size({"width": SIZE[0], "height": SIZE[1]})
        tab.page.wait_for_selector("html[data-ready=yes]", state="attached")
        for _ in range(EVENTS):
            tab.page.keyboard.press("ArrowRight")
        tab.page.screenshot(path=out)
        browser.close()


def main(arguments: Sequence[str]) -> None:
    """Writes the picture, or FILE in its place."""
    out = Path(arguments[0]).resolve() if arguments else PICTURE
    take_picture(out)
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main(sys.argv[1:])
