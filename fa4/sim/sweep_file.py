"""A sweep's rows in a CSV file that can be continued after an interruption.

Every row names the sweep it belongs to (a digest of axes, values, model and machines), so that rows
of another sweep are never taken for its own. Rows are written whole and flushed one by one; a last
line without its end is what an interruption left, and is dropped.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import IO, Any

from fa4.base.files import read_bytes
from fa4.sim.sweep import RESULTS, SCHEMA_VERSION, Row, Sweep

MOST_BYTES = 1 << 30  # a million rows are a few hundred bytes each


class SweepFile:
    """Rows of `sweep` in the CSV file at `path`; `rows` holds those that were there already.

    Raises ValueError, and leaves the file as it is, if it holds something else.
    """

    def __init__(self, path: Path, sweep: Sweep) -> None:
        self.sweep, self.digest = sweep, sweep.digest
        self.rows: dict[int, Row] = {}
        self.path = path
        content = read_bytes(path, MOST_BYTES) if path.exists() else b""
        kept = content[: content.rfind(b"\n") + 1]
        header = csv_line(list(sweep.columns))
        unfinished = content[len(kept) :]
        if not kept and not header.encode().startswith(unfinished):
            raise ValueError(f"{path} is not the CSV file of a sweep; choose another file")
        if kept:
            self._read(path, kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("r+" if content else "w", encoding="utf-8", newline="")
        self._file.truncate(len(kept))
        self._file.seek(0, io.SEEK_END)
        if not kept:
            self._write(header)

    def _read(self, path: Path, content: bytes) -> None:
        """Fill `rows` from whole lines."""
        try:
            lines = list(csv.reader(io.StringIO(content.decode("utf-8"), newline="")))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not the CSV file of a sweep: {error}") from error
        columns = list(self.sweep.columns)
        if lines[0] != columns:
            raise ValueError(f"{path} holds another sweep: {difference(lines[0], columns)}")
        for number, line in enumerate(lines[1:], 2):
            if len(line) != len(columns):
                raise ValueError(
                    f"{path} line {number} must have {len(columns)} values; got {len(line)}"
                )
            row = dict(zip(columns, line, strict=True))
            if (row["schema_version"], row["sweep"]) != (str(SCHEMA_VERSION), self.digest):
                raise ValueError(
                    f"{path} holds another sweep (line {number}: {row['sweep']}, this one is "
                    f"{self.digest}): other values, another version of fa4 or another machine; "
                    "choose another file"
                )
            self.rows[self._point(path, number, row)] = read_results(row)

    def _point(self, path: Path, number: int, row: dict[str, str]) -> int:
        text = row["point"]
        point = int(text) if text.isdecimal() else -1
        if not 0 <= point < len(self.sweep):
            raise ValueError(f"{path} line {number}: no point {text!r} in this sweep")
        return point

    def add(self, point: int, results: Row) -> None:
        """Append the row of a point."""
        settings = self.sweep.settings(point).values()
        values = [SCHEMA_VERSION, self.digest, point, *settings]
        self._write(csv_line([*values, *(results[name] for name in RESULTS)]))

    def _write(self, line: str) -> None:
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # of a full disk, which does not say where
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def csv_line(values: list[Any]) -> str:
    """One line of a CSV file; floats in full, so that they read back as they were."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def read_results(row: dict[str, str]) -> Row:
    """The results in a row of text, typed; what is empty stays so."""
    return {name: read(row[name]) if row[name] else "" for name, read in RESULTS.items()}


def difference(found: list[str], expected: list[str]) -> str:
    """Which columns differ, in words."""
    missing = [name for name in expected if name not in found]
    more = [name for name in found if name not in expected]
    parts = [f"without {', '.join(missing)}"] if missing else []
    parts += [f"with {', '.join(more[:8])}"] if more else []
    return " and ".join(parts) or "its columns are in another order"
