"""What the site makes of docstrings and links, before Sphinx reads them."""

from __future__ import annotations

from pathlib import Path

from docs._ext.files import rewrite
from docs._ext.plain_docstrings import to_rst

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
