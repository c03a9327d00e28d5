"""The page: HTML, style and modules of fa4/explore/web in one file, with the data in it.

The modules are ordinary ES modules, which a browser does not load from a disk. So each becomes a
function of its own that returns what it exports, behind those that it imports from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

FOLDER = "web"
PAGE, STYLES, ENTRY = "page.html", ("base.css", "figures.css"), "main.js"
MOST_BYTES = 4_000_000  # of the whole file

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w-]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_LEFT = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)


def read_files() -> dict[str, str]:
    """Name -> text of the files that the page is made of. Raises FileNotFoundError."""
    folder = resources.files("fa4.explore").joinpath(FOLDER)
    modules = [item.name for item in folder.iterdir() if item.name.endswith(".js")]
    names = (PAGE, *STYLES, *modules)
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}


def bundle(files: Mapping[str, str], entry: str = ENTRY) -> str:
    """The modules that `entry` needs as one script.

    Raises ValueError for an import of nothing, in a circle or in a form that is not understood.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"imports form a circle: {' -> '.join((*path, name))}")
        if name not in files:
            raise ValueError(f"{path[-1] if path else 'the page'} imports {name}, which is missing")
        if name not in order:
            for _, other in _IMPORT.findall(files[name]):
                visit(f"{other}.js", (*path, name))
            order.append(name)

    visit(entry, ())
    return "\n".join(as_function(name, files[name]) for name in order)


def as_function(name: str, text: str) -> str:
    """A module as a constant that holds its exports. Raises ValueError for other import forms."""
    exports = [found[1] for found in _EXPORT.findall(text)]
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = \2_module;", text))
    left = _LEFT.search(body)
    if left:
        raise ValueError(f"{name}: not understood: {left[0].strip()!r}")
    own = name.removesuffix(".js").replace("-", "_")
    return (
        f"// {name}\nconst {own}_module = (() => {{\n{body.strip()}\n"
        f"return {{ {', '.join(exports)} }};\n}})();\n"
    )


def build_page(data: str) -> str:
    """The whole file; `data` is what `packing.pack` gives. Raises ValueError if it is too large."""
    files = read_files()
    script = bundle(files)
    if "</script" in script.lower():
        raise ValueError("a module holds </script, which would end it")
    style = "\n".join(files[name] for name in STYLES)
    page = files[PAGE]
    for mark, content in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("DATA<!---->", data)):
        before, found, after = page.partition(mark)
        if not found:
            raise ValueError(f"page.html lacks the place for {mark}")
        page = before + content + after
    size = len(page.encode())
    if size > MOST_BYTES:
        raise ValueError(f"the page must be at most {MOST_BYTES} bytes; it has {size}")
    return page
