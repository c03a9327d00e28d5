"""Plans with one thing wrong, and plans that are unlike ours but right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fa4.distributed.blocks import SequenceMask, make_blocks
from fa4.distributed.layout import make_layout
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import (
    Add,
    Await,
    CommunicationPlan,
    Compute,
    Free,
    Pack,
    Post,
    RankProgram,
    Sizes,
    Spec,
    Step,
)

ROWS = 48
Change = Callable[[CommunicationPlan], CommunicationPlan]


def plan_of(method: str = "ring", *, ranks: int = 4, **changes: Any) -> CommunicationPlan:
    """A small causal plan; changes: fields of its spec, or layout, left, right, documents."""
    documents = changes.pop("documents", (0, ROWS))
    name = changes.pop("layout", "zigzag")
    layout = make_layout(name, ROWS, ranks, cu_seqlens=documents)
    mask = SequenceMask(changes.pop("left", None), changes.pop("right", 0), documents)
    return make_plan(Spec(method, layout, layout, mask, Sizes(8, 4), **changes))


def with_steps(plan: CommunicationPlan, rank: int, steps: list[Step]) -> CommunicationPlan:
    """The plan with other steps of one rank."""
    programs = list(plan.programs)
    programs[rank] = programs[rank]._replace(steps=tuple(steps))
    return replace(plan, programs=tuple(programs))


def on_rank(rank: int, change: Callable[[list[Step]], list[Step]]) -> Change:
    """A change of one rank's steps."""
    return lambda plan: with_steps(plan, rank, change(list(plan.programs[rank].steps)))


def on_all(change: Callable[[list[Step]], list[Step]]) -> Change:
    """A change of every rank's steps."""

    def apply(plan: CommunicationPlan) -> CommunicationPlan:
        for rank in range(plan.ranks):
            plan = with_steps(plan, rank, change(list(plan.programs[rank].steps)))
        return plan

    return apply


def at(kind: type, number: int, change: Callable[[Any], list[Any]]) -> Any:
    """Steps with the so-manieth of a kind replaced by what `change` makes of it."""

    def apply(steps: list[Step]) -> list[Step]:
        places = [i for i, step in enumerate(steps) if isinstance(step, kind)]
        where = places[number]
        return [*steps[:where], *change(steps[where]), *steps[where + 1 :]]

    return apply


def drop(kind: type, number: int) -> Any:
    """Without the so-manieth step of a kind."""
    return at(kind, number, lambda step: [])


def block(number: int, **fields: Any) -> Any:
    """A Compute whose first block has other fields; callables are given the old value."""

    def change(step: Compute) -> list[Step]:
        first = step.blocks[0]
        new = {k: f(getattr(first, k)) if callable(f) else f for k, f in fields.items()}
        return [step._replace(blocks=(first._replace(**new), *step.blocks[1:]))]

    return at(Compute, number, change)


def messages(number: int, side: str, **fields: Any) -> Any:
    """A Post whose messages of one side have other fields."""

    def change(post: Post) -> list[Step]:
        changed = tuple(
            x._replace(**{k: f(getattr(x, k)) if callable(f) else f for k, f in fields.items()})
            for x in getattr(post, side)
        )
        return [post._replace(**{side: changed})]

    return at(Post, number, change)


def moved(kind: type, number: int, by: int) -> Any:
    """The so-manieth step of a kind, so many places later."""

    def apply(steps: list[Step]) -> list[Step]:
        where = [i for i, step in enumerate(steps) if isinstance(step, kind)][number]
        step = steps.pop(where)
        return [*steps[: where + by], step, *steps[where + by :]]

    return apply


def _results(change: Callable[[RankProgram], tuple[Any, ...]]) -> Change:
    def apply(plan: CommunicationPlan) -> CommunicationPlan:
        first = plan.programs[0]
        changed = first._replace(results=change(first))
        return replace(plan, programs=(changed, *plan.programs[1:]))

    return apply


def _masked(mask: Callable[[SequenceMask], SequenceMask]) -> Change:
    """Computed for another mask than the call's."""

    def apply(plan: CommunicationPlan) -> CommunicationPlan:
        other = make_plan(replace(plan.spec, mask=mask(plan.spec.mask)))
        return replace(other, spec=plan.spec)

    return apply


def _in_turn(order: Callable[[int], tuple[str, ...]]) -> Change:
    """Every post's messages one by one: first all of one side."""

    def apply(plan: CommunicationPlan) -> CommunicationPlan:
        for rank in range(plan.ranks):
            steps = [
                step._replace(
                    in_turn=tuple(
                        side
                        for side in order(rank)
                        for _ in (step.sends if side == "send" else step.receives)
                    )
                )
                if isinstance(step, Post)
                else step
                for step in plan.programs[rank].steps
            ]
            plan = with_steps(plan, rank, steps)
        return plan

    return apply


