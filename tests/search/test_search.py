"""The search for designs: a small space searched is that space compared in full."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import Problem, WarpgroupPipeline
from fa4.designs import design_of, designs, pieces
from fa4.hardware import B200, B300, H200, RUBIN
from fa4.plan.halves import halves_numerics, halves_pipeline
from fa4.plan.pieces import PiecesPipeline
from fa4.plan.schema import PipelinePlan
from fa4.search import judge as judging
from fa4.search.journal import Journal
from fa4.search.judge import BEHIND, GOOD, Judge, Verdict, all_constants, moved_figures, refusal
from fa4.search.run import Effort, Judged, Search, SearchOutcome
from fa4.search.space import DesignSpace, find_space
from fa4.sim.machine import find_machine
from tests.plan.plans import drop_arrives

MACHINE = find_machine("b200")
CALL = Problem(batch=2, seqlen_q=2048, seqlen_k=2048, heads_q=16, heads_k=16, head_dim=128)
SPACE = find_space(CALL, B200, backward=False, narrow_values=False)
SMALL = SPACE.restricted(
    {"piece": ["64", "128"], "tile_n": ["128"], "order": ["tiles"], "row_sums": ["after"],
     "q_buffers": ["1"], "ping_pong": ["True"], "split_p": ["1.0"], "exp2": ["0", "10"],
     "scheduler": ["static"], "q_tiles": ["2"], "cta_group": ["1", "2"], "stagger": ["False"]}
)  # fmt: skip
# Three sets of constants: enough to race with, few enough to compare in full.
JUDGE = replace(Judge.of(CALL, MACHINE), machines=(MACHINE, *all_constants(MACHINE)[:2]))


class Given(Judge):
    """A judge whose rates are given: a made-up truth. Sets of constants differ by a tenth."""

    rates_of: Mapping[int, float]
    asked: list[int]

    def judge(self, pipeline: Any, at_least: float = 0.0) -> Verdict:
        """The given rate, and a tenth less by the second set, which is not asked in vain."""
        self.asked.append(pipeline)
        rate = self.rates_of.get(pipeline, 1.0)
        if rate < at_least:
            return Verdict(status=BEHIND, tflops=rate, least=rate, most=rate, sets=1)
        if 0.9 * rate < at_least:
            return Verdict(status=BEHIND, tflops=rate, least=0.9 * rate, most=rate, sets=2)
        return Verdict(status=GOOD, tflops=rate, least=0.9 * rate, most=rate, sets=2)


def made_up(rates: Mapping[int, float], size: int = 64) -> tuple[DesignSpace, Given]:
    """A space of numbers, three axes of four options, and their judge."""
    axes = tuple(tuple({name: n} for n in range(4)) for name in "abc")
    space = DesignSpace(axes=axes, make=lambda s: 16 * s["a"] + 4 * s["b"] + s["c"])  # type: ignore[arg-type,return-value]
    found = Given(problem=CALL, machines=(), simulation=JUDGE.simulation)
    object.__setattr__(found, "rates_of", rates)
    object.__setattr__(found, "asked", [])
    return space, found


def best_of(outcome: SearchOutcome) -> list[tuple[int, float]]:
    """(design, its least rate) of the leaders."""
    return [(x.number, x.verdict.least) for x in outcome.leaders]


def test_a_search_finds_what_a_full_comparison_finds() -> None:
    """Every design by every set of constants, ranked: the same leaders as the race has."""
    outcome = Search(SMALL, JUDGE, Effort(limit=len(SMALL), top=3)).run()
    full: list[tuple[float, int]] = []
    seen = set()
    for number in range(len(SMALL)):
        try:
            pipeline = SMALL.make(SMALL.settings(number))
            if pipeline in seen:
                continue
            seen.add(pipeline)
            full.append((-min(JUDGE.rates(pipeline)), number))
        except ValueError:
            continue
    assert outcome.ended == "everything judged"
    assert [number for _, number in sorted(full)[:3]] == [x.number for x in outcome.leaders]
    assert outcome.counts[BEHIND] > 0  # some were spared the other sets
    assert sum(outcome.counts.values()) == len(SMALL)


@settings(max_examples=60)
@given(st.lists(st.floats(1.0, 9.0), min_size=64, max_size=64), st.integers(1, 5))
def test_no_leader_is_missed(rates: list[float], top: int) -> None:
    """Whatever the truth, a space that is judged in full gives its best designs, in order."""
    space, judge = made_up(dict(enumerate(rates)))
    outcome = Search(space, judge, Effort(limit=64, top=top)).run()
    wanted = sorted(range(64), key=lambda n: (-0.9 * rates[n], n))[:top]
    assert [x.number for x in outcome.leaders] == wanted
    assert outcome.judged == 64


def test_a_hill_is_climbed_from_the_draw() -> None:
    """Of a space beyond the limit, neighbours of the best are judged until none is better."""
    space, judge = made_up({n: 1.0 + sum(divmod(n, 16)) for n in range(64)})
    outcome = Search(space, judge, Effort(limit=48, top=1)).run()
    assert outcome.leaders[0].number == 63
    assert outcome.ended in ("limit", "no neighbour is better")
    assert outcome.judged <= 48


def test_the_draw_is_the_same_each_time() -> None:
    """Two searches judge the same designs in the same order."""
    asked = []
    for _ in range(2):
        space, judge = made_up({n: float(n % 7) for n in range(64)})
        Search(space, judge, Effort(limit=20, top=2)).run()
        asked.append(list(judge.asked))
    assert asked[0] == asked[1] and len(asked[0]) == 20


def test_neighbours_differ_in_one_option() -> None:
    """And every design has all of them."""
    space, _ = made_up({})
    for number in (0, 21, 63):
        found = list(space.neighbours(number))
        assert len(found) == len(set(found)) == 9 and number not in found
        for other in found:
            pair = space.settings(number).items() ^ space.settings(other).items()
            assert len({name for name, _ in pair}) == 1
    with pytest.raises(IndexError):
        space.settings(64)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Puts another function in the place of the one that makes plans of scores in pieces."""

    def put(plan: Any) -> None:
        monkeypatch.setattr(pieces, "DESIGN", replace(pieces.DESIGN, plan=plan))
        designs.cache_clear()

    yield put
    monkeypatch.undo()
    designs.cache_clear()


