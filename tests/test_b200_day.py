"""The program of a day on a B200: what can be tested without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa4.hardware import B200, B300
from fa4.plan import check_plan
from lab.hardware import b200_day
from lab.hardware.b200_day import (
    QUESTIONS,
    agreeing,
    journal_designs,
    machines,
    predicted,
    ranked,
    read,
)


def test_ten_questions_whose_kernels_have_sound_plans() -> None:
    """On both machines; each question compares two different kernels."""
    assert len(QUESTIONS) == 10 == len({question.name for question in QUESTIONS})
    for question in QUESTIONS:
        assert question.first != question.second
        for kernel in (question.first, question.second):
            for gpu in (B200, B300):
                assert check_plan(kernel.spec(gpu).plan, gpu) == []


def test_sets_of_constants_disagree_about_each() -> None:
    """A question whose answer all sets know already would decide nothing."""
    for question in QUESTIONS:
        said = predicted(question)
        assert len(said) == len(machines()) and max(said) / min(said) > 1.01, question.name


@pytest.mark.parametrize("truth", [0, 7, 24])
def test_the_true_set_is_found(truth: int) -> None:
    """Measured as one set predicts: it is left, most others are not."""
    measured = {question.name: predicted(question)[truth] for question in QUESTIONS}
    left, near_each = agreeing(measured)
    assert truth in left and len(left) < len(machines()) / 2
    assert all(truth in near for near in near_each.values())


def day(path: Path, factor: float = 1.0) -> Path:
    """A day's file as set 3 predicts it, the first answer off by a factor."""
    ratios = {question.name: predicted(question)[3] for question in QUESTIONS}
    ratios[QUESTIONS[0].name] *= factor
    path.write_text(json.dumps({"ratios": ratios}), encoding="utf-8")
    return path


def test_a_day_is_read(tmp_path: Path) -> None:
    """Sets that agree, and the designs of a journal by these alone."""
    journal = tmp_path / "search.jsonl"
    settings = {
        "tile_n": 128, "piece": 128, "groups": 1, "buffers": 1, "joint_scores": False,
        "order": "tiles", "softmax": "serial", "maximum": "exact", "row_sums": "after",
        "correction": "warpgroup", "stagger": True, "cta_group": 1, "q_tiles": 2, "q_buffers": 1,
        "ping_pong": True, "split_p": 0.75, "exp2": 10, "scheduler": "static", "value_bytes": 2,
    }  # fmt: skip
    rows = [{"search": {}}, {"design": settings, "status": "good", "least": 1.0},
            {"design": settings, "status": "behind", "least": 2.0}]  # fmt: skip
    journal.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    lines = read(day(tmp_path / "day.json"), journal)
    assert len(lines) == len(QUESTIONS) + 2
    rate = float(lines[-1].split()[0])
    assert 1400 < rate < 1700
    assert len(journal_designs(journal)) == 1


def test_a_day_that_no_set_explains(tmp_path: Path) -> None:
    """The model is wrong, and the program says so."""
    lines = read(day(tmp_path / "day.json", 1.5), None)
    assert lines[-2].startswith("0 of 25 sets")
    assert lines[-1].startswith("the model is wrong")
    with pytest.raises(ValueError, match="no question 'colour'; there are narrow scores"):
        agreeing({"colour": 1.0})


def test_designs_are_ranked_by_their_least() -> None:
    """Over the sets that are left."""
    own, other, *_ = machines()
    designs = [("a", lambda m: 3.0 if m is own else 1.0), ("b", lambda m: 2.0)]
    assert ranked(designs, [own, other]) == [(2.0, "b"), (1.0, "a")]
    assert ranked(designs, [own]) == [(3.0, "a"), (2.0, "b")]


def test_its_commands_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each question."""
    monkeypatch.setattr("sys.argv", ["b200_day", "predict"])
    b200_day.main()
    assert len(capsys.readouterr().out.splitlines()) == len(QUESTIONS)
