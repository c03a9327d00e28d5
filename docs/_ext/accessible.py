"""What screen readers and keyboards need, and the theme leaves out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MENDED = (
    (r'<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    (
        r"<pre>",
        '<pre tabindex="0">',
    ),  # may be wider than the page, and then scrolls: so does a table
    (r'<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (
        r'<aside class="toc-drawer( no-toc)?">',
        r'<aside class="toc-drawer\1" aria-label="On this page">',
    ),
    (r'<th class="head"><p></p></th>', "<td></td>"),
)


def mend(html: str) -> str:
    """The page with what is missing."""
    for found, better in MENDED:
        html = re.sub(found, better, html)
    return html


def finish(app: Any, failure: Exception | None) -> None:
    """For Sphinx, which has written all pages."""
    if failure is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            html = page.read_text(encoding="utf-8")
            if mend(html) != html:
                page.write_text(mend(html), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
