"""The page: HTML, style and modules of fa4/explore/web in one file, with the data in it.

The modules are ordinary ES modules, which a browser does not load from a disk; so they are put into
one, in an order in which each stands behind those that it imports from. Nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

FOLDER = "web"
ENTRY = "main.js"
MOST_BYTES = 4_000_000  # of the whole file

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)
_DEFINED = re.compile(
    r"^(?:async )?(?:function\*?|const|let|class) (\w+)|^(?:const|let) \{([^}]*)\}", re.MULTILINE
)
_LEFT = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)


def read_files() -> dict[str, str]:
    """Name -> text of the files that the page is made of."""
    folder = resources.files("fa4.explore").joinpath(FOLDER)
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith((".js", ".css", ".html"))
    }


def bundle(files: Mapping[str, str], entry: str = ENTRY) -> str:
    """The modules that `entry` needs as one script.

    Raises ValueError for an import of nothing, in a circle or in another form, or a name that two
    modules define.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"imports form a circle: {' -> '.join((*path, name))}")
        if name not in files:
            raise ValueError(f"{path[-1] if path else 'the page'} imports {name}, which is missing")
        if name not in order:
            for other in _IMPORT.findall(files[name]):
                visit(other, (*path, name))
            order.append(name)

    visit(entry, ())
    owners: dict[str, str] = {}
    parts = []
    for name in order:
        text = _EXPORT.sub("", _IMPORT.sub("", files[name]))
        left = _LEFT.search(text)
        if left:
            raise ValueError(f"{name}: not understood: {left[0].strip()!r}")
        for single, several in _DEFINED.findall(text):
            for defined in [single] if single else re.findall(r"\w+", several):
                if owners.setdefault(defined, name) != name:
                    raise ValueError(f"{defined} is defined in {owners[defined]} and in {name}")
        parts.append(f"// {name}\n{text.strip()}\n")
    return "\n".join(parts)


def build_page(data: str) -> str:
    """The whole file; `data` is what `packing.pack` gives. Raises ValueError if it is too large."""
    files = read_files()
    script = bundle(files)
    if "</script" in script.lower():
        raise ValueError("a module holds </script, which would end it")
    style = "\n".join(files[name] for name in sorted(files) if name.endswith(".css"))
    page = files["page.html"]
    for mark, content in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("DATA<!---->", data)):
        before, found, after = page.partition(mark)
        if not found:
            raise ValueError(f"page.html lacks the place for {mark}")
        page = before + content + after
    size = len(page.encode())
    if size > MOST_BYTES:
        raise ValueError(f"the page must be at most {MOST_BYTES} bytes; it has {size}")
    return page
