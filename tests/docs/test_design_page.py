"""docs/design.md: its tables are the records'; what it says of them is so."""

from __future__ import annotations

import pytest

from fa4.config import Problem
from fa4.hardware import B200
from fa4.plan import check_plan
from fa4.plan.pieces_plan import pieces_plan
from fa4.search.space import find_space
from lab.hardware.hopper_designs.compare import rank_correlation, summarize
from lab.pages.design_tables import PAGE, TABLES, calls, first, problems, words

TEXT = PAGE.read_text(encoding="utf-8")


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.design_tables."""
    assert list(TABLES.stale(TEXT)) == []


def test_a_changed_row_is_found() -> None:
    """In any of the tables."""
    assert list(TABLES.stale(TEXT.replace("times today's", "times"))) == ["found"]


def test_leaders_are_as_recorded() -> None:
    """The first by its least rate; its plan is sound; all sets give it more than today's has."""
    for name, report in calls().items():
        least = [row["least_tflops"] for row in report["leaders"]]
        assert least == sorted(least, reverse=True), name
        assert least[0] > report["today"]["least_tflops"]
        assert not report["leaders"][0]["undecided"] and first(name)["gain_interval"][0] > 1.0
    problem = Problem(seqlen_q=16384, seqlen_k=16384, heads_q=16, heads_k=16, head_dim=128)
    space = find_space(problem, B200, backward=False, narrow_values=False)
    pipeline = space.make(first("d128")["settings"])
    assert check_plan(pieces_plan(pipeline, B200), B200) == []  # type: ignore[arg-type]


def test_what_the_page_says_of_the_leader() -> None:
    """Four warpgroups, one product for both halves, rescaled by the softmax warps of a pair."""
    settings = first("d128")["settings"]
    assert (settings["groups"], settings["q_tiles"], settings["cta_group"]) == (2, 2, 2)
    assert settings["joint_scores"] and settings["correction"] == "inline"
    assert "2 groups, one product for both" in words(settings)


def test_the_hopper_records_add_up() -> None:
    """Rank, regret and errors are those of the rows."""
    for found in problems().values():
        rows = found["rows"]
        plan = {
            "predicted": {x["name"]: x["predicted"] for x in rows if x["predicted"]},
            "variants": {x["name"]: x["fields"] for x in rows},
        }
        again = summarize(plan, found["problem"], {x["name"]: x["tflops"] for x in rows})
        for key in ("rank_correlation", "regret", "regret_to_today", "bias_of_best", "first"):
            assert again[key] == pytest.approx(found[key]) if key != "first" else True


def test_rank_and_regret_of_made_up_rates() -> None:
    """Equal values share a rank; a first choice that is the fastest loses nothing."""
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1.0)
    predicted = {f"d {kind} {n}": {"tflops": 100.0 + n, "least": 90.0 + n, "most": 110.0}
                 for n, kind in enumerate(("best", "best", "random"))}  # fmt: skip
    plan = {"predicted": predicted, "variants": {name: {} for name in (*predicted, "d today")}}
    rates = {"d best 0": 50.0, "d best 1": 100.0, "d random 2": 80.0, "d today": 125.0}
    found = summarize(plan, {}, rates)
    assert (found["first"], found["regret"]) == ("d random 2", pytest.approx(0.2))
    assert found["regret_to_today"] == pytest.approx(0.36)
    assert found["bias_of_best"] == pytest.approx((1.0 + 0.01) / 2)
