"""`fa4 verify`: exit codes, what it prints for people and for machines."""

from __future__ import annotations

import json

import pytest

import fa4.cli
import fa4.testing
from fa4.commands import verify as command
from fa4.testing import runner

HERE = "tests.testing.planted"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 verify`."""
    with pytest.raises(SystemExit) as caught:
        fa4.cli.main(["verify", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_passing_run(capsys) -> None:
    """A table, a summary line, exit code 0."""
    code, out, _ = run(capsys, "--only", "plain", "--only", "causal", "--max-examples", "4")
    assert code == 0
    assert "reference: 2 passed, 0 failed, 0 not covered;" in out


def test_failing_run(capsys) -> None:
    """The test to paste, exit code 1."""
    code, out, _ = run(capsys, "--backend", f"{HERE}:sink_twice", "--only", "sink")
    assert code == 1
    assert "def test_sink():" in out and f'load_backend("{HERE}:sink_twice")' in out


def test_not_covered_is_listed(capsys) -> None:
    """With its reason, and apart from what passed."""
    arguments = ("--only", "plain", "--only", "causal*", "--max-examples", "2")
    code, out, _ = run(capsys, "--backend", f"{HERE}:minimal", *arguments)
    assert code == 0 and "1 passed, 0 failed, " in out
    text = " ".join(out.split())
    assert "properties): causal: its signature does not name causal" in text


def test_nothing_covered_is_no_success(capsys) -> None:
    """One line, exit code 1."""
    code, out, _ = run(capsys, "--backend", f"{HERE}:minimal", "--only", "causal")
    assert code == 1 and "nothing could be checked, which is no success" in out
    code, out, _ = run(capsys, "--backend", f"{HERE}:without_parameters")
    assert code == 1


def test_failures_say_what_they_share(capsys) -> None:
    """First the cause and its smallest example, then the list."""
    code, out, _ = run(
        capsys, "--backend", f"{HERE}:sink_lost_in_fp16", "--only", "sink*", "--max-examples", "8"
    )
    assert code == 1 and "O and LSE wrong with fp16 x sink sink and " in " ".join(out.split())
    assert out.count("def test_") == 1 and "with it: " in out


def test_exitfirst_dtype_and_backends(capsys) -> None:
    """-x ends a run, --dtype chooses, --list-backends shows what is installed."""
    code, out, _ = run(capsys, "--backend", f"{HERE}:unscaled", "-x")
    assert code == 1 and "properties not run" in out
    code, out, _ = run(capsys, "--json", "--dtype", "bf16", "--only", "plain")
    report = json.loads(out)
    assert code == 0 and not [name for name in report["levels"]["pairs"] if "fp32" in name]
    code, out, _ = run(capsys, "--list-backends", "--json")
    names = {row["name"] for row in json.loads(out)["backends"]}
    assert code == 0 and {"reference", "torch-sdpa", "flash-attn-4", "flex-attention"} <= names


def test_isolation_and_timeout(capsys) -> None:
    """A hang is a failure of its case, in seconds."""
    arguments = ("--only", "plain", "--timeout", "1.5")
    code, out, _ = run(capsys, "--backend", "tests.testing.faulty:hangs", *arguments)
    text = " ".join(out.split())
    assert code == 1 and "plain failed" in text and "NoAnswer" in text and "1.5" in text
    code, out, _ = run(capsys, "--isolate", "--only", "plain", "--max-examples", "1")
    assert code == 0


def test_json(capsys) -> None:
    """One document with a schema version; no table."""
    code, out, _ = run(
        capsys, "--json", "--backend", f"{HERE}:unscaled", "--only", "plain", "--seed", "2"
    )
    data = json.loads(out)
    assert code == 1 and data["schema_version"] == 3 and data["seed"] == 2
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
        (["--only", "other"], "no property matches 'other'"),
        (["--max-examples", "0"], "max_examples must be between 1 and 100000; got 0"),
        (["--steps", "0"], "steps must be between 1 and 1000; got 0"),
        (["--seed", "-1"], "seed must be at least 0; got -1"),
        (["--dtype", "int8"], "dtype must be one of fp32"),
        (["--jobs", "0"], "jobs must be between 1 and 256; got 0"),
        (["--timeout", "0"], "timeout must be above 0 seconds; got 0"),
        (["--timeout", "nan"], "timeout must be above 0 seconds; got nan"),
        (["--timeout", "1", "--no-isolate"], "a timeout needs isolation"),
    ],
)
def test_bad_input(capsys, arguments: list[str], message: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


def test_default_agrees_with_the_runner() -> None:
    """The number is written twice, because the command must not import the suite for --help."""
    assert command.DEFAULT_EXAMPLES == runner.DEFAULT_EXAMPLES
    assert command.DEFAULT_STEPS == runner.DEFAULT_STEPS
