"""`fa4 emulate FILE.cu`: compiled by nvcc, here by one that is put in its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fa4 import cli
from fa4.commands import emulate_cuda
from tests.emulator.test_cli_emulate import EXCHANGE

# Writes the PTX that stands in the .cu file, as nvcc -ptx would; complains of a file without any.
NVCC = """#!{python}
import sys
target, source = sys.argv[sys.argv.index("-o") + 1], open(sys.argv[-1]).read()
if "entry" not in source:
    print("a warning", file=sys.stderr)
    sys.exit("a.cu(3): error: identifier is undefined")
assert "-lineinfo" in sys.argv and "-arch=sm_90a" in sys.argv, sys.argv
open(target, "w").write(source)
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, all that is printed) of `fa4 emulate a.cu`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", "a.cu", "--arch", "sm_90a", *arguments])
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out + printed.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a compiler."""
    monkeypatch.chdir(tmp_path)
    compiler = tmp_path / "nvcc"
    compiler.write_text(NVCC.format(python=sys.executable))
    compiler.chmod(0o755)
    monkeypatch.setattr(emulate_cuda, "find_nvcc", lambda: str(compiler))
    return tmp_path


def test_kernels_of_cuda(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run as PTX is; findings name lines of the source."""
    (folder / "a.cu").write_text(EXCHANGE.replace("SYNC", ""))
    code, out = run(capsys, "--block", "64")
    assert code == 1 and "race: " in out and "from exchange.py:9" in out
    (folder / "a.cu").write_text(EXCHANGE.replace("SYNC", "bar.sync 0;"))
    assert run(capsys, "--block", "64")[0] == 0
    assert "exchange: " in run(capsys, "--list")[1]


def test_what_cannot_be_compiled_is_said_in_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's first error; no file; no compiler."""
    (folder / "a.cu").write_text("int x = y;")
    code, out = run(capsys)
    assert code == 2 and out.endswith("a.cu(3): error: identifier is undefined\n")
    (folder / "a.cu").unlink()
    assert run(capsys) == (2, "fa4: error: a.cu: no such file\n")
    monkeypatch.setattr(emulate_cuda, "find_nvcc", lambda: None)
    code, out = run(capsys)
    assert code == 2 and "needs nvcc and a host compiler: pip install nvidia-cuda-nvcc" in out


def test_the_compiler_of_the_packages_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the one on the path, if there is one."""
    place = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    place.parent.mkdir(parents=True)
    place.touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert emulate_cuda.find_nvcc() == str(place)
    place.unlink()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert emulate_cuda.find_nvcc() == "/usr/bin/nvcc"
