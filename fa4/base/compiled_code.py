"""What numba compiles is compiled once: kept on disk, thrown away when stale, and not in silence.

numba keeps compiled code beside its sources or, where they cannot be written, in the user's cache
folder ($NUMBA_CACHE_DIR chooses another). It looks at the file of a function only, not at those
whose constants, record layouts and helpers it was compiled with; and compiled code finds its
records by address.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

COMPILING = "first use: compiling for this machine takes up to half a minute"
EVERY_TIME = "every time: no folder to keep it in can be written"

_announcing = False
_folders: list[Any] = []  # temporary ones, removed when the process ends


def announce() -> None:
    """From now on, tell on stderr when something is compiled: once, and only if it is."""
    global _announcing
    _announcing = True


def prepare(sources: Sequence[Path]) -> None:
    """To be called before the first function of `sources` is declared, whose code they share.

    Removes what was kept of older sources. Where nothing can be kept, code is compiled anew in
    every process.
    """
    import numba

    drop_stale(sources)
    if not _can_keep(sources[0]):
        _folders.append(tempfile.TemporaryDirectory(prefix="fa4-", ignore_cleanup_errors=True))
        setattr(numba.config, "CACHE_DIR", _folders[-1].name)  # noqa: B010, set on first import
    _listen()


def drop_stale(sources: Iterable[Path]) -> int:
    """Remove what numba kept beside `sources` from before the newest; returns how many files.

    Folders that cannot be written are left as they are.
    """
    paths = list(sources)
    kept = [
        path
        for folder in {path.parent for path in paths}
        for path in (folder / "__pycache__").glob("*.nb[ic]")
    ]
    newest = max(_written(path) for path in paths)
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


def _can_keep(source: Path) -> bool:
    """Does numba find a folder for the code of functions in `source`?"""
    import numba

    def trial() -> None:
        """A function of that file, as far as numba can tell."""

    trial.__code__ = trial.__code__.replace(co_filename=str(source))
    try:
        numba.njit(cache=True)(trial)
    except RuntimeError:  # "no locator available": no folder can be written
        return False
    return True


@cache
def _listen() -> None:
    """Hear when numba compiles a function that it has not kept."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            global _announcing
            if _announcing:
                _announcing = False
                kept = (
                    "" if not _folders else ", every time: no folder to keep it in can be written"
                )
                print(f"fa4: {COMPILING}{kept}", file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            """Nothing to say."""

    event.register("numba:compile", Listener())