def _first_keys_always(plan: CommunicationPlan) -> CommunicationPlan:
    """diffusers#14265: the backward pass reads the keys of step 0 at every step."""

    def change(steps: list[Step]) -> list[Step]:
        return [
            step._replace(keys=("kv",)) if isinstance(step, Compute) else step for step in steps
        ]

    return on_all(change)(plan)


def _swapped_posts(steps: list[Step]) -> list[Step]:
    places = [i for i, step in enumerate(steps) if isinstance(step, Post)][:2]
    steps[places[0]], steps[places[1]] = steps[places[1]], steps[places[0]]
    return steps


SEND, RECEIVE = ("send", "receive"), ("receive", "send")
BACKWARD = {"backward": True}
GATHER = {"method": "all_gather"}
# name: (options of `plan_of`, change, words of the finding)
MUTANTS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a send is missing": ({}, on_rank(1, messages(0, "sends", peer=3)), "messages"),
    "a hop is not received": (
        {},
        on_rank(2, at(Post, 1, lambda p: [p._replace(receives=())])),
        "messages",
    ),
    "one hop too few": ({}, on_rank(0, drop(Post, 2)), "messages"),
    "off-by-one peer": (
        {},
        on_rank(0, messages(1, "sends", peer=lambda p: (p + 1) % 4)),
        "messages",
    ),
    "a message to oneself": ({}, on_rank(1, messages(0, "sends", peer=1)), "no peer"),
    "the wrong rows are sent": (
        {},
        on_rank(0, messages(0, "sends", piece=lambda p: p._replace(rows=(range(6), range(6, 12))))),
        "holds",
    ),
    "the wrong heads are sent": (
        {"method": "ulysses"},
        on_rank(0, messages(0, "sends", piece=lambda p: p._replace(heads=range(1)))),
        "sent",
    ),
    "two posts change places": (BACKWARD, on_rank(1, _swapped_posts), ""),
    "all send first": ({}, _in_turn(lambda rank: SEND), "deadlock"),
    "all receive first": ({}, _in_turn(lambda rank: RECEIVE), "deadlock"),
    "all send first, three ranks": ({"ranks": 3}, _in_turn(lambda rank: SEND), "deadlock"),
    "a wait is missing": ({}, on_rank(3, drop(Await, 0)), "before"),
    "the last wait is missing": (BACKWARD, on_rank(0, drop(Await, -1)), "never waited"),
    "a wait too many": ({}, on_rank(0, at(Await, 0, lambda w: [w, w])), "not under way"),
    "the wait comes after the computation": ({}, on_rank(0, moved(Await, 0, 2)), "before"),
    "keys are overwritten while in use": (
        {},
        on_rank(1, messages(1, "receives", buffer="kv0")),
        "overwrites",
    ),
    "own keys are overwritten": (
        {},
        on_rank(1, messages(0, "receives", buffer="kv")),
        "overwrites",
    ),
    "freed too early": (
        {},
        on_rank(0, at(Compute, 1, lambda c: [Free("kv0"), c])),
        "holds nothing",
    ),
    "freed while it is sent": (BACKWARD, on_rank(0, moved(Free, 2, -2)), ""),
    "freed twice": ({}, on_rank(0, at(Free, 0, lambda f: [f, f])), "frees"),
    "a block is missing": (
        {},
        on_rank(2, at(Compute, 3, lambda c: [c._replace(blocks=c.blocks[1:])])),
        "met a wrong set",
    ),
    "a block twice": (
        {},
        on_rank(2, at(Compute, 1, lambda c: [c._replace(blocks=c.blocks * 2)])),
        "met a wrong set",
    ),
    "the diagonal is hidden": ({}, on_rank(0, block(0, high=lambda h: h - 1)), "met a wrong set"),
    "one key of the future": ({}, on_rank(0, block(0, high=lambda h: h + 1)), "met a wrong set"),
    "the diagonal has no mask": ({}, on_rank(3, block(0, high=None)), "met a wrong set"),
    "a window one too wide": (
        {"method": "halo", "layout": "contiguous", "left": 5},
        on_rank(1, block(0, low=lambda x: x - 1)),
        "met a wrong set",
    ),
    "the window is ignored": (
        {"left": 9, "layout": "contiguous"},
        _masked(lambda mask: mask._replace(left=None)),
        "met a wrong set",
    ),
    "documents are ignored": (
        {"documents": (0, 20, ROWS), "layout": "documents"},
        _masked(lambda mask: mask._replace(documents=(0, ROWS))),
        "met a wrong set",
    ),
    "the causal half without a mask": (
        {"right": None},
        _masked(lambda mask: mask._replace(right=0)),
        "met a wrong set",
    ),
    "the keys of step 0 at every step": (BACKWARD, _first_keys_always, "in no buffer"),
    "keys from the wrong rank": (
        {**GATHER, "layout": "contiguous"},
        on_rank(3, at(Compute, 0, lambda c: [c._replace(keys=(c.keys[0], c.keys[2], c.keys[2]))])),
        "",
    ),
    "rows in another order": (
        {},
        on_rank(1, block(0, rows=lambda rows: rows[::-1])),
        "met a wrong set",
    ),
    "keys in another order": (
        {},
        on_rank(1, block(0, keys=lambda keys: keys[::-1])),
        "met a wrong set",
    ),
    "another rank's heads": (
        {"method": "ulysses"},
        on_rank(1, at(Compute, 0, lambda c: [c._replace(heads=range(2))])),
        "",
    ),
    "a sum is missing": (BACKWARD, on_rank(2, drop(Add, 1)), "met a wrong set"),
    "a sum twice": (BACKWARD, on_rank(2, at(Add, 1, lambda a: [a, a])), "met a wrong set"),
    "gradients do not come home": (
        BACKWARD,
        _results(lambda p: (p.results[0], ("dkv0", p.results[1][1]))),
        "",
    ),
    "one head group has no result": (
        {**GATHER, "head_groups": 2},
        _results(lambda p: p.results[:1]),
        "met a wrong set",
    ),
    "a gradient counted twice": (
        {**GATHER, **BACKWARD},
        _results(lambda p: (*p.results, p.results[-1])),
        "met a wrong set",
    ),
    "packed from too few": (
        {"method": "ulysses"},
        on_rank(0, at(Pack, 1, lambda p: [p._replace(sources=p.sources[1:])])),
        "in no buffer",
    ),
}


