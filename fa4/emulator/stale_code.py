"""Compiled code that numba kept from older sources is thrown away before it is used.

numba looks at the file of a function only, not at those whose record layouts and helpers it was
compiled with; and compiled code finds its records by address.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PACKAGES = ("checks", "machine")  # that compile with numba, from each other's files
SHARED = ("layout.py",)


def drop_stale(root: Path) -> int:
    """Remove what numba kept before the newest source was written; returns how many files.

    root: the folder of fa4.emulator. Folders that cannot be written are left as they are.
    """
    sources = [root / name for name in SHARED]
    kept: list[Path] = []
    for package in PACKAGES:
        sources += (root / package).glob("*.py")
        kept += (root / package / "__pycache__").glob("*.nb[ic]")
    newest = max(_written(path) for path in sources)
    dropped = 0
    for path in kept:
        if _written(path) < newest:
            with suppress(OSError):
                path.unlink()
                dropped += 1
    return dropped


def _written(path: Path) -> int:
    """When, in nanoseconds; 0 if another process has just removed it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
