"""Compiled code is kept wherever a folder can be written, thrown away when stale, and announced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa4.base.compiled_code import COMPILING, EVERY_TIME, drop_stale

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("checks", "machine")


def make_tree(root: Path) -> tuple[list[Path], list[Path]]:
    """(sources, what was kept of them), all written at one time."""
    sources, kept = [root / "layout.py"], []
    for package in PACKAGES:
        (root / package / "__pycache__").mkdir(parents=True)
        sources.append(root / package / "code.py")
        for suffix in ("nbi", "1.nbc"):
            kept.append(root / package / "__pycache__" / f"code.f-1.py311.{suffix}")
            kept[-1].write_bytes(b"x")
    for path in [*sources, *kept]:
        path.touch()
        os.utime(path, ns=(1000, 1000))
    return sources, kept


def test_only_older_code_is_dropped(tmp_path: Path) -> None:
    sources, kept = make_tree(tmp_path)
    assert drop_stale(sources) == 0 and all(path.exists() for path in kept)
    os.utime(kept[0], ns=(999, 999))
    assert drop_stale(sources) == 1 and not kept[0].exists() and kept[1].exists()


def test_any_source_makes_all_stale(tmp_path: Path) -> None:
    for name in ("layout.py", "checks/code.py", "machine/code.py"):
        root = tmp_path / name.replace("/", "-")
        root.mkdir()
        sources, kept = make_tree(root)
        later = kept[0].stat().st_mtime_ns + 10**9
        os.utime(root / name, ns=(later, later))
        assert drop_stale(sources) == len(kept)
        assert not any(path.exists() for path in kept)


class Installation:
    """A copy of the package that keeps its compiled simulator to itself."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder, self.home = folder / "site", folder / "home"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "fa4", self.folder / "fa4", ignore=ignored)
        self.home.mkdir()
        if read_only:  # for numba and for root as well: no folder can be made here
            (self.folder / "fa4/sim/__pycache__").write_bytes(b"")

    def predict(self, **environment: str) -> tuple[float, str]:
        """(seconds predicted, stderr) of `fa4 predict`."""
        unwanted = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
        env = {name: value for name, value in os.environ.items() if name not in unwanted}
        env |= {"PYTHONPATH": str(self.folder), "HOME": str(self.home), **environment}
        done = subprocess.run(
            [sys.executable, "-m", "fa4", "predict", "--seqlen", "2k", "--json"],
            cwd="/", env=env, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["seconds"], done.stderr

    def kept(self) -> set[Path]:
        """The folders with code that numba keeps."""
        return {path.parent for path in self.folder.parent.rglob("*.nbc")}


def test_the_first_use_says_that_it_compiles(tmp_path: Path) -> None:
    """In one line, and the second does not compile; a changed constant compiles again."""
    copy = Installation(tmp_path)
    seconds, said = copy.predict()
    assert said == f"fa4: {COMPILING}\n"
    assert copy.kept() == {copy.folder / "fa4/sim/__pycache__"}
    assert copy.predict() == (seconds, "")
    os.utime(copy.folder / "fa4/sim/code.py")
    assert copy.predict() == (seconds, f"fa4: {COMPILING}\n")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The user's cache folder serves; without one, every process compiles and says so."""
    copy = Installation(tmp_path, read_only=True)
    seconds, said = copy.predict()
    assert said == f"fa4: {COMPILING}\n"
    assert [folder.is_relative_to(copy.home) for folder in copy.kept()] == [True]
    assert copy.predict() == (seconds, "")
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
    for _ in range(2):
        again, said = copy.predict(**nowhere)
        assert again == seconds
        assert said == f"fa4: {COMPILING}, {EVERY_TIME}\n"


def test_the_emulator_is_looked_after() -> None:
    """All its files with compiled functions, before the first of them is imported."""
    code = """
import sys
import fa4.base.compiled_code
told = []
fa4.base.compiled_code.prepare = lambda sources: told.append((sources, [*sys.modules]))
import fa4.emulator.execute
((sources, before),) = told
assert not any(name.startswith("fa4.emulator.checks.") for name in before), before
assert all(source.is_file() for source in sources), sources
compiled = {m.__file__ for n, m in sys.modules.items() if n.startswith("fa4.emulator.")
            if any(type(value).__name__ == "CPUDispatcher" for value in vars(m).values())}
print(sorted(compiled - set(map(str, sources))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = [
        "fa4/emulator/isa/spaces.py",
        "fa4/emulator/wgmma/sums.py",
    ]  # take no constants of others
    assert done.stdout == f"{[str(ROOT / name) for name in alone]}\n"


def test_parts_of_compiled_code_are_not_compiled_for_python() -> None:
    """Only what Python calls has a wrapper and is kept; the rest would double the first launch."""
    from fa4.emulator.checks import global_shadow, records, shadow
    from fa4.emulator.machine import direct

    compiled = {
        value
        for module in (records, shadow, global_shadow, direct)
        for value in vars(module).values()
        if type(value).__name__ == "CPUDispatcher"
    }
    for_python = {f for f in compiled if not f.targetoptions.get("no_cpython_wrapper")}
    wanted = {shadow._access, shadow.split_chunks, global_shadow._access}
    assert for_python == wanted < compiled
