"""Forward kernels with scores in pieces: today's plan is one of them, all that fit are sound."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import Exp2Split, ForwardConfig, ForwardPipeline
from fa4.hardware import B200, B300, H200, RUBIN
from fa4.plan import check_plan, forward_plan
from fa4.plan.pieces import CHOICES, PiecesPipeline
from fa4.plan.pieces_plan import pieces_plan
from fa4.plan.pieces_products import issue_order
from fa4.plan.schema import Arrive, PipelinePlan, Wait, walk
from fa4.sim import engine
from fa4.sim.code import PipelineDeadlock
from tests.plan.plans import drop_arrives, edit_role, event_code, trips

SPLIT = Exp2Split(frequency=10, start_fragment=1)
HALVES: dict[str, Any] = {"groups": 2, "piece": 64}


def pieces(**choices: Any) -> PipelinePlan:
    """The plan of such a kernel on a B200."""
    return pieces_plan(PiecesPipeline(**choices), B200)


PIECES = {
    "as today": pieces(stagger=True, split_p=0.75),
    "four warpgroups": pieces(**HALVES, cta_group=2),
    "four, inline": pieces(**HALVES, cta_group=2, correction="inline", maximum="speculative"),
    "four, one product": pieces(**HALVES, joint_scores=True),
    "four, one product, inline": pieces(
        **HALVES, joint_scores=True, correction="inline", cta_group=2, split_p=0.75
    ),
    "four buffers": pieces(piece=64, buffers=2, cta_group=2),
    "interleaved": pieces(piece=64, buffers=2, softmax="interleaved"),
    "two pieces, one buffer": pieces(piece=64, split_p=0.5),
    "sums by products": pieces(head_dim=64, row_sums="tensor", tile_n=64, piece=64),
    "two Q buffers": pieces(head_dim=64, q_buffers=2, row_sums="merged"),
    "FP8 values": pieces(**HALVES, value_bytes=1),
    "wide": pieces(head_dim=192, head_dim_v=128, cta_group=2, order="tiles", scheduler="lpt"),
}


def test_todays_kernel_is_one_of_them() -> None:
    """The same roles, signals, tensor memory and work as `forward_plan`, by other names."""
    for group in (1, 2):
        old = forward_plan(
            ForwardPipeline(cta_group=group, numerics=ForwardConfig(exp2=SPLIT)), B200
        )
        new = pieces(cta_group=group, stagger=True, split_p=0.75, exp2=SPLIT)
        assert [role.name for role in old.roles] == [role.name for role in new.roles]
        assert len(old.signals) == len(new.signals)
        assert old.bytes_used("tmem") == new.bytes_used("tmem")
        ends = [engine.execute(event_code(plan), trips(9, 9)).end for plan in (old, new)]
        assert ends[0] == pytest.approx(ends[1], rel=0.02)  # it also reads and writes its sums


@pytest.mark.parametrize("name", PIECES)
def test_plans_are_sound(name: str) -> None:
    """No rule finds anything."""
    assert check_plan(PIECES[name], B200) == []


@pytest.mark.parametrize("name", PIECES)
def test_every_arrive_is_needed(name: str) -> None:
    """Without any one role's arrives on a signal work tiles end in a deadlock."""
    plan, tiles = PIECES[name], trips(9, 9, 9)
    engine.execute(event_code(plan), tiles)
    for signal in plan.signals:
        for role in signal.arrivals:
            with pytest.raises(PipelineDeadlock):
                engine.execute(event_code(drop_arrives(plan, role, signal.name)), tiles)


@pytest.mark.parametrize(
    "name", ["four warpgroups", "four buffers", "four, inline", "four, one product, inline"]
)
def test_every_wait_is_needed(name: str) -> None:
    """Without all of a role's waits on a signal a rule finds something."""
    plan = PIECES[name]
    for role in plan.roles:
        for signal in {step.signal for step in walk(role.steps) if isinstance(step, Wait)}:
            dropped = edit_role(
                plan, role.name,
                lambda s, signal=signal: () if isinstance(s, Wait) and s.signal == signal else (s,),
            )  # fmt: skip
            assert check_plan(dropped, B200), (role.name, signal)


def test_maxima_need_both_of_their_places() -> None:
    """With one place for a maximum, a warpgroup may write the next over one that is not read."""
    plan = PIECES["four warpgroups"]
    single = replace(
        plan,
        buffers=tuple(replace(b, stages=1) if b.name == "row_max0a" else b for b in plan.buffers),
    )
    found = check_plan(single, B200)
    assert found and {finding.rule for finding in found} == {"ordered_accesses"}


def test_rescales_wait_for_the_other_pieces_products() -> None:
    """S of one half does not tell that P V of the other half has ended: O needs its own signal."""
    plan = PIECES["four warpgroups"]
    early = edit_role(
        plan, "correction",
        lambda s: () if isinstance(s, Wait) and s.signal == "pv0_done" else (s,),
    )  # fmt: skip
    early = edit_role(
        early, "mma", lambda s: () if isinstance(s, Arrive) and s.signal == "pv0_done" else (s,)
    )
    early = replace(early, signals=tuple(s for s in early.signals if s.name != "pv0_done"))
    assert any("o0" in str(finding) for finding in check_plan(early, B200))