def test_a_plan_that_deadlocks_is_pruned_with_its_cycle(planted: Callable[[Any], None]) -> None:
    """Planted: the correction warps never tell that O is rescaled."""
    made = pieces.DESIGN.plan

    def broken(pipeline: PiecesPipeline, gpu: Any) -> PipelinePlan:
        plan = made(pipeline, gpu)
        return drop_arrives(plan, "correction", "stats0_empty") if pipeline.q_tiles == 1 else plan

    planted(broken)
    space = SPACE.restricted({"q_tiles": ["1", "2"], "tile_n": ["128"], "piece": ["128"],
                              "correction": ["warpgroup"], "stagger": ["False"], "exp2": ["0"],
                              "row_sums": ["after"], "split_p": ["1.0"], "groups": ["1"],
                              "scheduler": ["static"], "q_buffers": ["1"]})  # fmt: skip
    outcome = Search(space, JUDGE, Effort(limit=len(space))).run()
    assert outcome.counts["deadlock"] == outcome.counts[GOOD] + outcome.counts[BEHIND] > 0
    assert "cycle: softmax0 -(stats0_empty)-> correction" in outcome.examples["deadlock"]
    assert all(space.settings(x.number)["q_tiles"] == 2 for x in outcome.leaders)


def test_a_plan_that_is_not_sound_is_pruned(planted: Callable[[Any], None]) -> None:
    """Planted: one place for maxima, which are overwritten before they are read. It ends."""
    made = pieces.DESIGN.plan

    def broken(pipeline: PiecesPipeline, gpu: Any) -> PipelinePlan:
        plan = made(pipeline, gpu)
        return replace(plan, buffers=tuple(replace(b, stages=1) if b.name == "row_max0a" else b
                                           for b in plan.buffers))  # fmt: skip

    planted(broken)
    found = JUDGE.judge(PiecesPipeline(groups=2, piece=64))
    assert found.status == "unsound"
    assert "row_max0a: write maximum 0a of softmax0a may come before" in found.reason


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("registers: a softmax thread needs 184 and has 104", "registers"),
        ("TMEM plan needs 544 columns", "tensor memory"),
        ("shared memory plan needs 237920 bytes", "shared memory"),
        ("pieces of scores lie in tensor memory; H200 has none", "machine"),
        ("something else", "refused"),
    ],
)
def test_reasons_are_counted_by_kind(message: str, kind: str) -> None:
    """What does not fit, by what it does not fit into."""
    assert refusal(ValueError(message)).status == kind
    assert refusal(RuntimeError(message)).status == "deadlock"


