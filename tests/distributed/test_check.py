"""The checker finds what is wrong with a plan, and nothing where nothing is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.distributed.check import check_plan, explore, find_deadlock, find_unmatched
from fa4.distributed.layout import make_layout
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import Sizes, Spec
from fa4.distributed.symbols import find_wrong_pairs
from tests.distributed.draws import PREFILL, specs
from tests.distributed.mutants import MUTANTS, VARIANTS, plan_of


def test_there_are_enough_mutants() -> None:
    """Of every kind of fault."""
    assert len(MUTANTS) >= 30 and len(VARIANTS) >= 5


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    """Each by the rule that is for it, in one line."""
    options, change, words = MUTANTS[name]
    plan = plan_of(**options)
    assert check_plan(plan).findings == ()
    found = check_plan(change(plan)).findings
    assert found and words in " | ".join(found), found
    assert all("\n" not in line and len(line) < 240 for line in found)


@pytest.mark.parametrize("name", VARIANTS)
def test_right_variants_are_not_rejected(name: str) -> None:
    """What is unlike our plans, and right."""
    options, change = VARIANTS[name]
    plan = plan_of(**options)
    changed = change(plan)
    assert changed != plan
    assert check_plan(changed).findings == ()


def test_balance_is_judged() -> None:
    """A contiguous causal ring computes (2P-1)/P of the average on its last rank."""
    report = check_plan(plan_of(layout="contiguous"), most_imbalance=1.05)
    assert report.balance == pytest.approx(7 / 4, rel=0.05)
    assert "times the average" in report.findings[0]
    assert check_plan(plan_of(), most_imbalance=1.05).findings == ()


@pytest.mark.parametrize("method", PREFILL)
@pytest.mark.parametrize("backward", [False, True])
def test_every_order_ends_alike(method: str, backward: bool) -> None:
    """What the checker takes from one order of delivery holds for all of them: three ranks."""
    options = {"ranks": 3, "backward": backward, "degree": 1}
    if method == "ulysses":
        options["ranks"] = 2
    assert explore(plan_of(method, **options)) == {True}


@pytest.mark.parametrize("name", [x for x in MUTANTS if MUTANTS[x][2] == "deadlock"])
def test_every_order_of_a_deadlock_is_stuck(name: str) -> None:
    """None of them gets through by luck."""
    options, change, _ = MUTANTS[name]
    assert explore(change(plan_of(**options))) == {False}


@given(specs(), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_one_order_tells_what_all_do(spec: Spec, random: object) -> None:
    """Random orders inside posts: the one run and all runs agree on whether it hangs."""
    from dataclasses import replace

    from fa4.distributed.plan import Post

    plan = make_plan(spec)
    programs = []
    for program in plan.programs:
        steps = []
        for step in program.steps:
            if isinstance(step, Post):
                turns = ["send"] * len(step.sends) + ["receive"] * len(step.receives)
                random.shuffle(turns)  # type: ignore[attr-defined]
                step = step._replace(in_turn=tuple(turns))
            steps.append(step)
        programs.append(program._replace(steps=tuple(steps)))
    shuffled = replace(plan, programs=tuple(programs))
    assert find_unmatched(shuffled) == []
    try:
        ends = explore(shuffled, most=400)
    except ValueError:
        return  # too many orders
    assert ends == {not find_deadlock(shuffled)}


@pytest.mark.parametrize("method", ["ring", "ring+ulysses"])
def test_many_ranks_take_seconds(method: str) -> None:
    """64 ranks, 4,096 rows."""
    begin = time.process_time()
    layout = make_layout("zigzag", 4096, 64)
    mask = plan_of().spec.mask._replace(documents=(0, 4096))
    spec = Spec(method, layout, layout, mask, Sizes(64, 8), degree=8, head_groups=2)
    assert check_plan(make_plan(spec)).findings == ()
    assert time.process_time() - begin < 30


def test_pairs_are_counted_by_the_heads() -> None:
    """A result of the wrong head shows, also where all rows are right."""
    options, change, _ = MUTANTS["one head group has no result"]
    found = find_wrong_pairs(change(plan_of(**options)))
    assert found == ["rank 0: row 0 met a wrong set of pairs (o, and 11 more)"]