def _late_posts(plan: CommunicationPlan) -> CommunicationPlan:
    """Keys travel after the computation: slower, and right."""

    def change(steps: list[Step]) -> list[Step]:
        for i, step in enumerate(steps[:-1]):
            if isinstance(step, Post) and isinstance(steps[i + 1], Compute):
                steps[i], steps[i + 1] = steps[i + 1], step
        return steps

    return on_all(change)(plan)


def _other_way(plan: CommunicationPlan) -> CommunicationPlan:
    """A ring in the other direction: the ranks counted backwards."""
    spec = plan.spec
    layout = replace(spec.rows, shards=spec.rows.shards[::-1])
    return make_plan(replace(spec, rows=layout, keys=layout))


def _small_blocks(plan: CommunicationPlan) -> CommunicationPlan:
    """Rows cut into smaller blocks, the last ones first."""
    mask = plan.spec.mask

    def change(steps: list[Step]) -> list[Step]:
        return [
            step._replace(
                blocks=tuple(
                    part
                    for one in reversed(step.blocks)
                    for run in one.rows
                    for part in make_blocks((run[:3], run[3:]), one.keys, mask)
                )
            )
            if isinstance(step, Compute)
            else step
            for step in steps
        ]

    return on_all(change)(plan)


def _own_buffers(plan: CommunicationPlan) -> CommunicationPlan:
    """A buffer for every step, none of them used again."""

    def change(steps: list[Step]) -> list[Step]:
        hop, found = 0, []
        for step in steps:
            if isinstance(step, Post):
                sends = (step.sends[0]._replace(buffer=f"x{hop - 1}" if hop else "kv"),)
                receives = (step.receives[0]._replace(buffer=f"x{hop}"),)
                step, hop = step._replace(sends=sends, receives=receives), hop + 1
            elif isinstance(step, Compute) and step.keys != ("kv",):
                step = step._replace(keys=(f"x{hop - 2}" if hop < 3 else f"x{hop - 1}",))
            if not isinstance(step, Free):
                found.append(step)
        return found

    return on_all(change)(_late_posts(plan))


def _turned_around(pack: Pack) -> list[Step]:
    rows = (range(ROWS // 2, ROWS), range(ROWS // 2))
    return [pack._replace(piece=pack.piece._replace(rows=rows))]


# Right, and unlike what the makers make.
VARIANTS: dict[str, tuple[dict[str, Any], Change]] = {
    "keys travel after they were used": ({}, _late_posts),
    "the ring turns the other way": ({}, _other_way),
    "even ranks send first": ({}, _in_turn(lambda rank: RECEIVE if rank % 2 else SEND)),
    "one rank alone receives first": ({"ranks": 3}, _in_turn(lambda r: SEND if r else RECEIVE)),
    "smaller blocks in another order": ({}, _small_blocks),
    "packed in another order": ({"method": "ulysses"}, on_rank(0, at(Pack, 1, _turned_around))),
    "nothing is freed": (
        BACKWARD,
        on_all(
            lambda steps: [
                x for x in steps if not isinstance(x, Free) or not x.buffer.startswith("dkv")
            ]
        ),
    ),
}
