"""Who imports whom among the modules of a package, and where that leads round in a circle.

Read from the source text: imports under `if TYPE_CHECKING` and inside functions count as all
others do. That importing a module first imports the packages it lies in does not count. In a folder
without __init__.py, whose files are run as scripts, `import other` is the file beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

Graph = dict[str, set[str]]


def package_sources(root: Path, package: str) -> dict[str, str]:
    """Module -> source text, of all modules of a dotted package (or of the module itself)."""
    place = root / package.replace(".", "/")
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return {_module_of(path.relative_to(root)): path.read_text("utf-8") for path in paths}


def _module_of(path: Path) -> str:
    return ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).parts)


def import_graph(sources: Mapping[str, str]) -> Graph:
    """Each of these modules, and those of them that it imports."""
    packages = packages_of(sources)
    return {module: imported(module, text, sources, packages) for module, text in sources.items()}


def packages_of(modules: Collection[str]) -> set[str]:
    """Those in which others lie."""
    return {module for module in map(_parent, modules) if module in modules}


def imported(
    module: str, text: str, modules: Collection[str], packages: Collection[str]
) -> set[str]:
    """Those of the modules that a text of this name imports."""
    inside = module if module in packages else _parent(module)
    return {
        name
        for base, inner in _imports(inside, text)
        for written in _names(base, inner, modules)
        for name in (written, _beside(module, written, modules))
        if name in modules
    } - {module}


def _beside(module: str, written: str, modules: Collection[str]) -> str:
    """What a script imports by this name from its own folder, "" if that is a package."""
    folder = _parent(module)
    return "" if folder in modules else f"{folder}.{written}"


def _names(base: str, inner: Collection[str], modules: Collection[str]) -> list[str]:
    """Modules that `from base import inner` imports; without `inner`, `import base`."""
    found = [name for name in inner if name in modules]
    return found if inner and len(found) == len(inner) else [*found, base]


@cache
def _imports(inside: str, text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a text in this package imports: (base, full names of what is taken from it)."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = inside
                for _ in range(node.level - 1):
                    above = _parent(above)
                base = f"{above}.{base}".strip(".")
            found.append((base, tuple(f"{base}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Call):
            found += [(name, ()) for name in _named(node)]
    return tuple(found)


def _named(call: ast.Call) -> Iterator[str]:
    """The module that import_module("...") imports; none for other calls."""
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if function in ("import_module", "__import__") and call.args:
        name = getattr(call.args[0], "value", None)
        yield from [name] if isinstance(name, str) else []


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def circles(graph: Graph) -> list[list[str]]:
    """The groups of modules that import one another, directly or by others; each one sorted."""
    reached = {module: reach(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in reach if module in reached[other]))
        for module, reach in reached.items()
        if module in reach
    }
    return sorted(map(list, found))


def reach(graph: Graph, start: str) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    return seen
