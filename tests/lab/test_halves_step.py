"""The program of a softmax step: an nvcc and a GPU that are put in their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lab.hardware import halves_step

# Copies itself: as a program it has figures of all ways but `apart`, which a driver refuses.
NVCC = """#!{python}
import json, os, shutil, sys
given = sys.argv[1:]
if "--version" in given:
    print("release 13.0")
elif "-o" in given:
    shutil.copy(__file__, given[given.index("-o") + 1])
elif not given:
    print(json.dumps({device}))
elif given[0] == "apart":
    print(json.dumps({{"failed": "cudaGetLastError(): invalid argument"}}))
else:
    print(json.dumps({{"cycles_a_step": 100.0}}))
"""


def script(folder: Path, text: str) -> str:
    """A program that runs a text."""
    found = folder / "program"
    found.write_text(text)
    found.chmod(0o755)
    return str(found)


def compiler(folder: Path, device: dict[str, object]) -> str:
    """One whose programs find that device."""
    return script(folder, NVCC.format(python=sys.executable, device=device))


def test_a_way_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of all others are written, and the program says that some are missing."""
    monkeypatch.setattr(halves_step, "LIMITS", (0, 96))
    nvcc, output = compiler(tmp_path, {"device": "a GPU", "steps": 512}), tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["halves_step", "--output", str(output), "--nvcc", nvcc])
    with pytest.raises(SystemExit, match="8 of 24 ways have no figures"):
        halves_step.main()
    found = json.loads(output.read_text())
    assert found["device"] == "a GPU" and found["nvcc"] == "release 13.0"
    failed = [way for way in found["ways"] if "failed" in way]
    assert {way["way"] for way in failed} == {"apart"}
    assert all(way["cycles_a_step"] for way in found["ways"] if way not in failed)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """In one line, before any way is run."""
    nvcc = compiler(tmp_path, {"failed": "cudaGetDeviceProperties: no device"})
    with pytest.raises(SystemExit, match="no GPU to measure: cudaGetDeviceProperties: no device"):
        halves_step.measure(nvcc)


@pytest.mark.parametrize(
    ("text", "said"),
    [("print('{')", "JSONDecodeError"), ("raise SystemExit(3)", "exit status 3"),
     ("import time; time.sleep(60)", "timed out")],
)  # fmt: skip
def test_what_else_goes_wrong_is_a_failure(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words beside JSON, an exit code, a kernel that does not end."""
    monkeypatch.setattr(halves_step, "LIMIT_S", 1)
    program = script(tmp_path, f"#!{sys.executable}\n{text}\n")
    assert said in halves_step.run(program)["failed"]
