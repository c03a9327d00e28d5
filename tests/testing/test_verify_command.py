"""`fa4 verify`: exit codes, what it prints for people and for machines."""

from __future__ import annotations

import json

import pytest

import fa4.cli
import fa4.testing
from fa4.commands import verify as command
from fa4.testing import runner

HERE = "tests.testing.planted"


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    """Also before the command is in the list of `fa4.cli`."""
    names = dict.fromkeys((*fa4.cli.COMMANDS, "verify"))
    monkeypatch.setattr(fa4.cli, "COMMANDS", tuple(names))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 verify`."""
    with pytest.raises(SystemExit) as caught:
        fa4.cli.main(["verify", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_passing_run(capsys) -> None:
    """A table, a summary line, exit code 0."""
    code, out, _ = run(capsys, "--property", "plain", "--property", "causal", "--max-examples", "3")
    assert code == 0
    assert "reference: 2 passed, 0 failed, 0 not covered; 6 cases" in out


def test_failing_run(capsys) -> None:
    """The test to paste, exit code 1."""
    code, out, _ = run(capsys, "--backend", f"{HERE}:sink_twice", "--property", "sink")
    assert code == 1
    assert "def test_sink():" in out and f'load_backend("{HERE}:sink_twice")' in out


def test_not_covered_is_listed(capsys) -> None:
    """With its reason, and apart from what passed."""
    code, out, _ = run(capsys, "--backend", f"{HERE}:minimal", "--property", "causal")
    assert code == 0
    assert "not covered" in out and "0 passed, 0 failed, 1 not covered" in out


def test_json(capsys) -> None:
    """One document with a schema version; no table."""
    code, out, _ = run(
        capsys, "--json", "--backend", f"{HERE}:unscaled", "--property", "plain", "--seed", "2"
    )
    data = json.loads(out)
    assert code == 1 and data["schema_version"] == 1 and data["seed"] == 2
    assert data["counts"]["failed"] == 1 and "Case(" in data["properties"][0]["example"]


def test_list(capsys) -> None:
    """Names and needs, nothing run."""
    code, out, _ = run(capsys, "--list", "--json")
    names = [entry["name"] for entry in json.loads(out)["properties"]]
    assert code == 0 and names == [prop.name for prop in fa4.testing.PROPERTIES]
    code, out, _ = run(capsys, "--list")
    assert code == 0 and "bottom-right" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nothing"], "back end must be one of"),
        (["--property", "other"], "property must be one of"),
        (["--max-examples", "0"], "max_examples must be at least 1; got 0"),
        (["--seed", "-1"], "seed must be at least 0; got -1"),
    ],
)
def test_bad_input(capsys, arguments: list[str], message: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


def test_default_agrees_with_the_runner() -> None:
    """The number is written twice, because the command must not import the suite for --help."""
    assert command.DEFAULT_EXAMPLES == runner.DEFAULT_EXAMPLES
