"""Files that a user names: read whole, of a size that makes sense; written whole or not at all.

A device such as /dev/zero never ends and a named pipe may never begin, so both are refused, and so
is a text beyond MOST_TEXT_BYTES. Messages and OSErrors name the path.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_TEXT_BYTES = 64 * 1024 * 1024


def require_regular(path: Path) -> Path:
    """`path`. Raises FileNotFoundError, IsADirectoryError, or ValueError for a device or a pipe."""
    try:
        path.stat()  # raises what is wrong, with the path
        special = not path.is_file()
    except ValueError as error:  # a null byte in the name
        raise ValueError(f"{str(path)!r} is no path: {error}") from None
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    if special:
        raise ValueError(f"{path} must be a regular file; it is a device or a pipe")
    return path


def require_replaceable(path: Path) -> Path:
    """`path`. Raises what is wrong with it if it is there and no regular file.

    A file that is written beside it and renamed would take the place of a device.
    """
    return require_regular(path) if os.path.lexists(path) else path


def read_bytes(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `most_bytes`. Raises OSError or ValueError."""
    size = require_regular(path).stat().st_size
    if size > most_bytes:
        raise ValueError(f"{path} must be at most {most_bytes} bytes of text; it has {size}")
    try:
        return path.read_bytes()
    except OSError as error:  # of reading, which does not say what
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises OSError or ValueError."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error


def check_folder(folder: Path) -> None:
    """Raise OSError now if `folder` can clearly not be written to later; creates nothing."""
    present = folder
    while not present.exists() and present != present.parent:
        present = present.parent
    if not present.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(present))
    if not os.access(present, os.W_OK | os.X_OK):
        raise PermissionError(13, "Permission denied", str(present))


def write_whole(path: Path, content: bytes | None) -> None:
    """Put `content` at `path` in one step; None removes what an earlier run left there."""
    if content is None:
        path.unlink(missing_ok=True)
        return
    require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
