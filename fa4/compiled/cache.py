"""Compiled kernels on disk: one file per key, written whole or not at all.

The folder is FA4_CACHE_DIR, else fa4 in XDG_CACHE_HOME, else ~/.cache/fa4; FA4_CACHE=0 switches the
cache off. Whatever is wrong with the folder costs time, never a result: it is said once, and
kernels are compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fa4.base.files import require_regular
from fa4.compiled.artifact import (
    CompiledKernel,
    DamagedArtifact,
    from_bytes,
    read_header,
    to_bytes,
)
from fa4.compiled.identity import spec_text

SUFFIX, LOCK_SUFFIX, PARTIAL_SUFFIX = ".fa4", ".lock", ".part"
_OFF = {"0", "off", "no", "false"}
_HEADER_BYTES = 1 << 16  # read of each file for a listing; headers are a few hundred bytes
_LOCK_SECONDS = 300.0  # a compilation takes seconds: whoever holds a lock longer hangs
_POLL_SECONDS = 0.02

_said: set[str] = set()


class CacheWarning(UserWarning):
    """The cache could not be used; the kernel was compiled anew."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache. problem: why it cannot be used, as far as its header tells."""

    path: Path
    size_bytes: int
    modified: float
    header: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def key(self) -> str:
        """The key it is kept under."""
        return self.path.stem

    @property
    def text(self) -> str:
        """Its spec in one line."""
        return describe_header(self.header)

    @property
    def age_seconds(self) -> float:
        """Since it was written."""
        return max(0.0, time.time() - self.modified)


def open_cache(environment: Mapping[str, str] = os.environ) -> KernelCache | None:
    """The cache that the environment asks for; None if it is off or has no place to be."""
    if environment.get("FA4_CACHE", "1").strip().lower() in _OFF:
        return None
    chosen = environment.get("FA4_CACHE_DIR", "")
    if chosen:
        return KernelCache(Path(chosen).expanduser().absolute())
    base = environment.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the specification: relative ones are to be ignored
        return KernelCache(Path(base) / "fa4")
    try:
        return KernelCache(Path.home() / ".cache" / "fa4")
    except RuntimeError:
        say_once("there is no home folder to keep compiled kernels in: set FA4_CACHE_DIR")
        return None


@dataclass(frozen=True)
class KernelCache:
    """Compiled kernels in one folder, shared by all processes of a user."""

    folder: Path

    def path(self, key: str) -> Path:
        """Where a kernel is kept."""
        return self.folder / f"{key}{SUFFIX}"

    def load(self, key: str, spec: Any) -> CompiledKernel | None:
        """The kernel under a key; None if there is none that can be used."""
        path = self.path(key)
        try:
            artifact = from_bytes(path.read_bytes(), spec)
            if artifact.key != key:
                raise DamagedArtifact(f"it holds the kernel {artifact.key}")
        except FileNotFoundError:
            return None
        except OSError as error:
            say_once(f"cannot read the kernel cache: {_reason(error)}")
            return None
        except DamagedArtifact as error:
            say_once(f"{path} is damaged ({error}): the kernel is compiled anew")
            return None
        return artifact

    def store(self, artifact: CompiledKernel) -> bool:
        """Keeps a kernel under its key, whole or not at all; False if it cannot."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(PARTIAL_SUFFIX, artifact.key, self.folder)
            try:
                with open(handle, "wb") as file:
                    file.write(to_bytes(artifact))
                os.replace(name, self.path(artifact.key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            say_once(f"cannot keep compiled kernels: {_reason(error)}; FA4_CACHE_DIR names another "
                     "folder, FA4_CACHE=0 switches the cache off")  # fmt: skip
            return False
        return True

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process at a time, so that two that need a kernel compile it once.

        Where no lock can be had (a read-only folder, a file system or system without them, a holder
        that hangs), goes on without: the files stay whole all the same.
        """
        try:
            import fcntl

            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open(self.folder / f"{key}{LOCK_SUFFIX}", "a")  # noqa: SIM115
        except (ImportError, OSError):
            yield
            return
        with file:
            deadline = time.monotonic() + _LOCK_SECONDS
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_SECONDS)
                except OSError:
                    break
            yield

    def entries(self, *, whole: bool = False) -> list[Entry]:
        """What is kept, the newest first; [] if there is no such folder.

        whole: read the files to their end, so that any damage is an entry's problem.
        """
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process clears
                found.append(_entry(path, whole))
        return sorted(found, key=lambda entry: (-entry.modified, entry.key))

    def clear(self, pattern: str = "", older_than_seconds: float = 0.0) -> list[Entry]:
        """Deletes the kernels that fit and returns them; `problem` says why one is still there.

        pattern: text that the key begins with or that the description holds, "" for all.
        older_than_seconds: only those at least that old.
        """
        chosen = [
            entry
            for entry in self.entries()
            if entry.age_seconds >= older_than_seconds and _fits(entry, pattern)
        ]
        tried = []
        for entry in chosen:
            problem = ""
            try:
                entry.path.unlink(missing_ok=True)
                entry.path.with_suffix(LOCK_SUFFIX).unlink(missing_ok=True)
            except OSError as error:
                problem = _reason(error)
            tried.append(replace(entry, problem=problem))
        for leftover in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _LOCK_SECONDS:
                    leftover.unlink()
        return tried


def say_once(message: str) -> None:
    """Warns, unless this process has said the same before."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, CacheWarning, stacklevel=2)


def _entry(path: Path, whole: bool) -> Entry:
    """What a file holds, and what is wrong with it. Raises FileNotFoundError if it is gone."""
    status = path.lstat()
    header: dict[str, Any] = {}
    problem = ""
    try:
        with open(require_regular(path), "rb") as file:
            data = file.read(_HEADER_BYTES if not whole else -1)
        header, start = read_header(data)
        if start + sum(header["sections"]) + 32 != status.st_size:
            problem = "cut off"
        elif whole and from_bytes(data).key != path.stem:
            problem = f"damaged: it holds the kernel {header['key']}"
        describe_header(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        header, problem = {}, f"damaged: {error}"
    except OSError as error:
        problem = _reason(error)
    return Entry(path, status.st_size, status.st_mtime, header, problem)


def describe_header(header: Mapping[str, Any]) -> str:
    """The spec in one line. Raises what is wrong with a header that was not written by us."""
    metadata = header.get("metadata", {})
    dict(metadata.get("compiler") or {})
    return spec_text(metadata.get("spec", {}))


def _fits(entry: Entry, pattern: str) -> bool:
    text = f"{entry.header.get('arch', '')} {entry.text}"
    return entry.key.startswith(pattern) or pattern in text


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