def test_scores_are_as_far_ahead_as_there_are_buffers() -> None:
    """Each product of scores comes after P V of the piece whose buffer it takes."""
    for buffers in (1, 2, 4):
        pipeline = PiecesPipeline(tile_n=256, piece=64, buffers=buffers, q_tiles=1)
        order = issue_order(pipeline)
        for before, after in zip(order[::2], order[1::2], strict=True):
            assert (before.kind, after.kind) == ("values", "scores")
            ahead = after.turn + (pipeline.turns if after.following else 0) - before.turn
            assert ahead == buffers


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tile_n": 128, "piece": 96}, "piece x groups = 96 x 1 = 96; got 128"),
        ({"piece": 64, "buffers": 3}, "divide the 2 pieces"),
        ({"softmax": "interleaved"}, "needs 2 buffers of scores or more; got 1"),
        ({"joint_scores": True}, "joint_scores needs several groups"),
        ({"order": "groups"}, "order groups needs several groups"),
        ({"q_tiles": 1, "stagger": True}, "stagger needs 2 Q tiles"),
        ({"q_buffers": 2, "scheduler": "lpt"}, "q_buffers 2 needs CTAs of several work tiles"),
        ({"element_bytes": 1}, "element_bytes 1 needs value_bytes 1; got 2"),
        ({"piece": 64, "buffers": 2, "softmax": "interleaved", "maximum": "speculative"},
         "knows each maximum in time"),
        ({"q_tiles": 5}, "q_tiles must be between 1 and 4"),
        ({"split_p": 0.0}, "split_p must be in (0, 1]"),
        ({"maximum": "loaded"}, "needs tcgen05.ld.red of sm_103a, sm_107a; B200 is sm_100a"),
        ({"q_tiles": 3}, "a softmax thread needs 184 and has 120"),
        ({"q_tiles": 3, "tile_n": 64, "piece": 64}, "TMEM plan needs 576 columns"),
        ({"row_sums": "tensor"}, "TMEM plan needs 544 columns"),
        ({"groups": 2, "tile_n": 256}, "a softmax thread needs 184 and has 96"),
        ({"kv_stages": 9}, "shared memory plan needs"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_number(choices: dict[str, Any], message: str) -> None:
    """Contradictions, and what does not fit."""
    with pytest.raises(ValueError) as raised:
        pieces(**choices)
    assert message in str(raised.value)


def test_machines_without_a_unit() -> None:
    """No tensor memory: refused; loads with a maximum and wider tensor memory where they exist."""
    with pytest.raises(ValueError, match="H200 has none"):
        pieces_plan(PiecesPipeline(), H200)
    assert check_plan(pieces_plan(PiecesPipeline(maximum="loaded"), B300), B300) == []
    three = PiecesPipeline(q_tiles=3, tile_n=64, piece=64)
    assert pieces_plan(three, RUBIN).bytes_used("tmem") == 576


@st.composite
def choices_of_pieces(draw: st.DrawFn) -> dict[str, Any]:
    """Any choices of a kernel, most of which contradict each other or do not fit."""
    drawn = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()}
    piece, groups, turns = draw(st.sampled_from([32, 64, 96, 128])), draw(st.integers(1, 2)), 1
    turns = draw(st.sampled_from([1, 1, 2, 4]))
    return drawn | {
        "piece": piece,
        "groups": groups,
        "tile_n": min(512, piece * groups * turns),
        "buffers": draw(st.sampled_from([1, 1, turns])),
        "head_dim": draw(st.sampled_from([64, 128, 192])),
        "head_dim_v": draw(st.sampled_from([64, 128])),
        "q_tiles": draw(st.integers(1, 3)),
        "q_buffers": draw(st.sampled_from([1, 1, 2])),
        "cta_group": draw(st.integers(1, 2)),
        "value_bytes": draw(st.integers(1, 2)),
        "joint_scores": draw(st.booleans()) and groups > 1,
        "ping_pong": draw(st.booleans()),
        "stagger": draw(st.booleans()),
        "split_p": draw(st.sampled_from([0.5, 0.75, 1.0])),
        "exp2": draw(st.sampled_from([Exp2Split(), SPLIT])),
    }


@settings(max_examples=60)
@given(choices_of_pieces())
def test_what_fits_is_sound_and_ends(choices: dict[str, Any]) -> None:
    """A plan is refused in words or breaks no rule, and two work tiles run to their end."""
    try:
        plan = pieces(**choices)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
        return
    assert check_plan(plan, B200) == [], choices
    assert engine.execute(event_code(plan), trips(3, 2)).end > 0


def test_every_choice_is_in_the_search_for_faults() -> None:
    """The strategy above names every field but those that only cost time."""
    drawn = {item.name for item in fields(PiecesPipeline)}
    left = drawn - set(CHOICES) - {
        "piece", "groups", "tile_n", "buffers", "head_dim", "head_dim_v", "q_tiles", "q_buffers",
        "cta_group", "value_bytes", "joint_scores", "ping_pong", "stagger", "split_p", "exp2",
    }  # fmt: skip
    assert left == {"element_bytes", "tau", "kv_stages"}
