"""The wheel, installed where nothing else of the project is: what it brings, and every command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import fa4
from fa4.cli import COMMANDS
from tests.commands import fuzz
from tests.commands.fuzz_values import make_files
from tests.installed import (
    EXTRAS,
    ROOT,
    build_archive,
    build_wheel,
    call,
    copy_project,
    make_environment,
    required_by,
)

# One call of every command, quick ones: those of the fuzzer, but for
QUICK = {words: arguments for words, (_, arguments) in fuzz.COMMANDS.items()} | {
    ("demo",): ("--chunks", "1", "--no-kernel"),
    ("bench",): ("--head-dims", "64", "--seqlens", "1k", "--masks", "full", "--repeats", "1"),
    ("cache", "warm"): ("--jobs", "2"),
    ("emulate", "--support"): (),
    ("distributed", "predict"): ("--seqlen", "1k", "--heads", "4"),
    ("figures",): ("measured",),
}
# These say in one line which optional package they need.
NEED_MORE = {
    ("demo",),
    ("verify",),
    ("compile",),
    ("bench",),
    ("cache", "warm"),
    ("figures",),
    ("distributed", "run"),
    ("distributed", "bench"),
}
# What lies beside the code, and a command that reads it.
DATA = {
    "demo/attention.txt": ("demo",),
    "emulator/tools/confirmed.json": ("emulate", "--support"),
    "explore/verdicts.json": ("explore",),
    "measured/b200_constants.csv": ("predict",),
    "measured/b200_published.csv": ("figures",),
    "measured/hopper_sweep.csv": ("figures",),
    "measured/h200x2_links.csv": ("distributed", "predict"),
} | {f"explore/web/{path.name}": ("explore",) for path in (ROOT / "fa4/explore/web").iterdir()}

# What no command reads by itself: `fa4 validate --measurements FILE` does.
GIVEN = {"measured/b200_kept_out.csv", "measured/h100_published.csv"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Installed:
    """An environment: its Python, its site-packages, and a folder to run in, with `files` in it."""

    python: Path
    site: Path
    folder: Path

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """The command of these words, as a user calls it who has only this environment."""
        files = str(self.folder / "files")
        arguments = [word.format(files=files) for word in QUICK[tuple(words)]]
        return call(self.python.with_name("fa4"), *words, *arguments, folder=self.folder,
                    HOME=str(self.folder), FA4_CACHE_DIR=str(self.folder / "kept"))  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def install(folder: Path, wheel: Path, packages: Sequence[metadata.Distribution]) -> Installed:
    python, site = make_environment(folder / "venv", wheel, packages)
    (folder / "files").mkdir()
    make_files(folder / "files")
    return Installed(python, site, folder)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """With the packages that the project requires, and none that is optional."""
    return install(tmp_path_factory.mktemp("bare"), wheel, required_by(wheel))


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """With all packages of this Python."""
    pytest.importorskip("cutlass")
    return install(tmp_path_factory.mktemp("full"), wheel, list(metadata.distributions()))


def refused_for(done: subprocess.CompletedProcess[str], reason: str) -> bool:
    """Ended with exit code 2 and one line that names this reason."""
    last = done.stderr.splitlines()[-1:] or [""]
    return done.returncode == 2 and done.stdout == "" and bool(
        re.match(rf"fa4: error: .*{reason}", last[0])
    )  # fmt: skip


def test_it_brings_every_file_of_the_package(wheel: Path) -> None:
    """Code and data, and each data file is one that a command is seen to need below."""
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "fa4").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    there = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fa4/")}
    assert here == there
    data = {name.removeprefix("fa4/") for name in there if not name.endswith(".py")}
    assert data == {"py.typed", *GIVEN, *DATA}


def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """What it holds is enough, and every file comes out as it went in; it installs and runs."""
    made = build_wheel(tmp_path / "made", build_archive(tmp_path))
    before, after = (
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()
         if "dist-info" not in entry.filename} for path in (wheel, made)
    )  # fmt: skip
    assert before == after and len(before) > 500
    python, _ = make_environment(tmp_path / "venv", made, required_by(made))
    said = call(python.with_name("fa4"), "--version", folder=tmp_path)
    assert said.returncode == 0 and said.stdout.split()[-1] == fa4.__version__


def test_every_command_has_its_quick_call() -> None:
    """The table here against the command's own."""
    assert {words[0] for words in QUICK} == set(COMMANDS)
    assert QUICK.keys() - {("emulate", "--support")} == fuzz.option_tables().keys()


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_a_command_with_what_is_required(words: tuple[str, ...], bare: Installed) -> None:
    """It runs; or says in one line which optional package it needs, and does so with that."""
    done = bare.run(words)
    if words in NEED_MORE:
        assert refused_for(done, "pip install "), (done.stdout, done.stderr)
    else:
        assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("words", sorted(NEED_MORE), ids=" ".join)
