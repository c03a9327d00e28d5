"""Writes docs/pictures/report.png: the head of an HTML report of `fa4 verify`, in a browser.

    python -m lab.pages.report_picture [FILE]

Needs chromium. The function under test is right but for three planted faults, the first look at
every property is what it is shown; the file is what `--html` writes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fa4.testing import load_backend, verify
from fa4.testing.html_report import html_report
from lab import ROOT
from lab.pages.browser import find_browser
from tests.testing.planted import FAULTS
from tests.testing.test_causes import joined

PICTURE = ROOT / "docs/pictures/report.png"
SIZE = 1000, 1100
NAMES = ("softcap_lost_with_window", "dk_causal_gqa", "page_table_row_of_first")


def make_page() -> str:
    """The report of a function with the faults, as a page."""
    backend = load_backend(joined([FAULTS[name] for name in NAMES]))
    backend = replace(backend, name="mypkg.module:attention", importable=False)
    return html_report(verify(backend, quick=True).as_dict())


def take_picture(out: Path) -> None:
    """The page as it opens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(make_page(), encoding="utf-8")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        width, height = SIZE
        subprocess.run(
            [find_browser(), "--headless", *root, "--hide-scrollbars", f"--screenshot={out}",
             f"--window-size={width},{height}", f"--user-data-dir={folder}/user", file.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Writes the picture, or FILE in its place."""
    out = Path(arguments[0]).resolve() if arguments else PICTURE
    take_picture(out)
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main(sys.argv[1:])
