"""What the site makes of docstrings and links, before Sphinx reads them."""

from __future__ import annotations

from pathlib import Path

from docs._ext.accessible import mend
from docs._ext.files import rewrite
from docs._ext.plain_docstrings import to_rst
from docs._ext.scripts import PAGES, script

DOCSTRING = """One line with `code`, a * b | c_ and *args.

Args:
    q, k: (B, Sq, Hq, d) arrays, which
        go on here.
    impl: `auto` or *another*.

Returns:
    out as q: in its type.

- first
- second
  of two

    from fa4 import masks  # *as it is*
"""


def test_docstrings_mean_what_they_say() -> None:
    """Nothing but code and lists is markup; sections become lists."""
    lines = to_rst(DOCSTRING.splitlines())
    text = "\n".join(lines)
    assert lines[0] == r"One line with `code`, a \* b \| c\_ and \*args."
    assert "**Args**\n\n- ``q, k``: (B, Sq, Hq, d) arrays, which go on here.\n" in text
    assert "- ``impl``: `auto` or \\*another\\*.\n" in text
    assert "**Returns**\n\n- out as q: in its type.\n" in text
    assert "- first\n- second\n  of two\n" in text
    assert ".. code-block:: text\n\n        from fa4 import masks  # *as it is*" in text


def test_links_to_what_is_no_page(tmp_path: Path) -> None:
    """A folder is named, a Markdown file from outside is a file, the rest is left to MyST."""
    docs = tmp_path / "docs"
    (tmp_path / "fa4").mkdir()
    docs.mkdir()
    for name in ("fa4/a.py", "README.md", "docs/page.md"):
        (tmp_path / name).write_text("")
    text = "[the code](../fa4) [`a.py`](../fa4/a.py) [readme](../README.md) [page](./page.md#x)"
    assert rewrite(text, docs, docs) == (
        "the code [`a.py`](../fa4/a.py) {download}`readme <../README.md>` [page](./page.md#x)"
    )


def test_the_programs_of_a_page_are_one() -> None:
    """In order, without what they print; a file of its own for each chapter."""
    text = "# Title\n\n```python\na = 1\n```\n\n```output\nx\n```\n\n```python\n\nb = a\n```\n"
    assert script("ladder/01-x", text) == (
        '"""Title: the programs of the page, in one file."""\n\na = 1\n\nb = a\n'
    )
    assert PAGES.fullmatch("ladder/10-balance") and PAGES.fullmatch("tile")
    assert not PAGES.fullmatch("ladder/index") and not PAGES.fullmatch("start")


def test_pages_are_mended_once() -> None:
    """What scrolls can be reached by keyboard, headings have a level, landmarks a name."""
    html = (
        '<p class="caption" role="heading">Begin</p><pre>code</pre>'
        '<aside class="sidebar-drawer"></aside><aside class="toc-drawer no-toc"></aside>'
    )
    better = mend(html)
    assert better == (
        '<p class="caption" role="heading" aria-level="2">Begin</p><pre tabindex="0">code</pre>'
        '<aside class="sidebar-drawer" aria-label="All pages"></aside>'
        '<aside class="toc-drawer no-toc" aria-label="On this page"></aside>'
    )
    assert mend(better) == better
