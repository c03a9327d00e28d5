"""Ring, Ulysses, and both: K and V travel from rank to rank, heads are exchanged inside a team.

P = R U ranks. The U neighbours of a team exchange rows for heads (Ulysses): each then has all rows
of the team and a U-th of the heads. Ranks with the same heads form a ring of R: at step i a rank
attends to the keys of the team i before its own, while the next keys are under way. U = 1 is the
ring, R = 1 is Ulysses.

Backward, the gradients of keys travel one hop behind the keys and arrive at home after R hops.
"""

from __future__ import annotations

from typing import NamedTuple

from fa4.config import require
from fa4.distributed.blocks import make_blocks
from fa4.distributed.layout import Runs, coalesce
from fa4.distributed.plan import (
    Add,
    Await,
    Compute,
    Free,
    Pack,
    Parcel,
    Post,
    RankProgram,
    Shard,
    Spec,
    Step,
)


class _Place(NamedTuple):
    """A rank in its team and in its ring."""

    spec: Spec
    rank: int

    @property
    def degree(self) -> int:
        return self.spec.degree

    @property
    def teams(self) -> int:
        return self.spec.ranks // self.degree

    @property
    def team(self) -> int:
        return self.rank // self.degree

    @property
    def mates(self) -> range:
        """The ranks of its team, itself included."""
        return range(self.team * self.degree, (self.team + 1) * self.degree)

    def on_ring(self, apart: int) -> int:
        """The rank so many teams further that has the same heads."""
        return (self.team + apart) % self.teams * self.degree + self.rank % self.degree

    def heads(self, rank: int) -> range:
        """The query heads that a rank computes."""
        each = self.spec.sizes.heads_q // self.degree
        return range(rank % self.degree * each, (rank % self.degree + 1) * each)

    def kv_heads(self, rank: int) -> range:
        """And the KV heads these read."""
        return self.spec.sizes.kv_heads(self.heads(rank))

    def team_rows(self, apart: int, of_keys: bool) -> Runs:
        """Rows, or keys, of the team so many before."""
        layout = self.spec.keys if of_keys else self.spec.rows
        team = (self.team - apart) % self.teams
        shards = layout.shards[team * self.degree : (team + 1) * self.degree]
        return shards[0] if self.degree == 1 else coalesce(sum(shards, ()))


def check_degree(spec: Spec) -> None:
    """ValueError for a degree that divides neither ranks nor heads."""
    ranks, heads = spec.ranks, spec.sizes.heads_q
    require(ranks % spec.degree == 0, f"degree must divide {ranks} ranks", spec.degree)
    require(
        heads % spec.degree == 0,
        f"ulysses needs a number of ranks that divides {heads} query heads "
        "(method ring or all_gather takes any)",
        spec.degree,
    )


def make_program(spec: Spec, rank: int) -> RankProgram:
    """The program of a rank."""
    place = _Place(spec, rank)
    holds = (("q", spec.queries_of(rank)), ("kv", spec.keys_of(rank)))
    steps: list[Step] = []
    queries, keys = ("q", "kv") if place.degree == 1 else _exchange(place, steps)
    if spec.backward:
        outs = _ring_backward(place, steps, queries, keys)
    else:
        outs = _ring_forward(place, steps, queries, keys)
    if place.degree == 1:
        return RankProgram(holds, tuple(steps), tuple(outs))
    results = _exchange_back(place, steps, outs)
    return RankProgram(holds, tuple(steps), tuple(results))


def _exchange(place: _Place, steps: list[Step]) -> tuple[str, str]:
    """Rows for heads: this rank gets all rows of its team, of its own heads."""
    spec, rank = place.spec, place.rank
    sends, receives = [], []
    for mate in place.mates:
        if mate == rank:
            continue
        for name, held in (("q", spec.queries_of), ("kv", spec.keys_of)):
            heads = place.heads if name == "q" else place.kv_heads
            sends.append(Parcel(mate, name, held(rank)._replace(heads=heads(mate))))
            arriving = held(mate)._replace(heads=heads(rank))
            receives.append(Parcel(mate, f"{name}.{mate}", arriving))
    steps += [Post("heads", tuple(sends), tuple(receives)), Await("heads")]
    for name, mine in (("q", place.heads(rank)), ("kv", place.kv_heads(rank))):
        parts = tuple(name if mate == rank else f"{name}.{mate}" for mate in place.mates)
        kind = spec.queries_of(rank).kind if name == "q" else "kv"
        piece = Shard(kind, place.team_rows(0, name == "kv"), mine)
        steps.append(Pack(parts, f"{name}.team", piece))
        steps += [Free(part) for part in parts]
    return "q.team", "kv.team"


