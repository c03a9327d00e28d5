"""The command line: conventions that every command shares, and `fa4 doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import typer

import fa4
from fa4 import cli
from fa4.commands import SCHEMA_VERSION, doctor, emit, plain

ROOT = Path(__file__).resolve().parents[1]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 <arguments>`, run in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Register one function as the only command, `fa4 trial`."""

    def add(function: Callable[..., object]) -> None:
        module = types.ModuleType("fa4.commands.trial")
        module.trial = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fa4.commands.trial", module)
        monkeypatch.setattr(cli, "COMMANDS", ("trial",))

    return add


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints one line."""
    assert run(capsys, "--version") == (0, f"fa4 {fa4.__version__}\n", "")


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of commands, exit code 0."""
    code, out, _ = run(capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_help_is_grouped_and_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command once, under what it is for, its description not cut off at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys)
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out.partition("\n")[2]
    sections = re.split(r"^(?=\S)", out.partition("--help")[2], flags=re.MULTILINE)
    found = {text.partition(":\n")[0]: text for text in sections if ":\n" in text}
    assert list(found) == list(cli.GROUPS)
    for title, names in cli.GROUPS.items():
        assert tuple(re.findall(r"^  (\w+)  ", found[title], re.MULTILINE)) == names
    flat = " ".join(out.split())
    commands = typer.main.get_command(cli.build_app()).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        words = cli.summary(command)
        assert words.endswith(".") and words in re.sub(r"(?<=\w)- (?=\w)", "-", flat), name


def test_a_command_of_no_group_is_listed(
    capsys: pytest.CaptureFixture[str], add_command: Callable[[Callable[..., object]], None]
) -> None:
    """Nothing that can be called is hidden."""

    def trial() -> None:
        """Try something."""

    add_command(trial)
    assert "Commands:\n  trial  Try something.\n" in run(capsys)[1]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_ends_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help text shows a command line that can be copied."""
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    description = out.partition("\nOptions:")[0].partition("\nArguments:")[0].strip()
    assert re.search(rf"Example: fa4 {name}\b[^\n]*$", description.replace("\n  ", " "))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("head_dim must be\n   positive; got -1"), "head_dim must be positive; got -1"),
        (TypeError("q must be an array"), "q must be an array"),
        (FileNotFoundError(2, "No such file or directory", "x.npy"), "directory: x.npy"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "invalid start byte"),
        (ImportError("torch is missing: pip install torch"), "pip install torch"),
        (NotImplementedError("sm100 is not in this version"), "not in this version"),
        (MemoryError("Unable to allocate 745 GiB"), "Unable to allocate 745 GiB"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_input_is_one_line(
    error: Exception,
    message: str,
    add_command: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2 and one line on stderr; with FA4_TRACEBACK, the error itself."""

    def trial() -> None:
        raise error

    add_command(trial)
    code, out, err = run(capsys, "trial")
    assert (code, out) == (2, "")
    assert err.startswith("fa4: error: ") and err.endswith(f"{message}\n") and err.count("\n") == 1
    monkeypatch.setenv("FA4_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(["trial"])


@pytest.mark.parametrize(
    "arguments", [("trial", "--nope"), ("trial", "--n", "x"), ("trial",), ("nope",), ("--nope",)]
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...],
    add_command: Callable[[Callable[..., object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unknown options and commands, bad and missing values."""

    def trial(n: Annotated[int, typer.Option("--n")]) -> None:
        print(n)

    add_command(trial)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fa4: error: ") and err.count("\n") == 1


def test_unexpected_errors_keep_their_traceback(
    add_command: Callable[[Callable[..., object]], None],
) -> None:
    """A fault of ours is not disguised as bad input."""

    def trial() -> None:
        raise KeyError("a fault")

    add_command(trial)
    with pytest.raises(KeyError):
        cli.main(["trial"])


def test_exit_codes_and_interrupts(
    add_command: Callable[[Callable[..., object]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """typer.Exit(1) is the answer "no"; Ctrl-C is 130."""

    def refuse() -> None:
        raise typer.Exit(1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    add_command(refuse)
    assert run(capsys, "trial") == (1, "", "")
    add_command(interrupt)
    assert run(capsys, "trial")[0] == 130


def test_as_a_process() -> None:
    """The same through a real process: no traceback reaches the user."""
    command = [sys.executable, "-m", "fa4.cli", "doctor", "--nope"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "fa4: error: No such option: --nope\n"


def test_emit_json(capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy values, paths and non-finite floats become what JSON has."""
    report = {"a": np.float32(0.5), "b": np.array([1, 2]), "c": float("-inf"), "d": Path("x")}
    emit(report, True, str)
    written = json.loads(capsys.readouterr().out)
    assert written == {
        "schema_version": SCHEMA_VERSION, "a": 0.5, "b": [1, 2], "c": "-inf", "d": "x"
    }  # fmt: skip
    assert plain((True, None, np.bool_(False), np.float64("nan"))) == [True, None, False, "nan"]


def test_emit_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Text is printed as it is: not wrapped, and brackets are no markup."""
    line = "[bold] " + "x" * 300
    emit({"line": line}, False, lambda report: report["line"])
    assert capsys.readouterr().out == line + "\n"


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Valid JSON with the keys that scripts rely on."""
    code, out, err = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["schema_version"] == SCHEMA_VERSION
    assert report["fa4"] == fa4.__version__
    assert report["machine"]["cores"] >= 1
    assert {row["package"]: row["version"] for row in report["packages"]}["numpy"] == np.__version__
    parts = {row["part"]: row for row in report["works"]}
    assert parts["reference"]["works"]
    assert parts["emulator of PTX"]["works"]
    assert set(parts["kernels on a GPU"]) == {"part", "works", "why"}


def test_doctor_says_how_to_get_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package: who needs it, the command, and what does not work without it."""
    installed = doctor.version_of
    monkeypatch.setattr(
        doctor, "version_of", lambda name: None if name == "tokenizers" else installed(name)
    )
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert f"{sys.executable} -m pip install tokenizers\n" in out
    assert re.search(r"demo\W+no\W+needs tokenizers", out)


def test_doctor_tells_ptx_from_cute_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuTe-DSL the emulator still runs PTX; the report says what its programs need."""
    monkeypatch.setattr(doctor, "version_of", lambda name: None if "cutlass" in name else "1.0")
    parts = {row["part"]: row for row in doctor.diagnose()["works"]}
    assert parts["emulator of PTX"]["works"]
    for part in ("emulator of CuTe-DSL programs", "kernels, emulated",
                 "kernels on a GPU"):  # fmt: skip
        row = parts[part]
        assert (row["works"], row["why"]) == (False, "needs nvidia-cutlass-dsl")


def test_doctor_survives_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a probe raises, the report is made."""

    def broken() -> list[str]:
        raise AttributeError("half-installed")

    monkeypatch.setattr(doctor, "gpus_of_torch", broken)
    monkeypatch.setattr(doctor, "gpus_of_nvidia_smi", lambda: ["NVIDIA H200"])
    assert doctor.find_gpus() == ["NVIDIA H200"]
    monkeypatch.setattr(doctor, "gpus_of_nvidia_smi", broken)
    assert doctor.find_gpus() == []


def test_doctor_names_the_bounds_of_pyproject() -> None:
    """The commands it gives install what the extras would."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for item in doctor.OPTIONAL:
        wanted = item.pip_arguments[-1]
        assert f'"{wanted}' in pyproject
        name = re.split("[<>=]", wanted)[0]
        required = [*(metadata.requires(name) or ()), name]  # a package may stand for its parts
        assert any(text.startswith(item.package) for text in required)
