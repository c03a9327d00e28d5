"""Loads and products of a kernel with scores in pieces: the order in which they are issued."""

from __future__ import annotations

from typing import NamedTuple

from fa4.plan.pieces import PiecesPipeline, chain_name, slot_name
from fa4.plan.pieces_layout import (
    key_bytes,
    output_columns,
    output_over_queries,
    registers,
    value_bytes,
)
from fa4.plan.schema import GROUP_WARPS, Arrive, Copy, Loop, Program, Role, Wait, Work
from fa4.plan.work import WARPGROUP, mma


class PieceProduct(NamedTuple):
    """One product of a step: scores (of group g, or all) or values of the piece `turn`.

    following: scores of the next KV tile.
    """

    kind: str
    i: int
    g: int
    turn: int
    following: bool = False


def first_free_warp(pipeline: PiecesPipeline) -> int:
    """The warp behind all whole warpgroups: it issues products."""
    groups = len(pipeline.chains) + (pipeline.correction == "warpgroup")
    return GROUP_WARPS * groups


def issue_order(pipeline: PiecesPipeline) -> list[PieceProduct]:
    """The products of a step, in which the scores are `buffers` pieces ahead."""
    chains = list(pipeline.chains)
    if pipeline.order == "groups":
        chains.sort(key=lambda chain: (chain[1], chain[0]))
    last_group = pipeline.groups - 1
    found: list[PieceProduct] = []
    for turn in range(pipeline.turns):
        ahead = turn + pipeline.buffers
        later: list[PieceProduct] = []
        for i, g in chains:
            found.append(PieceProduct("values", i, g, turn))
            if pipeline.joint_scores and g != last_group:
                continue
            number = 0 if pipeline.joint_scores else g
            scores = PieceProduct(
                "scores", i, number, ahead % pipeline.turns, ahead >= pipeline.turns
            )
            (found if pipeline.ping_pong else later).append(scores)
        found += later
    return found


def first_scores(pipeline: PiecesPipeline) -> list[PieceProduct]:
    """What a work tile begins with: scores for all buffers."""
    chains = [(i, g) for i, g in pipeline.chains if g == 0 or not pipeline.joint_scores]
    if pipeline.order == "groups":
        chains.sort(key=lambda chain: (chain[1], chain[0]))
    return [
        PieceProduct("scores", i, g, turn) for turn in range(pipeline.buffers) for i, g in chains
    ]


def mma_role(pipeline: PiecesPipeline) -> Role:
    """One warp issues every product; commits signal their completion in order."""
    first: Program = ()
    waited: set[int] = set()
    for product in first_scores(pipeline):
        if product.i not in waited:
            first += (Wait(f"q{product.i}_full"), *(() if waited else (Wait("kv_full"),)))
            waited.add(product.i)
        first += _scores(pipeline, product)
    if pipeline.buffers == pipeline.turns:  # the first K is used up
        first += (Arrive("kv_empty", after="tensor"),)
    last = (*_step(pipeline, last=True),)
    queries: Program = tuple(Arrive(f"q{i}_empty", after="tensor") for i in range(pipeline.q_tiles))
    # Q is used up by the last scores: before the last step, or within it.
    before = queries if pipeline.buffers == pipeline.turns else ()
    after = () if before else queries
    return Role(
        name="mma",
        warps=(first_free_warp(pipeline),),
        registers=registers(pipeline).others,
        program=(
            *first,
            Loop("kv_tiles", _step(pipeline, last=False), offset=-1),
            *before,
            *last,
            *after,
        ),
    )


def _step(pipeline: PiecesPipeline, *, last: bool) -> Program:
    """All products of one KV tile's values, and the scores that follow; waits and releases.

    last: without the scores of a next tile.
    """
    products = [x for x in issue_order(pipeline) if not (last and x.following)]
    of_values = [n for n, x in enumerate(products) if x.kind == "values"]
    of_this = [n for n, x in enumerate(products) if x.kind == "scores" and not x.following]
    of_next = [n for n, x in enumerate(products) if x.following]
    # The next K is used up within the step if all of its scores are.
    whole_next = of_next if pipeline.buffers == pipeline.turns else []
    release = {of_values[-1]}
    release |= {spent[-1] for spent in (of_this, whole_next) if spent}
    done = _last_values(pipeline, products)
    each = set() if pipeline.rescales_alone else set(done.values())
    ends = {done[i, pipeline.turns - 1] for i in range(pipeline.q_tiles)}
    if not last or not (pipeline.correction == "inline" or pipeline.rescales_alone):
        ends = set()
    steps: Program = (Wait("kv_full"),)
    for number, product in enumerate(products):
        if of_next and number == of_next[0]:
            steps += (Wait("kv_full"),)
        if product.kind == "scores":
            steps += _scores(pipeline, product)
        else:
            steps += _values(pipeline, product)
            if number in each:
                steps += (Arrive(f"pv{product.i}_done", after="tensor"),)
            if number in ends:
                steps += (Arrive(f"o{product.i}_full", after="tensor"),)
        if number in release:
            steps += (Arrive("kv_empty", after="tensor"),)
    return steps