def test_a_command_with_what_is_optional(words: tuple[str, ...], full: Installed) -> None:
    """Those that need more have it; what they measure on may be missing."""
    done = full.run(words)
    if words == ("bench",) and done.returncode:
        assert refused_for(done, "fa4 bench needs an H100, H200, B200 or B300"), (
            done.stdout,
            done.stderr,
        )
    else:
        assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("name", DATA)
def test_a_missing_data_file_is_noticed(name: str, full: Installed) -> None:
    """Planted: the command that reads it no longer ends well, and ends well with it again."""
    path = full.site / "fa4" / name
    away = path.rename(full.folder / "away")
    try:
        done = full.run(DATA[name])
        assert done.returncode != 0 and path.name in done.stderr
    finally:
        away.rename(path)
    assert full.run(DATA[name]).returncode == 0


def test_what_is_installed(full: Installed) -> None:
    """Its name, what it brings, its command."""
    code = """
import importlib.metadata as metadata, json, fa4, sys
mine = metadata.distribution("fa4-lab")
print(json.dumps({
    "file": fa4.__file__, "version": mine.version, "tops": mine.read_text("top_level.txt").split(),
    "extras": mine.metadata.get_all("Provides-Extra"), "path": sys.path,
}))"""
    told = json.loads(call(full.python, "-c", code).stdout)
    assert Path(told["file"]).is_relative_to(full.site)
    assert not [path for path in told["path"] if path and Path(path, "pyproject.toml").exists()]
    assert sorted(told["tops"]) == ["fa4", "fa4_lab"]
    assert sorted(told["extras"]) == sorted(EXTRAS)
    version = call(full.python.with_name("fa4"), "--version")
    assert version.stdout == f"fa4 {told['version']}\n"


@pytest.mark.parametrize("extra", ["test", "viz"])
def test_the_command_of_the_pages_takes_an_extra(extra: str, tmp_path: Path) -> None:
    """`pip install -e '.[test]'` in a copy of the project, whose folder may hold a space."""
    clone = copy_project(tmp_path / "a clone")
    done = try_pip(sys.executable, "--no-build-isolation", "-e", f".[{extra}]", folder=clone)
    assert takes(done), (done.stdout, done.stderr)
    done = try_pip(sys.executable, "--no-build-isolation", "-e", ".[nothing]", folder=clone)
    assert not takes(done)


def test_pip_takes_the_hints_of_the_code(full: Installed) -> None:
    """Those on packages that are here: it finds them; our own name it would find on no index."""
    hints = {
        hint.strip("')")
        for path in (ROOT / "fa4").rglob("*.py")
        for hint in re.findall(r"pip install ('[\w-]+[<>=][^\n\"`{}]*)", path.read_text("utf-8"))
    }
    assert len(hints) > 1
    for hint in hints:
        assert takes(try_pip(full.python, *shlex.split(f"'{hint}'"))), hint
    assert not takes(try_pip(full.python, "fa4-laboratory[test]"))


def try_pip(
    python: object, *arguments: str, folder: Path = Path("/")
) -> subprocess.CompletedProcess[str]:
    """What pip says of an installation; nothing is installed."""
    return call(sys.executable, "-m", "pip", "--python", python, "install", "--dry-run",
                "--no-index", *arguments, folder=folder)  # fmt: skip


def takes(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether pip knew all that was asked for, and found it installed."""
    return (
        done.returncode == 0
        and "does not provide the extra" not in done.stderr
        and "Requirement already satisfied: " in done.stdout
    )
