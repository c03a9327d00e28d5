"""The verdicts of a search, a JSON line each, from which an interrupted search goes on.

The first line says what was searched: problem, machine, model. Lines are written whole and flushed
one by one; a last line without its end is what an interruption left, and is dropped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fa4.base.files import read_bytes
from fa4.search.judge import Verdict, plain_settings

MOST_BYTES = 1 << 30


class Journal:
    """The verdicts in the file at `path`, which is made if there is none.

    about: what is searched. Raises ValueError, and leaves the file as it is, if it holds anything
    else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.known: dict[str, Verdict] = {}
        header = json.dumps({"search": dict(about)}, sort_keys=True)
        content = read_bytes(path, MOST_BYTES) if path.exists() else b""
        kept = content[: content.rfind(b"\n") + 1]
        if content and not kept:
            raise ValueError(f"{path} is not the journal of a search; choose another file")
        lines = kept.decode("utf-8", errors="replace").splitlines()
        if lines:
            _same_search(path, lines[0], header)
        for number, line in enumerate(lines[1:], 2):
            key, verdict = _read(path, number, line)
            self.known[key] = verdict
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("r+" if content else "w", encoding="utf-8")
        self._file.truncate(len(kept))
        self._file.seek(0, io.SEEK_END)
        if not lines:
            self._write(header)

    def verdict(self, settings: Mapping[str, Any]) -> Verdict | None:
        """Of a design that was judged before; None of another."""
        return self.known.get(_key(settings))

    def add(self, settings: Mapping[str, Any], verdict: Verdict) -> None:
        """Append the verdict of a design."""
        self._write(json.dumps({"design": plain_settings(settings), **asdict(verdict)}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:  # of a full disk, which does not say where
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _read(path: Path, number: int, line: str) -> tuple[str, Verdict]:
    try:
        row = json.loads(line)
        return _key(row.pop("design")), Verdict(**row)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} line {number} is no verdict: {error}") from error


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(plain_settings(settings), sort_keys=True)


def _same_search(path: Path, line: str, header: str) -> None:
    """Refuse the journal of another search, with what differs."""
    try:
        found, wanted = json.loads(line)["search"], json.loads(header)["search"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the journal of a search; choose another file") from error
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} holds another search: {name} {found.get(name)}, this one has "
                f"{wanted.get(name)}; choose another file"
            )
