"""Who imports whom among the modules of a package, and where that leads round in a circle.

Read from the source text: imports under `if TYPE_CHECKING` and inside functions count as all
others do. That importing a module first imports the packages it lies in does not count. In a folder
without __init__.py, whose files are run as scripts, `import other` is the file beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
    return {
        module: {
            name
            for written in _imports(module, text, sources)
            for name in (written, _beside(module, written, sources))
            if name in sources
        }
        - {module}
        for module, text in sources.items()
    }


def _beside(module: str, written: str, sources: Mapping[str, str]) -> str:
    """What a script imports by this name from its own folder, "" if that is a package."""
    folder = _parent(module)
    return "" if folder in sources else f"{folder}.{written}"


def _imports(module: str, text: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Modules that a text may import, as they are named there."""
    inside = module if any(name.startswith(f"{module}.") for name in sources) else _parent(module)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = inside
                for _ in range(node.level - 1):
                    above = _parent(above)
                base = f"{above}.{base}".strip(".")
            inner = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in sources)
            if any(name not in sources for name in inner):
                yield base
        elif isinstance(node, ast.Call):
            yield from _named(node)


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
    reached = {module: _reach(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in reach if module in reached[other]))
        for module, reach in reached.items()
        if module in reach
    }
    return sorted(map(list, found))


def _reach(graph: Graph, start: str) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += graph[module]
    return seen
