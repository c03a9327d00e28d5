"""What commands print fits a terminal of 80 columns, and nothing is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa4 import cli
from fa4.commands import emit, wrap
from fa4.figures.accuracy import B200_FILE
from tests.commands.support import call

COMMANDS = [
    ["predict"],
    ["predict", "--compare", "tau=0 ping_pong=no split_p=1", "--compare", "gpu.sm_count=100"],
    ["predict", "--pass", "bwd", "--deterministic", "--causal", "--window", "1000,20"],
    ["sweep", "--set", "head_dim=64,128", "--set", "kv_stages=2:6:1"],
    ["sweep", "--set", "head_dim=64", "--set", "seqlen=1k,2k", "--set", "causal=yes,no",
     "--set", "heads=8", "--set", "tile_n=64,128"],
    ["predict", "--gpus", "16", "--nodes", "2", "--seqlen", "64k", "--causal"],
    ["distributed", "plan", "--gpus", "4", "--causal"],
    ["distributed", "check", "--gpus", "4", "--seqlen", "1k"],
    ["ablate", "--seqlen", "4k"],
    ["roofline"],
    ["figures", "--list"],
    ["figures", "smem", "--out", "figures"],
    ["trace", "--seqlen", "1k", "--out", "trace.json"],
    ["explain", "--programs"],
    ["explain", "--pass", "backward"],
    ["machines"],
    ["machines", "b200"],
    ["validate", "--measurements", str(B200_FILE)],
    ["generations", "--seqlen", "64"],
    ["doctor"],
    ["doctor", "--matrix"],
    ["run", "--random", "1,4,40,16", "--heads-k", "2", "--keys", "120", "--impl", "reference"],
    ["compile", "--head-dim", "64", "--causal"],
    ["cache", "ls"],
    ["cache", "clear", "nothing"],
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of kernels that holds what these tests compile."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Path) -> None:
    """80 columns, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FA4_CACHE_DIR", str(kernels))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output_fits_80_columns(arguments: list[str]) -> None:
    """No line is longer, except for a path that has no place to break; none ends in an ellipsis."""
    code, out, err = call(*arguments)
    assert code in (0, 1) and out, err
    wide = [line for line in out.splitlines() if len(line.rstrip()) > 80 and " " in line.strip()]
    assert not wide
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_fits_80_columns(name: str) -> None:
    assert max(map(len, call(name, "--help")[1].splitlines())) <= 80


def test_text_is_wrapped_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an indent, so that one sees what belongs together; not where no terminal is known."""
    assert wrap("ab cd ef\n  gh ij kl", 7) == "ab cd\n  ef\n  gh ij\n    kl"
    assert wrap("a  b\n\nlonger-than-it", 8) == "a  b\n\nlonger-t\n  han-it"
    line = "word " * 40 + "end"
    emit({}, False, lambda _: line)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    emit({}, False, lambda _: line)
    assert capsys.readouterr().out == line + "\n"
