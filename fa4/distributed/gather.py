"""Gathering: keys come to the queries (all_gather, halo), or queries to the keys (pass_q, tree).

all_gather sends each rank's whole K and V to every other one, by groups of KV heads, so that a
group travels while the one before is computed; halo sends what the other's rows see and no more,
which for windows is a few neighbours' last rows. No merge: each row meets its keys in one call.

pass_q leaves the keys where they are: queries go to all ranks, partial results come back and are
merged. tree is for queries that all ranks have: partial results are merged in pairs.
"""

from __future__ import annotations

from itertools import pairwise

from fa4.config import require
from fa4.distributed.blocks import Block, make_blocks
from fa4.distributed.layout import Runs, coalesce, overlap
from fa4.distributed.plan import (
    Add,
    Await,
    Compute,
    Free,
    Parcel,
    Post,
    RankProgram,
    Shard,
    Spec,
    Step,
)


def _groups(spec: Spec) -> list[range]:
    """KV heads that travel together; as many groups as asked for, or as there are heads."""
    heads, groups = spec.sizes.heads_k, min(spec.head_groups, spec.sizes.heads_k)
    edges = [heads * i // groups for i in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _query_heads(spec: Spec, kv_heads: range) -> range:
    group = spec.sizes.group
    return range(kv_heads.start * group, kv_heads.stop * group)


def _wanted(spec: Spec, rank: int, owner: int) -> Runs:
    """The owner's keys that a rank is sent."""
    theirs = spec.keys.shards[owner]
    if spec.method == "all_gather" and not spec.tile:
        return theirs
    return overlap(theirs, spec.mask.needed(spec.rows.shards[rank]))


def _gather_keys(spec: Spec, rank: int, group: int, heads: range) -> Post:
    """The keys of one group of heads: from everyone, to everyone."""
    sends, receives = [], []
    for apart in range(1, spec.ranks):
        to, source = (rank + apart) % spec.ranks, (rank - apart) % spec.ranks
        if leaving := _wanted(spec, to, rank):
            sends.append(Parcel(to, "kv", Shard("kv", leaving, heads)))
        if coming := _wanted(spec, rank, source):
            receives.append(Parcel(source, f"kv{group}.{source}", Shard("kv", coming, heads)))
    return Post(f"keys{group}", tuple(sends), tuple(receives))


def _row_blocks(spec: Spec, rank: int) -> tuple[Block, ...]:
    """The blocks of a rank's rows with all the keys that it has gathered."""
    keys = sum((_wanted(spec, rank, owner) for owner in range(spec.ranks)), ())
    return make_blocks(spec.rows.shards[rank], coalesce(keys), spec.mask, spec.tile)


def make_program(spec: Spec, rank: int) -> RankProgram:
    """all_gather or halo, forward or backward."""
    holds = (("q", spec.queries_of(rank)), ("kv", spec.keys_of(rank)))
    groups = _groups(spec)
    posts = [_gather_keys(spec, rank, number, heads) for number, heads in enumerate(groups)]
    blocks = _row_blocks(spec, rank)
    steps: list[Step] = [posts[0]]
    results: list[tuple[str, Shard]] = []
    for number, heads in enumerate(groups):
        steps.append(Await(posts[number].name))
        if number + 1 < len(groups):
            steps.append(posts[number + 1])
        arrived = tuple(message.buffer for message in posts[number].receives)
        mine = _query_heads(spec, heads)
        out = Shard("dq" if spec.backward else "o", spec.rows.shards[rank], mine)
        names, pieces = [f"{out.kind}{number}"], [out]
        if spec.backward:
            reached = coalesce(sum((_wanted(spec, rank, r) for r in range(spec.ranks)), ()))
            keep = spec.tile == 0  # otherwise dK and dV are computed from the keys' side
            names.append(f"dkv{number}" if keep else "")
            pieces.append(Shard("dkv", reached, heads))
        steps.append(Compute(blocks, mine, ("q",), ("kv", *arrived), tuple(names), tuple(pieces)))
        steps += [Free(name) for name in arrived]
        results.append((names[0], out))
        if spec.backward and not spec.tile:
            results += _scatter_gradients(spec, rank, number, heads, steps)
    if spec.backward and spec.tile:
        results += _gradients_of_keys(spec, rank, steps)
    return RankProgram(holds, tuple(steps), tuple(results))


def _scatter_gradients(
    spec: Spec, rank: int, group: int, heads: range, steps: list[Step]
) -> list[tuple[str, Shard]]:
    """dK and dV to the owners of the keys, who sum them in the order of the ranks."""
    name = f"dkv{group}"
    mine = spec.keys.shards[rank]
    sends = tuple(
        Parcel(owner, name, Shard("dkv", part, heads))
        for owner in range(spec.ranks)
        if owner != rank and (part := _wanted(spec, rank, owner))
    )
    receives, results = [], []
    for source in range(spec.ranks):
        if source == rank:
            results.append((name, Shard("dkv", mine, heads)))
        elif part := _wanted(spec, source, rank):
            piece = Shard("dkv", part, heads)
            receives.append(Parcel(source, f"{name}.{source}", piece))
            results.append((f"{name}.{source}", piece))
    steps += [Post(f"sums{group}", sends, tuple(receives)), Await(f"sums{group}")]
    return results


def _seeing(spec: Spec, owner: int, source: int) -> Runs:
    """The rows of a source that see some key of an owner."""
    return overlap(spec.rows.shards[source], spec.mask.seers(spec.keys.shards[owner]))


def _send_rows(spec: Spec, rank: int, rows_for: list[Runs], mine: list[Runs]) -> Post:
    """rows_for[r]: rows of this rank that r is sent; mine[r]: those of r that come here."""
    kind = spec.queries_of(rank).kind
    others = [(rank + apart) % spec.ranks for apart in range(1, spec.ranks)]
    sends = tuple(
        Parcel(to, "q", Shard(kind, rows_for[to], spec.all_heads)) for to in others if rows_for[to]
    )
    receives = tuple(
        Parcel(source, f"q.{source}", Shard(kind, mine[source], spec.all_heads))
        for source in others
        if mine[source]
    )
    return Post("queries", sends, receives)


def _gradients_of_keys(spec: Spec, rank: int, steps: list[Step]) -> list[tuple[str, Shard]]:
    """dK and dV of this rank's keys by tiles of keys, from all rows that see them.

    No sum crosses ranks, so that the bits do not depend on their number; the products are computed
    twice.
    """
    ranks = range(spec.ranks)
    coming = [_seeing(spec, rank, source) for source in ranks]
    post = _send_rows(spec, rank, [_seeing(spec, to, rank) for to in ranks], coming)
    rows, mine = coalesce(sum(coming, ())), spec.keys.shards[rank]
    turned = spec.mask._replace(left=spec.mask.right, right=spec.mask.left)
    blocks = tuple(_turned(block) for block in make_blocks(mine, rows, turned, spec.tile))
    out = Shard("dkv", mine, spec.all_kv_heads)
    sources = ("q", *(message.buffer for message in post.receives))
    steps += [post, Await(post.name)]
    dq = Shard("dq", rows, spec.all_heads)
    steps.append(Compute(blocks, spec.all_heads, sources, ("kv",), ("", "dkv"), (dq, out)))
    return [("dkv", out)]


def _turned(block: Block) -> Block:
    """Rows for keys."""
    low = None if block.high is None else -block.high
    high = None if block.low is None else -block.low
    return Block(block.keys, block.rows, low, high)


def make_passing(spec: Spec, rank: int) -> RankProgram:
    """pass_q: every rank's queries meet this rank's keys; what belongs to others goes back."""
    ranks = range(spec.ranks)
    holds = (("q", spec.queries_of(rank)), ("kv", spec.keys_of(rank)))
    coming = [_seeing(spec, rank, source) for source in ranks]
    post = _send_rows(spec, rank, [_seeing(spec, to, rank) for to in ranks], coming)
    steps: list[Step] = [post, Await(post.name)]
    kind, mine = "dq" if spec.backward else "o", spec.keys.shards[rank]
    results: list[tuple[str, Shard]] = []
    sends = []
    for source in ranks:
        rows = spec.rows.shards[rank] if source == rank else coming[source]
        if not rows and source != rank:
            continue
        out = Shard(kind, rows, spec.all_heads)
        names, pieces = [f"{kind}.to{source}"], [out]
        if spec.backward:
            names.append("dkv")
            pieces.append(Shard("dkv", mine, spec.all_kv_heads))
        held = "q" if source == rank else f"q.{source}"
        blocks = make_blocks(rows, mine, spec.mask)
        made = (tuple(names), tuple(pieces))
        steps.append(Compute(blocks, spec.all_heads, (held,), ("kv",), *made))
        if source != rank:
            steps.append(Free(held))
            sends.append(Parcel(source, names[0], out))
    receives = []
    for owner in ranks:
        rows = spec.rows.shards[rank] if owner == rank else _seeing(spec, owner, rank)
        if not rows and owner != rank:
            continue
        name = f"{kind}.to{rank}" if owner == rank else f"{kind}.from{owner}"
        piece = Shard(kind, rows, spec.all_heads)
        results.append((name, piece))
        if owner != rank:
            receives.append(Parcel(owner, name, piece))
    steps += [Post("results", tuple(sends), tuple(receives)), Await("results")]
    if spec.backward:
        results.append(("dkv", Shard("dkv", mine, spec.all_kv_heads)))
    return RankProgram(holds, tuple(steps), tuple(results))


def check_tree(spec: Spec) -> None:
    """ValueError for what a tree has not: gradients, or queries that are divided."""
    require(not spec.backward, "tree has no backward pass (it is for decoding)", "backward")
    same = all(runs == spec.rows.shards[0] for runs in spec.rows.shards)
    require(same, "tree needs the same queries on every rank", spec.rows.name)


def make_tree(spec: Spec, rank: int) -> RankProgram:
    """Queries on every rank: partial results are merged up a binary tree and come down again."""
    holds = (("q", spec.queries_of(rank)), ("kv", spec.keys_of(rank)))
    rows = spec.rows.shards[rank]
    out = Shard("o", rows, spec.all_heads)
    blocks = make_blocks(rows, spec.keys.shards[rank], spec.mask)
    steps: list[Step] = [Compute(blocks, spec.all_heads, ("q",), ("kv",), ("o",), (out,))]
    levels = max(1, spec.ranks).bit_length()
    spans = [1 << level for level in range(levels) if 1 << level < spec.ranks]
    for span in spans:
        name = f"up{span}"
        if rank % (2 * span) == span:
            steps += [Post(name, (Parcel(rank - span, "o", out),), ()), Await(name), Free("o")]
            break
        if rank % (2 * span) == 0 and rank + span < spec.ranks:
            part = f"o{span}"
            steps += [Post(name, (), (Parcel(rank + span, part, out),)), Await(name)]
            steps += [Add(part, "o"), Free(part)]
    for span in reversed(spans):
        name = f"down{span}"
        if rank % (2 * span) == span:
            steps += [Post(name, (), (Parcel(rank - span, "o", out),)), Await(name)]
        elif rank % (2 * span) == 0 and rank + span < spec.ranks:
            steps += [Post(name, (Parcel(rank + span, "o", out),), ()), Await(name)]
    return RankProgram(holds, tuple(steps), (("o", out),))
