"""The numbers that sentences of the pages say, each behind a marker that names its claim here.

`python -m lab.pages.claims` evaluates them and writes them into README.md, the page of what was
confirmed on hardware and the pages under docs/ (`lab/pages/marked_tables.py` has the form of a
marker). A claim called "file: what" is read from the record of that name, any other is computed by
the code. The tests hold the pages to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab import ROOT
from lab.pages import DOCS
from lab.pages.computed_claims import COMPUTED
from lab.pages.marked_tables import SIGN, MarkedNumbers
from lab.pages.recorded_claims import RECORDED

CLAIMS = MarkedNumbers({**COMPUTED, **RECORDED})


def pages() -> Iterator[Path]:
    """README.md, that of the records of GPUs, and every page under docs/."""
    yield ROOT / "README.md"
    yield ROOT / "lab/hardware/README.md"
    yield from sorted(DOCS.rglob("*.md"))


def main() -> None:
    """Writes the present numbers into all pages."""
    for page in pages():
        text = page.read_text("utf-8")
        if SIGN in text:
            page.write_text(CLAIMS.fill(text), encoding="utf-8")


if __name__ == "__main__":
    main()
