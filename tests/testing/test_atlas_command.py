"""`fa4 verify --corpus`: exit codes, what it prints for people and for machines."""

from __future__ import annotations

import json

import pytest

from fa4.commands import verify, verify_corpus
from fa4.testing.atlas import BUGS
from tests.testing.test_verify_command import run

HERE = "tests.testing.atlas"


def test_none_is_found(capsys) -> None:
    """One line, exit code 0."""
    code, out, _ = run(capsys, "--corpus", "--only", "pytorch*")
    count = sum(name.startswith("pytorch#") for name in BUGS)
    assert code == 0 and f"reference: 0 of {count} published bugs found, 0 not covered" in out


def test_one_is_found(capsys) -> None:
    """By the name of the published one, with a test to paste, exit code 1; -x ends there."""
    backend = ("--backend", f"{HERE}:vllm_39148")
    code, out, _ = run(capsys, "--corpus", *backend, "--only", "vllm*")
    assert code == 1 and out.count("def test_unlike_") == 1
    assert "like vllm#39148: Merging two parts without a key gave NaN." in out
    assert 'check_bug(BUGS["vllm#39148"]' in out and ": 1 of 4 published bugs found" in out
    code, out, _ = run(capsys, "--corpus", *backend, "--only", "vllm#39148", "--only", "jax*", "-x")
    assert code == 1 and "stopped at the first bug; 3 were not looked for" in out


def test_robustness_fails_only_if_asked(capsys) -> None:
    """As in the suite."""
    given = ("--corpus", "--backend", f"{HERE}:flash_attention_2374", "--only", "*#2374")
    code, out, _ = run(capsys, *given)
    assert code == 0 and "like flash-attention#2374 (not robust)" in out and "1 not robust," in out
    code, out, _ = run(capsys, *given, "--strict")
    assert code == 1 and "1 of 1 published bugs found" in out


def test_json(capsys) -> None:
    """A schema version, counts, and every bug with its status."""
    given = ("--json", "--corpus", "--backend", f"{HERE}:jax_19237", "--dtype", "bf16")
    code, out, _ = run(capsys, *given, "--only", "jax*", "--only", "*#2577", "--only", "b12x*")
    data = json.loads(out)
    assert code == 1 and data["schema_version"] == 1 and data["passed"] is False
    assert {row["name"]: row["status"] for row in data["bugs"]} == {
        "jax#19237": "failed", "jax#24491": "passed", "jax#27224": "passed", "b12x#63": "passed",
    }  # fmt: skip
    assert data["counts"] == {"passed": 3, "failed": 1, "not_covered": 0, "not_robust": 0}


def test_what_is_not_covered_is_listed(capsys) -> None:
    """By reason; nothing at all is no success."""
    minimal = ("--corpus", "--backend", "tests.testing.planted:minimal")
    code, out, _ = run(capsys, *minimal, "--only", "jax*")
    assert code == 0 and "not covered (jax#19237): causal: not in its signature" in out
    code, out, _ = run(capsys, *minimal, "--only", "jax#19237")
    assert code == 1 and "nothing could be checked, which is no success" in out


def test_isolation_and_timeout(capsys) -> None:
    """In a worker process, and a hang is a bug that was found."""
    code, out, _ = run(capsys, "--corpus", "--isolate", "--only", "jax*")
    assert code == 0 and "0 of 3" in out
    hangs = ("--backend", "tests.testing.test_atlas_command:hangs", "--timeout", "1.5")
    code, out, _ = run(capsys, "--corpus", *hangs, "--only", "jax#27224")
    assert code == 1 and "no answer within" in out and "1.5" in out


def hangs(q, k, v):  # type: ignore[no-untyped-def]
    """As a barrier that nobody completes."""
    import time

    time.sleep(1000)


def test_list(capsys) -> None:
    """All of them, or some, with their cases; nothing is run."""
    code, out, _ = run(capsys, "--corpus", "--list", "--json")
    rows = json.loads(out)["bugs"]
    assert code == 0 and [row["name"] for row in rows] == list(BUGS)
    assert all(row["cases"][0].startswith("Case(") and row["number"] > 0 for row in rows)
    code, out, _ = run(capsys, "--corpus", "--list", "--only", "jax*")
    assert code == 0 and "jax#19237" in out and "pytorch" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1"], "the cases of --corpus are fixed: --seed must be left out; got 1"),
        (["--max-examples", "5"], "--max-examples must be left out; got 5"),
        (["--jobs", "2"], "--jobs must be left out; got 2"),
        (["--only", "x"], "no bug of the atlas matches 'x'"),
        (["--dtype", "int8"], "dtype must be one of fp32"),
        (["--dtype", "fp64"], "has a case in ['fp64']"),
        (["--backend", "nothing"], "back end must be one of"),
        (["--timeout", "0"], "timeout must be above 0 seconds; got 0"),
        (["--timeout", "1", "--no-isolate"], "a timeout needs isolation"),
        (["--list", "--only", "x"], "no bug of the atlas matches 'x'"),
    ],
)
def test_bad_input(capsys, arguments: list[str], message: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    code, out, err = run(capsys, "--corpus", *arguments)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


def test_defaults_agree_with_the_command() -> None:
    """Of the options that must be left out."""
    import inspect

    parameters = inspect.signature(verify.verify).parameters
    for spelling, default in verify_corpus.DRAWN.items():
        assert parameters[spelling.removeprefix("--").replace("-", "_")].default == default
