"""Machine code that is kept between processes, where FA4_EMULATOR_CACHE_DIR names a folder.

One SQLite file holds object files, and which functions each of them has. A function's name tells
its LLVM text; `target` tells the CPU and the compiler. Whatever is wrong with the file costs time,
never a result. Code from it is executed: the folder should be writable only for people you trust.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "FA4_EMULATOR_CACHE_DIR"
FILE = "machine_code.sqlite"
MOST_BYTES = 1 << 30  # beyond which a file is begun anew
WAIT_S = 20.0  # for another process that writes
ASKED_AT_ONCE = 500  # of SQLite's 999 parameters

_TABLES = """
CREATE TABLE IF NOT EXISTS objects (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS functions (
  name TEXT, target TEXT, object INTEGER NOT NULL, PRIMARY KEY (name, target)
) WITHOUT ROWID;
"""


def kept_objects(names: Sequence[str], target: str) -> list[tuple[bytes, list[str]]]:
    """Object files that have some of the functions, each with those that it is asked for."""
    found: dict[int, list[str]] = {}
    objects: list[tuple[bytes, list[str]]] = []
    with _used(bool(names)) as file:
        for first in range(0, len(names) if file else 0, ASKED_AT_ONCE):
            some = names[first : first + ASKED_AT_ONCE]
            places = ", ".join("?" * len(some))
            query = f"SELECT name, object FROM functions WHERE target = ? AND name IN ({places})"
            for name, number in file.execute(query, (target, *some)):
                found.setdefault(number, []).append(name)
        for number, mine in found.items():
            (data,) = file.execute("SELECT data FROM objects WHERE id = ?", (number,)).fetchone()
            objects.append((zlib.decompress(data), mine))
    return objects


def keep(data: bytes, names: Iterable[str], target: str) -> None:
    """Keeps an object file that has these functions."""
    with _used() as file:
        if file:
            with file:  # all of it or nothing
                packed = zlib.compress(data, 1)
                number = file.execute("INSERT INTO objects (data) VALUES (?)", (packed,)).lastrowid
                rows = ((name, target, number) for name in names)
                file.executemany("INSERT OR REPLACE INTO functions VALUES (?, ?, ?)", rows)


@contextmanager
def _used(wanted: bool = True) -> Iterator[Any]:
    """The file that the environment asks for, or None. What is wrong with it ends the block and no
    more; what is no such file is removed."""
    folder = os.environ.get(VARIABLE, "")
    if not (folder and wanted):
        yield None
        return
    path, file = Path(folder) / FILE, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink(missing_ok=True)
        file = sqlite3.connect(path, timeout=WAIT_S)
        file.executescript(_TABLES)
    except (OSError, sqlite3.Error) as error:
        _give_up(file, path, error)
        yield None
        return
    try:
        yield file
    except (sqlite3.Error, zlib.error, TypeError) as error:
        _give_up(file, path, error)
    finally:
        file.close()


def _give_up(file: sqlite3.Connection | None, path: Path, error: Exception) -> None:
    """Closes it; removes what cannot be read, but not what another process uses just now."""
    if file:
        file.close()
    if not isinstance(error, (OSError, sqlite3.OperationalError)):
        path.unlink(missing_ok=True)
