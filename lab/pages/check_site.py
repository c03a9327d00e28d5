"""Checks the built site, file by file: `python -m lab.pages.check_site out/site`.

Every link within it leads to a file and, if it names one, to a place on that page; nothing that a
page needs to be shown comes from a network; every page leads to the glossary. The network is not
asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NEEDED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
NOT_LOADED = ("canonical", "next", "prev", "index", "search", "author")  # rel of a <link>
MADE = ("genindex.html", "search.html", "py-modindex.html")  # no texts of ours


class Page(HTMLParser):
    """Ids, links and needed files of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.needed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects them."""
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in NEEDED and NEEDED[tag] in found and found.get("rel") not in NOT_LOADED:
            self.needed.append(found[NEEDED[tag]])


def check_site(folder: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    if not pages:
        yield f"{folder}: no pages"
    for path, page in sorted(pages.items()):
        name = path.relative_to(folder)
        for link in page.needed:
            if urlsplit(link).netloc:
                yield f"{name}: needs {link}"
        for link in sorted({*page.links, *page.needed}):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name}: {link} leads to no file"
            elif parts.fragment and target in pages and parts.fragment not in pages[target].ids:
                yield f"{name}: {link} leads to no place"
        if name.name not in MADE and not any("#term-" in link for link in page.links):
            yield f"{name}: no word of it leads to the glossary"


def main(folder: Path) -> int:
    """Prints what is wrong; 1 if anything is."""
    wrong = list(check_site(folder.resolve()))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
