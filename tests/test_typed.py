"""The public functions are typed: what goes in comes out, and wrong arguments are seen."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fa4
from fa4.call.options import OPTIONS, DenseOptions, VarlenOptions
from tests import typed_program

ROOT = Path(__file__).resolve().parents[1]
TYPES = {fa4.flash_attn_func: DenseOptions, fa4.flash_attn_varlen_func: VarlenOptions}


@pytest.mark.parametrize("function", TYPES)
def test_type_checkers_see_the_options(function) -> None:
    """By their names, of the types that the signature writes out."""
    typed = {x: kind.__forward_arg__ for x, kind in TYPES[function].__annotations__.items()}
    varlen = TYPES[function] is VarlenOptions
    assert set(typed) == {option.name for option in OPTIONS if varlen or not option.varlen}
    written = inspect.signature(function).parameters
    assert {name: written[name].annotation for name in typed} == typed


def test_the_program_runs() -> None:
    """Its right part; the other is for checkers alone."""
    q = np.random.default_rng(0).standard_normal((1, 4, 1, 8)).astype(np.float32)
    typed_program.right(q, True)


def check(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The type checker's verdict of a user's program, by the settings of the project."""
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
               "--cache-dir", str(ROOT / ".mypy_cache"), str(path)]  # fmt: skip
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_checker_sees_faults(tmp_path: Path) -> None:
    """None in the program; a fault that is not marked, and a mark without a fault."""
    pytest.importorskip("mypy")
    text = Path(typed_program.__file__).read_text("utf-8")
    done = check(text, tmp_path)
    assert done.returncode == 0, done.stdout
    faults = [line for line in text.splitlines() if "# type: ignore" in line]
    assert len(faults) == 7
    done = check(text.replace("  # type: ignore", "  # planted"), tmp_path)
    found = {line.split(":")[1] for line in done.stdout.splitlines() if ": error: " in line}
    assert len(found) == len(faults)
    done = check(text.replace('softcap="15"', "softcap=15.0"), tmp_path)
    assert done.stdout.count('Unused "type: ignore" comment') == 2
