"""`fa4 distributed` and `fa4 predict --gpus`: reports, pictures, refusals, ranks that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.support import call

CHEAP = ("--seqlen", "8k", "--heads", "8")


def report(*arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    code, out, err = call(*arguments, "--json")
    assert (code, err) == (0, ""), err
    found: dict[str, Any] = json.loads(out)
    return found


def test_predict_compares_methods() -> None:
    """The fastest first, its passes with a chain that adds up; and one method by its name."""
    found = report("predict", "--gpus", "4", "--pass", "bwd", "--causal", *CHEAP)
    times = [row["seconds"] for row in found["methods"]]
    assert times == sorted(times) and len(times) > 5
    assert [x["pass"] for x in found["passes"]] == ["fwd", "bwd"]
    for one in found["passes"]:
        assert sum(x["seconds"] for x in one["chain"]) == pytest.approx(one["seconds"])
        assert 0 < one["efficiency"] < 1 and "is last" in one["why"]
    named = report(
        "distributed", "predict", "--gpus", "4", "--causal", "--method", "zigzag", *CHEAP
    )
    assert [x["method"] for x in named["methods"]] == ["zigzag"]
    assert named["passes"][0]["seconds"] in times


def test_settings_reach_the_blocks() -> None:
    """A slower kernel takes longer, also across GPUs; another machine has its own link."""
    usual = report("predict", "--gpus", "2", "--method", "zigzag", *CHEAP)
    slow = report("predict", "--gpus", "2", "--method", "zigzag", "--q-tiles", "1", *CHEAP)
    assert slow["passes"][0]["one_gpu_seconds"] > 1.2 * usual["passes"][0]["one_gpu_seconds"]
    assert list(usual["links"]) == ["nvlink5"]
    other = report("predict", "--gpus", "2", "--machine", "h200", "--method", "zigzag", *CHEAP)
    assert list(other["links"]) == ["nvlink4"]


def test_a_plan_in_words_and_as_a_picture(tmp_path: Path) -> None:
    """Steps of one rank; both kinds of files."""
    pytest.importorskip("matplotlib")
    for name in ("ring.svg", "ring.png"):
        path = tmp_path / name
        found = report("distributed", "plan", "--gpus", "4", "--causal", "--picture", str(path),
                       "--rank", "1", *CHEAP)  # fmt: skip
        assert path.stat().st_size > 5000
    assert found["steps"][0].startswith("start hop0: kv to rank 2 (kv 1024:2048, 6144:7168")
    assert sum(step.startswith("compute") for step in found["steps"]) == 4


def test_check_says_what_is_wrong() -> None:
    """Exit code 1 for a plan that is not balanced enough."""
    options = ("--gpus", "4", "--causal", "--seqlen", "512", "--method", "contiguous")
    code, out, _ = call("distributed", "check", *options, "--most-imbalance", "1.2")
    assert code == 1 and "wrong: rank 3 computes 1.75 times the average" in " ".join(out.split())
    assert report("distributed", "check", *options)["findings"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "--link", "nvlink5"), "--link nvlink5 needs --gpus"),
        (("predict", "--gpus", "4", "--seqlen-q", "5"), "seqlen_q is not divided over GPUs"),
        (("predict", "--gpus", "4", "--compare", "tau=0"), "--gpus has no --compare and no --why"),
        (("predict", "--gpus", "4", "--dtype", "e4m3"), "dtype must be bf16 or fp16 across GPUs"),
        (("distributed", "plan", "--method", "maze"), "method must be one of auto, zigzag"),
        (("distributed", "plan", "--gpus", "65"), "gpus must be between 1 and 64; got 65"),
        (("distributed", "plan", "--rank", "8"), "--rank must be between 0 and 7; got 8"),
        (("distributed", "plan", "--picture", "x.gif"), "--picture must end in .svg or .png"),
        (("distributed", "check", "--seqlen", "2m"), "seqlen x heads must be at most 16777216"),
        (("distributed", "run", "--method", "zag"), "--method must be of zigzag"),
        (("distributed", "run", "--seqlen", "9k"), "--seqlen must be between 1 and 8192"),
        (("distributed", "run", "--gpus", "17"), "--gpus must be between 1 and 16; got 17"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    """One line, exit code 2."""
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("zigzag", ""),
        pytest.param("ulysses", "divides 3 query heads", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_started(
    method: str, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes over gloo are right; what one is refused ends both, in one line."""
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    options = ("--gpus", "2", "--seqlen", "40", "--heads", "3,1", "--method", method)
    code, _, err = call("distributed", "run", *options, "--json")
    assert (code == 2, len(err.splitlines())) == (bool(words), bool(words)) and words in err, err
    if not words:
        found = json.loads(capfd.readouterr().out)
        assert found["backend"] == "gloo" and [x["right"] for x in found["rows"]] == [True]
