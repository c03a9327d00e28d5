"""`fa4 design`: a small space from the command line, its journal, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fa4 import cli
from fa4.search.run import Search

SMALL = ("--only", "tile_n=128", "--only", "piece=64,128", "--only", "groups=2", "--only",
         "joint_scores=True", "--only", "row_sums=after", "--only", "q_buffers=1", "--only",
         "split_p=1.0", "--only", "exp2=10", "--only", "ping_pong=True", "--only", "order=tiles",
         "--only", "cta_group=2", "--only", "scheduler=static", "--only", "softmax=serial",
         "--only", "maximum=exact", "--seqlen", "2k",
         "--jobs", "1")  # fmt: skip


def run(*arguments: str) -> int:
    """The exit code of `fa4 design`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["design", *arguments])
    return int(ended.value.code or 0)


def test_a_report_for_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Leaders with interval and reasons, what was pruned, what would decide; a journal."""
    file = tmp_path / "search.jsonl"
    assert run(*SMALL, "--json", "--resume", str(file)) == 0
    report = json.loads(capsys.readouterr().out)
    first = report["leaders"][0]
    assert first["least_tflops"] <= first["tflops"] <= first["most_tflops"]
    assert report["ended"] == "everything judged" and report["sets"] == 24
    assert report["judged"] == report["designs"] == 6
    assert sum(row["count"] for row in report["pruned"].values()) + report["can_run"] == 6
    assert {"count", "example"} == set(report["pruned"]["contradiction"])
    assert report["why"]["limited_by"] and report["why"]["chain"]
    assert len(report["deciding"]["first_over_second"]) == 2
    assert run(*SMALL, "--json", "--resume", str(file)) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["leaders"] == report["leaders"]
    assert again["from_journal"] == report["judged"] - report["pruned"]["contradiction"]["count"]


def test_a_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the settings, why and what to measure."""
    assert run(*SMALL) == 0
    out = capsys.readouterr().out
    for words in ("designs judged in", "pruned, contradiction:", "today:", "leaders",
                  "chain of a step", "limited by", "to decide between", "groups=2"):  # fmt: skip
        assert words in out, words


def test_an_interrupted_search_says_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after some designs: their report, and the exit code of an interruption."""
    taken = Search._add

    def add(self: Search, *given: Any) -> None:
        taken(self, *given)
        if self.outcome.judged >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_add", add)
    assert run(*SMALL, "--json") == 130
    report = json.loads(capsys.readouterr().out)
    assert report["ended"] == "interrupted" and 0 < report["judged"] < 6


def test_nothing_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the number that it does not fit into."""
    assert run(*SMALL, "--only", "q_tiles=2", "--head-dim", "256") == 1
    out = capsys.readouterr().out
    assert "no design can run" in out and "TMEM plan needs" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--machine", "b100"), "machine must be"),
        (("--pass", "sideways"), "--pass must be one of fwd, forward, bwd, backward"),
        (("--machine", "h200", "--pass", "backward"), "backward designs need tensor memory"),
        (("--machine", "h200", "--fp8-values"), "fp8-values needs forward products"),
        (("--limit", "0"), "--limit must be"),
        (("--top", "0"), "--top must be"),
        (("--seconds", "-1"), "--seconds must be positive"),
        (("--seqlen", "none"), "--seqlen must be a whole number"),
        (("--rescale-rate", "2"), "rescale_rate must be between 0 and 1; got 2.0"),
        (("--only", "groups"), "expected NAME=VALUE"),
        (("--only", "groups=1", "--only", "groups=2"), "--only gives groups twice"),
        (("--only", "groups=7"), "groups must be among 1, 2"),
        (("--only", "maximum=loaded"), "maximum must be among exact, speculative"),
        (("--only", "softmax=interleaved", "--only", "maximum=speculative"), "no design has"),
        (("--dask", "localhost:1", "--jobs", "2"), "exclude each other"),
        (("--head-dim", "0"), "head_dim"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What, the value, what is allowed."""
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("fa4: error: ") and error.count("\n") == 1
    assert message in error


def test_another_journal_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And left as it is."""
    file = tmp_path / "other.txt"
    file.write_text("my notes\n", encoding="utf-8")
    assert run(*SMALL, "--resume", str(file)) == 2
    assert "is not the journal of a search" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "my notes\n"
