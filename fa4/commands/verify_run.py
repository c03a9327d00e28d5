"""A run of the suite for `fa4 verify`: its files, what the function prints, and a word on hangs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fa4.base.files import check_folder, write_whole

if TYPE_CHECKING:
    from fa4.testing import VerifyOptions

SUFFIXES = {"html": (".html", ".htm"), "junit": (".xml",), "badge": (".svg",)}
SILENT_SECONDS = 120.0  # without a property that ends, before somebody is told of time limits


def check_files(files: Mapping[str, Path | None]) -> dict[str, Path]:
    """The files that are asked for; ValueError for those that cannot be written, before a run."""
    from fa4.base.files import require_replaceable

    wanted = {kind: path for kind, path in files.items() if path is not None}
    for kind, path in wanted.items():
        if path.suffix.lower() not in SUFFIXES[kind]:
            allowed = " or ".join(SUFFIXES[kind])
            raise ValueError(f"--{kind} must end in {allowed}; got {str(path)!r}")
        require_replaceable(path)
        check_folder(path.parent)
    return wanted


def run_suite(backend: str, options: VerifyOptions, files: Mapping[str, Path]) -> dict[str, Any]:
    """The report as plain data, with what the function printed and the files to be written."""
    from fa4 import testing
    from fa4.commands.progress import progress_bar

    with progress_bar() as progress, told_of_silence(progress) as tell, held_output() as printed:
        report = testing.verify(backend, options, progress=tell).as_dict()
    report["printed"] = printed()
    report["files"] = {kind: str(path) for kind, path in files.items()}
    return report


def write_files(report: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write the files of `check_files`, each in one step. Raises OSError."""
    from fa4.testing.report_files import WRITERS

    for kind, path in files.items():
        write_whole(path, WRITERS[kind](report).encode())


@contextmanager
def held_output() -> Iterator[Callable[[], dict[str, Any]]]:
    """Standard output goes to a file meanwhile, past Python too: it is the report's alone.

    Gives a function that says how many lines were written, and which was the first.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        said: dict[str, Any] = {"lines": 0, "first": ""}
        os.dup2(file.fileno(), 1)
        try:
            with redirect_stdout(file):
                yield lambda: said
        finally:
            file.flush()
            os.dup2(kept, 1)
            os.close(kept)
            said |= _summary(file)


def _summary(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    first = file.readline().rstrip("\n")[:200]
    return {"lines": sum(1 for _ in file) + bool(first), "first": first}


@contextmanager
def told_of_silence(progress: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """The progress callback; a line on standard error where nothing ends for a long time."""
    stream, last = sys.stderr, ["the first property"]
    timer: list[threading.Timer] = []

    def warn() -> None:
        stream.write(
            f"no property has ended for {SILENT_SECONDS:g} s (behind {last[0]}); if a call hangs, "
            "--timeout 60 ends it and goes on\n"
        )

    def again() -> None:
        for old in timer:
            old.cancel()
        timer[:] = [threading.Timer(SILENT_SECONDS, warn)]
        timer[0].daemon = True
        timer[0].start()

    def tell(done: int, total: int, name: str) -> None:
        last[0] = name
        again()
        progress(done, total, name)

    again()
    try:
        yield tell
    finally:
        timer[0].cancel()
