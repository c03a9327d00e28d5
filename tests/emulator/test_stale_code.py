"""What numba kept is thrown away when a source is newer, and only then."""

from __future__ import annotations

import os
from pathlib import Path

from fa4.emulator.stale_code import PACKAGES, drop_stale


def make_tree(root: Path) -> list[Path]:
    kept = []
    (root / "layout.py").write_text("")
    for package in PACKAGES:
        (root / package / "__pycache__").mkdir(parents=True)
        (root / package / "code.py").write_text("")
        for suffix in ("nbi", "1.nbc"):
            kept.append(root / package / "__pycache__" / f"code.f-1.py311.{suffix}")
            kept[-1].write_bytes(b"x")
    for path in root.rglob("*.py"):
        os.utime(path, ns=(1000, 1000))
    return kept


def test_only_older_code_is_dropped(tmp_path: Path) -> None:
    kept = make_tree(tmp_path)
    assert drop_stale(tmp_path) == 0 and all(path.exists() for path in kept)
    os.utime(kept[0], ns=(999, 999))
    assert drop_stale(tmp_path) == 1 and not kept[0].exists() and kept[1].exists()


def test_any_source_makes_all_stale(tmp_path: Path) -> None:
    for name in ("layout.py", "checks/code.py", "machine/code.py"):
        root = tmp_path / name.replace("/", "-")
        root.mkdir()
        kept = make_tree(root)
        later = kept[0].stat().st_mtime_ns + 10**9
        os.utime(root / name, ns=(later, later))
        assert drop_stale(root) == len(kept)
        assert not any(path.exists() for path in kept)