def _last_values(
    pipeline: PiecesPipeline, products: list[PieceProduct]
) -> dict[tuple[int, int], int]:
    """Number of the last P V of each Q tile and turn."""
    found: dict[tuple[int, int], int] = {}
    for number, product in enumerate(products):
        if product.kind == "values":
            found[product.i, product.turn] = number
    return found


def _scores(pipeline: PiecesPipeline, product: PieceProduct) -> Program:
    """S = Q K^T of a piece, or of one of each group, and tell the softmax warps."""
    groups = range(pipeline.groups) if pipeline.joint_scores else (product.g,)
    slots = [slot_name(pipeline, product.i, g, product.turn) for g in groups]
    amount = mma(
        WARPGROUP,
        pipeline.piece * len(slots),
        pipeline.head_dim,
        element_bytes=pipeline.element_bytes,
        cta_group=pipeline.cta_group,
    )
    name = chain_name(pipeline, product.i, product.g)
    work = Work(
        f"QK{name} {product.turn}",
        amount,
        asynchronous=True,
        reads=(f"q{product.i}@[0:{_queries_bytes(pipeline)}]", "kv:K"),
        writes=tuple(f"s{slot}" for slot in slots),
    )
    told = (chain_name(pipeline, product.i, g) for g in groups)
    return work, *(Arrive(f"s{name}_full", after="tensor") for name in told)


def _queries_bytes(pipeline: PiecesPipeline) -> int:
    return WARPGROUP * pipeline.head_dim * pipeline.element_bytes


def _values(pipeline: PiecesPipeline, product: PieceProduct) -> Program:
    """O += P V of a piece, in two parts if the first may start early."""
    name = chain_name(pipeline, product.i, product.g)
    slot = slot_name(pipeline, product.i, product.g, product.turn)
    head, size = pipeline.split_columns, pipeline.value_bytes
    ones = ("ones",) if pipeline.row_sums == "tensor" else ()

    def part(what: str, first: int, keys: int) -> Work:
        amount = mma(
            WARPGROUP,
            output_columns(pipeline),
            keys,
            element_bytes=size,
            a_in_tmem=True,
            cta_group=pipeline.cta_group,
        )
        place = f"p{slot}[{first * size // 4}:{(first + keys) * size // 4}]"
        return Work(
            f"PV{name} {product.turn}{what}",
            amount,
            asynchronous=True,
            reads=(place, "kv:V", *ones),
            writes=(f"o{product.i}",),
        )

    steps: Program = (Wait(f"p{name}_full"),)
    if head == pipeline.piece:
        return (*steps, part("", 0, head))
    steps += (part(" head", 0, head), Wait(f"p{name}_last"))
    return (*steps, part(" tail", head, pipeline.piece - head))


def load_role(pipeline: PiecesPipeline, stages: int) -> Role:
    """K, Q, V, then K and V of the later tiles, as far ahead as the ring allows.

    stages: of that ring. At the end it waits until the products have used what it loaded.
    """

    def fetch(what: str, signal: str, num_bytes: int, cold: bool = False) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold)
        place = f"kv:{what}" if signal == "kv" else signal
        return (
            Wait(f"{signal}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=(place,)),
            Arrive(f"{signal}_full", after="tma"),
        )

    k, v = (fetch("K", "kv", key_bytes(pipeline)), fetch("V", "kv", value_bytes(pipeline)))
    q: Program = (Wait("o_stored"),) if output_over_queries(pipeline) else ()
    for i in range(pipeline.q_tiles):
        q += fetch(f"Q{i}", f"q{i}", _queries_bytes(pipeline), cold=True)
    cold_k = fetch("K", "kv", key_bytes(pipeline), cold=True)
    return Role(
        name="load",
        warps=(first_free_warp(pipeline) + 2,),
        registers=registers(pipeline).others,
        program=(*cold_k, *q, *v, Loop("kv_tiles", (*k, *v), offset=-1)),
        closing=(
            *(Wait("kv_empty") for _ in range(stages)),
            *(Wait(f"q{i}_empty")
              for i in range(pipeline.q_tiles) for _ in range(pipeline.q_buffers)),
        ),
    )  # fmt: skip
