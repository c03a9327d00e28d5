"""The explorer is shown where a reader begins, by a picture that a script takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.pages.explorer_picture import PICTURE, SIZE

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 300_000


def size_of(content: bytes) -> tuple[int, int]:
    """Width and height of a PNG, by its header. ValueError for anything else."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or content[12:16] != b"IHDR":
        raise ValueError("no PNG")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_the_picture_is_small_and_whole() -> None:
    """As the script takes it; if not: make picture."""
    content = PICTURE.read_bytes()
    assert size_of(content) == SIZE and len(content) <= MOST_BYTES
    assert content.endswith(b"IEND\xaeB`\x82")
    with pytest.raises(ValueError, match="no PNG"):
        size_of(b"<svg>")


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/explore.md"])
def test_a_page_shows_it(name: str) -> None:
    """With words in place of the picture, and the command that writes the page."""
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    before, link, _ = text.partition("pictures/explorer.png)")
    assert link and "fa4 explore" in before
    alt, _, target = before[before.rindex("![") + 2 :].partition("](")
    assert len(alt) > 40 and (page.parent / f"{target}pictures/explorer.png").resolve() == PICTURE


def test_the_start_page_names_it() -> None:
    """In the path of somebody who has just installed it."""
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    assert "\nfa4 explore --quick --open\n" in text and "](explore.md)" in text