def _ring_forward(
    place: _Place, steps: list[Step], queries: str, keys: str
) -> list[tuple[str, Shard]]:
    """Attend to the keys of each team in turn."""
    spec, heads = place.spec, place.heads(place.rank)
    rows = place.team_rows(0, False)
    out = Shard("o", rows, heads)
    held = keys
    for step in range(place.teams):
        arriving = f"kv{step % 2}"
        if step + 1 < place.teams:
            steps.append(_hop(place, f"hop{step}", "kv", (held, arriving), step))
        blocks = make_blocks(rows, place.team_rows(step, True), spec.mask)
        steps.append(Compute(blocks, heads, (queries,), (held,), ("o",), (out,)))
        if step + 1 < place.teams:
            steps.append(Await(f"hop{step}"))
        if step:
            steps.append(Free(held))
        held = arriving
    return [("o", out)]


def _hop(place: _Place, name: str, kind: str, buffers: tuple[str, str], step: int) -> Post:
    """One hop: what came `step` teams far goes on, what is one further arrives."""
    heads = place.kv_heads(place.rank)
    leaving = Shard(kind, place.team_rows(step, True), heads)
    coming = Shard(kind, place.team_rows(step + 1, True), heads)
    return Post(
        name,
        (Parcel(place.on_ring(1), buffers[0], leaving),),
        (Parcel(place.on_ring(-1), buffers[1], coming),),
    )


def _ring_backward(
    place: _Place, steps: list[Step], queries: str, keys: str
) -> list[tuple[str, Shard]]:
    """Gradients of the keys of each team in turn, which follow the keys home."""
    spec, heads = place.spec, place.heads(place.rank)
    rows = place.team_rows(0, False)
    dq = Shard("dq", rows, heads)
    held, last = keys, place.teams - 1
    for step in range(place.teams):
        arriving, theirs = f"kv{step % 2}", f"dkv{step}"
        dkv = Shard("dkv", place.team_rows(step, True), place.kv_heads(place.rank))
        if step < last:
            steps.append(_hop(place, f"hop{step}", "kv", (held, arriving), step))
        blocks = make_blocks(rows, place.team_rows(step, True), spec.mask)
        steps.append(Compute(blocks, heads, (queries,), (held,), ("dq", theirs), (dq, dkv)))
        if step:
            came = f"came{step - 1}"
            steps += [Await(f"back{step - 1}"), Free(f"dkv{step - 1}")]
            steps += [Add(came, theirs), Free(came)]
        if last:
            steps.append(_hop(place, f"back{step}", "dkv", (theirs, f"came{step}"), step))
        if step < last:
            steps.append(Await(f"hop{step}"))
        if step:
            steps.append(Free(held))
        held = arriving
    if last:
        steps += [Await(f"back{last}"), Free(f"dkv{last}")]
    home = f"came{last}" if last else "dkv0"
    mine = Shard("dkv", place.team_rows(0, True), place.kv_heads(place.rank))
    return [("dq", dq), (home, mine)]


def _exchange_back(
    place: _Place, steps: list[Step], outs: list[tuple[str, Shard]]
) -> list[tuple[str, Shard]]:
    """Heads for rows: each rank of the team gets its own rows again, of all heads."""
    rank = place.rank
    sends, receives, results = [], [], []
    for name, piece in outs:
        heads = place.kv_heads if piece.kind == "dkv" else place.heads
        layout = place.spec.keys if piece.kind == "dkv" else place.spec.rows
        for mate in place.mates:
            kind = "out" if piece.kind == "o" else piece.kind
            theirs = Shard(kind, layout.shards[rank], heads(mate))
            if mate == rank:
                results.append((name, theirs))
                continue
            leaving = Shard(kind, layout.shards[mate], heads(rank))
            sends.append(Parcel(mate, name, leaving))
            receives.append(Parcel(mate, f"{name}.{mate}", theirs))
            results.append((f"{name}.{mate}", theirs))
    steps += [Post("rows", tuple(sends), tuple(receives)), Await("rows")]
    return results
