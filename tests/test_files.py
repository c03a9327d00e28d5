"""Files that users name: what is read, and what is never replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fa4.base.files import read_bytes, read_text, require_replaceable, write_whole


def test_devices_pipes_and_folders_are_not_replaced(tmp_path: Path) -> None:
    """A file renamed to their place would take it, which as root loses a device."""
    (tmp_path / "device").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("device", "pipe", "folder"):
        path = tmp_path / name
        for check in (require_replaceable, lambda x: write_whole(x, b"content")):
            with pytest.raises((ValueError, IsADirectoryError), match=name):
                check(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "folder", "pipe"]
    assert (tmp_path / "device").is_symlink() and (tmp_path / "pipe").is_fifo()


def test_files_are_replaced_and_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "file", b"one")
    write_whole(tmp_path / "new" / "file", b"two")
    assert (tmp_path / "new" / "file").read_bytes() == b"two"


def test_reading(tmp_path: Path) -> None:
    """Regular files of a size that makes sense; every message names the path."""
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path) == "abc" and read_bytes(path) == b"\xef\xbb\xbfabc"
    with pytest.raises(ValueError, match="text must be at most 3 bytes"):
        read_bytes(path, 3)
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match="text: not UTF-8 text at byte 1"):
        read_text(path)
    with pytest.raises(ValueError, match="is no path"):
        read_text(Path("a\0b"))
    with pytest.raises(FileNotFoundError, match="missing"):
        read_text(tmp_path / "missing")
