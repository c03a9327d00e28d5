"""Installations of the project to test: copies, wheels, environments that know nothing of here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from fa4.base.install import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OPTIONAL = PYPROJECT.partition("\n[project.optional-dependencies]\n")[2].partition("\n[project.")[0]
EXTRAS = re.findall(r"^(\w+) = \[", OPTIONAL, re.MULTILINE)
BUILT_FROM = ("fa4", "fa4_lab.py", "pyproject.toml", "README.md", "LICENSE")


def copy_project(folder: Path) -> Path:
    """A copy of what an installation is built from."""
    skip = shutil.ignore_patterns("__pycache__")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def call(
    *command: object, folder: Path = Path("/"), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command outside the project, with nothing of this process's paths."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def build_wheel(folder: Path, source: Path | None = None) -> Path:
    """The project's wheel, built in `folder`. source: a folder or an archive; a copy of here."""
    built = call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
                 "--no-index", source or copy_project(folder / "clone"), "-w", folder)  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("fa4_lab-*.whl")
    return wheel


def build_archive(folder: Path) -> Path:
    """The project's source archive, built in `folder` by the backend that pyproject.toml names."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    built = call(sys.executable, "-c", code, folder=copy_project(folder / "clone"))
    assert built.returncode == 0, built.stderr
    (archive,) = folder.glob("fa4_lab-*.tar.gz")
    return archive


def make_environment(
    folder: Path, wheel: Path, packages: Iterable[metadata.Distribution]
) -> tuple[Path, Path]:
    """The Python of an environment with this wheel and links to these packages; its site-packages.

    The project itself is never linked, however it is installed here.
    """
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(python, "-c", code).stdout.strip())
    for package in packages:
        if package.metadata["Name"] == DISTRIBUTION:
            continue
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(str(package.locate_file(top)))
    installed = call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps",
                     "--no-index", wheel)  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    return python, site


def required_by(wheel: Path, extras: Iterable[str] = ()) -> list[metadata.Distribution]:
    """The distributions that a wheel declares, those of its `extras` too, and all that these need;
    those that are here."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    found: dict[str, metadata.Distribution] = {}
    chosen = {f"; extra == '{extra}'" for extra in extras}
    pending = [
        need.partition(";")[0] if any(need.replace('"', "'").endswith(c) for c in chosen) else need
        for need in declared
    ]
    while pending:
        need = pending.pop()
        name = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", need, maxsplit=1)[0]).lower()
        if "extra ==" in need or name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another Python or system
            continue
        pending += found[name].requires or ()
    return list(found.values())
