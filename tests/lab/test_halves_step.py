"""`lab.hardware.halves_step`: what it writes of ways that ran, and says of those that did not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.hardware import halves_step

# Stands for nvcc: "compiles" a program that prints what stands beside this file.
COMPILER = """#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print("nvcc: in place of one\\nBuild none")
    sys.exit()
place = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
place.write_text("#!{python}\\n" + pathlib.Path({program!r}).read_text())
place.chmod(0o755)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the program with a compiled text; its exit code and what it wrote."""

    def made(text: str) -> tuple[int, dict[str, Any]]:
        program, compiler, out = tmp_path / "program", tmp_path / "nvcc", tmp_path / "out.json"
        program.write_text(text)
        compiler.write_text(COMPILER.format(python=sys.executable, program=str(program)))
        compiler.chmod(0o755)
        words = ["halves_step", "--output", str(out), "--nvcc", str(compiler)]
        monkeypatch.setattr(sys, "argv", words)
        return halves_step.main(), json.loads(out.read_text())

    return made


def printed(*ways: dict[str, Any]) -> str:
    """A program that prints these ways."""
    report = {"device": "a GPU", "steps": 512, "ways": list(ways)}
    return f"print({json.dumps(report)!r})"


def test_every_limit_of_registers_is_measured(run: Any) -> None:
    code, found = run(printed({"way": "whole", "cycles_a_step": 700.0}))
    assert code == 0 and found["device"] == "a GPU" and found["nvcc"] == "Build none"
    assert [way["limit"] for way in found["ways"]] == [None, 104, 96, 88]
    assert all(way["cycles_a_step"] == 700.0 for way in found["ways"])


def test_a_way_that_is_refused_is_written_and_told(run: Any) -> None:
    refused = {"way": "halves", "failed": "launch: cudaErrorLaunchOutOfResources"}
    code, found = run(printed({"way": "whole", "cycles_a_step": 700.0}, refused))
    assert code == 1 and found["ways"][1]["failed"] == refused["failed"]


def test_a_program_that_ends_says_why(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"halves_step\.cu with any registers: no GPU: cudaError"):
        run("import sys; sys.exit('no GPU: cudaErrorNoDevice')")


def test_it_needs_no_managed_memory() -> None:
    """Which is not on every machine that lends a GPU: a kernel's first access fails there."""
    text = halves_step.SOURCE.read_text()
    assert "cudaMallocManaged" not in text and "cudaMemcpyDeviceToHost" in text