def test_a_journal_is_taken_up_again(tmp_path: Path) -> None:
    """An interrupted search keeps what it has; taken up, it judges the rest only."""
    space, judge = made_up({n: float(n % 13) for n in range(64)})
    whole = best_of(Search(space, judge, Effort(limit=64, top=3)).run())
    file = tmp_path / "search.jsonl"
    journal = Journal(file, {"call": "a"})
    stopped = Search(space, judge, Effort(limit=64, top=3), journal=journal)

    def stop(outcome: SearchOutcome) -> None:
        if outcome.judged == 20:
            raise KeyboardInterrupt

    stopped.progress = stop
    assert stopped.run().ended == "interrupted"
    journal.close()
    with file.open("a", encoding="utf-8") as broken:
        broken.write('{"design": {"a": 1')  # cut off in the middle of a line
    judge.asked.clear()
    journal = Journal(file, {"call": "a"})
    again = Search(space, judge, Effort(limit=64, top=3), journal=journal).run()
    journal.close()
    assert (best_of(again), again.reused, len(judge.asked)) == (whole, 20, 44)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 65 and all(json.loads(line) for line in lines)


def test_journals_of_other_searches_are_refused(tmp_path: Path) -> None:
    """With what differs; and files that are none, which stay as they are."""
    file = tmp_path / "search.jsonl"
    Journal(file, {"call": "a"}).close()
    with pytest.raises(ValueError, match="holds another search: call a, this one has b"):
        Journal(file, {"call": "b"})
    for content in ("no line", "{}\n", "[1]\n"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="not the journal of a search"):
            Journal(file, {"call": "a"})
        assert file.read_text(encoding="utf-8") == content
    file.write_text('{"search": {"call": "a"}}\n{"status": "good"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is no verdict"):
        Journal(file, {"call": "a"})


def test_processes_find_the_same() -> None:
    """Two processes, the same leaders."""
    one, two = (Search(SMALL, JUDGE, Effort(limit=len(SMALL), top=2, jobs=n)).run() for n in (1, 2))
    assert best_of(one) == best_of(two)


def test_what_is_far_behind_today_is_not_compared_in_full() -> None:
    """A floor spares it the other sets, and the leaders are those above."""
    space, judge = made_up({n: float(n) for n in range(64)})
    outcome = Search(space, judge, Effort(limit=64, top=50, floor=45.0)).run()
    assert [x.number for x in outcome.leaders] == list(range(63, 49, -1))


def test_a_search_ends_in_time() -> None:
    """And says that it was the time."""
    space, judge = made_up({})
    assert Search(space, judge, Effort(limit=64, seconds=-1.0)).run().ended == "seconds"


def test_spaces_are_those_of_the_machine() -> None:
    """Loads with a maximum and a third Q tile where they exist; Hopper's own; backward kernels."""

    def options(gpu: Any, name: str) -> set[str]:
        space = find_space(CALL, gpu, backward=False, narrow_values=False)
        return {str(x[name]) for axis in space.axes for x in axis if name in x}

    assert "loaded" in options(B300, "maximum") and "loaded" not in options(B200, "maximum")
    assert options(RUBIN, "q_tiles") == {"1", "2", "3"}
    assert options(B300, "exp2") == {"0"}
    hopper = find_space(CALL, H200, backward=False, narrow_values=False)
    assert isinstance(hopper.make(hopper.settings(5)), WarpgroupPipeline)
    assert len(find_space(CALL, B200, backward=True, narrow_values=False)) == 48
    with pytest.raises(ValueError, match="fp8-values needs forward products from tensor memory"):
        find_space(CALL, H200, backward=False, narrow_values=True)
    with pytest.raises(ValueError, match="backward designs need tensor memory; H200 has none"):
        find_space(CALL, H200, backward=True, narrow_values=False)


def test_restrictions_say_what_there_is() -> None:
    """Unknown settings and values, and those that exclude each other."""
    with pytest.raises(ValueError, match="no setting 'colour' in this space; it has buffers"):
        SPACE.restricted({"colour": ["red"]})
    with pytest.raises(ValueError, match="groups must be among 1, 2; got '3'"):
        SPACE.restricted({"groups": ["3"]})
    with pytest.raises(ValueError, match="no design has correction inline; stagger True together"):
        SPACE.restricted({"correction": ["inline"], "stagger": ["True"]})


def test_sets_of_constants() -> None:
    """Blackwell's with the floor of narrow products spread over its interval; Hopper's, moved."""
    found = all_constants(MACHINE)
    floors = sorted(x.costs.mma_floor_cycles for x in found)
    assert len(set(floors)) == len(found) and (floors[0], floors[-1]) == (40.0, 44.0)
    assert "vector_efficiency" in moved_figures((MACHINE, *found))
    hopper = find_machine("h200")
    assert len(all_constants(hopper)) == 2 * len(judging.MOVED)
    assert set(moved_figures((hopper, *all_constants(hopper)))) == set(judging.MOVED)


def test_leaders_have_an_order() -> None:
    """By the least rate, then by number; no more than asked for."""
    outcome = SearchOutcome(space=SPACE, top=2)
    for number, least in ((5, 1.0), (3, 1.0), (4, 2.0)):
        verdict = Verdict(status=GOOD, tflops=3.0, least=least, most=3.0, sets=1)
        outcome.add(Judged(number, PiecesPipeline(), verdict))
    assert best_of(outcome) == [(4, 2.0), (3, 1.0)]
    assert outcome.at_least == 1.0


def test_a_design_that_is_built_is_said_to_be() -> None:
    """By the name of its kernel; one that differs in a choice that the kernel has not is none."""
    numerics = halves_numerics("bf16", 128, False, emulate=True)
    built = halves_pipeline(head_dim=128, head_dim_v=128, numerics=numerics, cta_group=2,
                            scheduler="static")  # fmt: skip
    assert design_of(built).name == "halves"
    for other in ({"split_p": 1.0}, {"joint_scores": False}, {"row_sums": "tensor", "head_dim": 64,
                  "head_dim_v": 64}, {"correction": "warpgroup"}):  # fmt: skip
        assert design_of(replace(built, **other)).compiled is None


def test_unequal_work_tiles_go_the_longest_first() -> None:
    """Of a causal call the search has no other order, since a stride over them is slower: today's
    kernel and the found one by all sets of constants, one CTA and a pair."""
    call = replace(CALL, seqlen_q=4096, seqlen_k=4096, causal=True)
    space = find_space(call, B200, backward=False, narrow_values=False)
    orders = {space.settings(number)["scheduler"] for number in range(0, len(space), 997)}
    assert orders == {"lpt"}
    judge = Judge.of(call, find_machine("b200"))
    for name in ("forward", "halves"):
        (design,) = (one for one in designs() if one.name == name)
        assert design.choose is not None
        chosen = design.choose(call, B200, False)
        for pair in (1, 2):
            longest, stride = (
                judge.rates(replace(chosen, cta_group=pair, scheduler=order))
                for order in ("lpt", "static")
            )
            assert all(x > y for x, y in zip(longest, stride, strict=True)), (name, pair)
