"""What a program is made of: the modules that it imports, and those that they import, as one hash.

A record keeps the hash of the programs that made it; another one today means that their code has
changed since. Comments, docstrings and empty lines change no result, and so no hash.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from lab.import_graph import imported, packages_of

FOLDERS = ("examples", "fa4", "lab/benchmarks", "lab/hardware", "lab/pages", "tests")
# What keeps the records decides nothing that is in them.
KEEPERS = ("__init__", "import_graph", "machine", "records", "sources", "table")
DIGITS = 16  # of a hash: one in 2^64 is taken for another


class SourceTree:
    """The modules and files of the project as they stand under a root.

    changed: module -> the text it is to have instead of its file's.
    """

    def __init__(self, root: Path, changed: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._changed = dict(changed or {})
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        shared = sorted((root / "lab").glob("*.py"))
        paths += [path for path in shared if path.stem not in KEEPERS]
        self._paths = {_module_of(path.relative_to(root)): path for path in paths}
        self._packages = packages_of(self._paths)

    def text(self, module: str) -> str:
        """Source text of a module. Raises ValueError for a name that is none."""
        if module not in self._paths:
            raise ValueError(f"no module {module!r} in {', '.join(FOLDERS)}")
        return self._changed.get(module) or self._paths[module].read_text("utf-8")

    def closure(self, modules: Iterable[str]) -> dict[str, str]:
        """These modules and all that they import, directly or by others: name -> text."""
        found: dict[str, str] = {}
        left = list(modules)
        while left:
            module = left.pop()
            if module not in found:
                found[module] = self.text(module)
                left += imported(module, found[module], self._paths, self._packages)
        return found

    def fingerprint(self, modules: Iterable[str]) -> str:
        """Hash of the closure of modules. Raises ValueError for a name that is no module."""
        found = self.closure(modules)
        return digest(f"{name}\n{essence(found[name])}" for name in sorted(found))


def hash_bytes(content: bytes) -> str:
    """The first digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def digest(texts: Iterable[str]) -> str:
    """One hash of texts in their order."""
    return hash_bytes("\0".join(texts).encode())


@cache
def essence(text: str) -> str:
    """A program without comments, docstrings and empty lines."""
    tree = ast.parse(text)
    documented = set(_docstrings(tree))
    inside = {  # of a string over several lines, which may have empty ones
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    kept = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line[: comments[number]].rstrip() if number in comments else line
        if number not in documented and (number in inside or code.strip()):
            kept.append(code)
    return "\n".join(kept)


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Numbers of the lines that hold nothing but a docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        first, following = node.body[0], node.body[1:]
        header = isinstance(node, ast.Module) or first.lineno > node.lineno
        last = first.end_lineno or first.lineno
        if header and not any(other.lineno <= last for other in following):
            yield from range(first.lineno, last + 1)


def _module_of(path: Path) -> str:
    return ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).parts)
