"""A communication plan as data: for each rank a program of posts, waits, computations and sums.

Three readers: `execute` carries it out, in one process or over a group; `check` looks for what can
go wrong; `symbols` counts pairs with it. A rank runs its program in order. What it posts goes on
beside it until it waits for it; posts of a rank are carried out one after another, the messages of
one post together. A message is the next one that its two ranks have for each other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from fa4.config import require, require_int
from fa4.distributed.blocks import Block, SequenceMask
from fa4.distributed.layout import RowLayout, Runs, count

KINDS = ("q", "kv", "o", "out", "g", "dq", "dkv")
PER_KV_HEAD = ("kv", "dkv")


class Shard(NamedTuple):
    """Tensors of some rows and heads.

    kind: "q"; "kv" (keys, values); "o" (partial O and LSE, fp32); "out" (O in the type of q, LSE);
    "g" (what the gradient needs of a row: q, dO, LSE and O, or rowsum(dO O)); "dq"; "dkv" (dK, dV).
    heads: KV heads of "kv" and "dkv", else query heads.
    """

    kind: str
    rows: Runs
    heads: range


class Parcel(NamedTuple):
    """A piece that leaves from, or arrives in, a buffer of this rank."""

    peer: int
    buffer: str
    piece: Shard


class Post(NamedTuple):
    """Start sending and receiving. A buffer that receives belongs to the post until its `Await`.

    in_turn: sends and receives one by one, in this order, each until its peer has met it: how a
    schedule written by hand may hang. Plans made here post messages together.
    """

    name: str
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    in_turn: tuple[str, ...] = ()


class Await(NamedTuple):
    """Until a post is done."""

    name: str


class Pack(NamedTuple):
    """Copy pieces into one buffer: the rows and heads of `piece`, in its order."""

    sources: tuple[str, ...]
    into: str
    piece: Shard


class Compute(NamedTuple):
    """Attention of the blocks, added to what is in `out`; or its gradients.

    queries: buffers that hold the rows ("q", or "g" for gradients). keys: those of the keys.
    heads: of the queries. out: (o,), or (dq, dkv), "" for one that is not wanted; a buffer that
    does not exist yet is made, of the piece beside it.
    """

    blocks: tuple[Block, ...]
    heads: range
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    out: tuple[str, ...]
    pieces: tuple[Shard, ...]


class Add(NamedTuple):
    """Merge partial results, or sum gradients: into += source, of the same piece."""

    source: str
    into: str


class Free(NamedTuple):
    """The buffer is not used any more."""

    buffer: str


Step = Post | Await | Pack | Compute | Add | Free


class RankProgram(NamedTuple):
    """What one rank does. holds: buffers it begins with. results: what its outputs are summed of.

    Results of a kind are added in their order; pieces that do not meet are put side by side.
    """

    holds: tuple[tuple[str, Shard], ...]
    steps: tuple[Step, ...]
    results: tuple[tuple[str, Shard], ...]


@dataclass(frozen=True)
class Sizes:
    """Of a call: batch, heads, head dimensions, bytes of an element."""

    heads_q: int
    heads_k: int
    head_dim: int = 128
    head_dim_v: int = 128
    batch: int = 1
    item_bytes: int = 2

    def __post_init__(self) -> None:
        """Check that they are sizes, and that KV heads divide query heads."""
        for name in ("heads_q", "heads_k", "head_dim", "head_dim_v", "batch", "item_bytes"):
            require_int(name, getattr(self, name), 1, 2**31)
        fits = self.heads_q % self.heads_k == 0
        require(fits, f"KV heads must divide {self.heads_q} query heads", self.heads_k)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_k

    def kv_heads(self, heads: range) -> range:
        """The KV heads that some query heads read."""
        if not heads:
            return range(0)
        return range(heads[0] // self.group, heads[-1] // self.group + 1)

    def element_bytes(self, kind: str) -> int:
        """Bytes of one row and head. O, LSE and gradients of keys are fp32 on the wire."""
        d, dv, item = self.head_dim, self.head_dim_v, self.item_bytes
        return {
            "q": d * item,
            "kv": (d + dv) * item,
            "o": dv * 4 + 4,
            "out": dv * item + 4,
            "g": (d + 2 * dv) * item + 4,
            "dq": d * 4,
            "dkv": (d + dv) * 4,
        }[kind]

    def bytes(self, piece: Shard) -> int:
        """Bytes of a piece."""
        rows = count(piece.rows) * len(piece.heads)
        return self.batch * rows * self.element_bytes(piece.kind)


@dataclass(frozen=True)
class Spec:
    """What a plan is made for; equal on all ranks, or nothing is sent.

    keys: where keys and values are; of the same rows as `rows`, unless there are fewer queries than
    keys. tile: > 0 cuts rows at its multiples, for results that do not depend on the ranks.
    """

    method: str
    rows: RowLayout
    keys: RowLayout
    mask: SequenceMask
    sizes: Sizes
    backward: bool = False
    degree: int = 1  # of Ulysses, inside a ring
    head_groups: int = 1  # of KV heads that travel one behind the other
    tile: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.rows.ranks

    @property
    def digest(self) -> str:
        """Equal for equal specs, on every machine."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def all_heads(self) -> range:
        """Query heads."""
        return range(self.sizes.heads_q)

    @property
    def all_kv_heads(self) -> range:
        """KV heads."""
        return range(self.sizes.heads_k)

    def queries_of(self, rank: int) -> Shard:
        """What a rank holds of the queries; with dO and more in the backward pass."""
        return Shard("g" if self.backward else "q", self.rows.shards[rank], self.all_heads)

    def keys_of(self, rank: int) -> Shard:
        """What a rank holds of keys and values."""
        return Shard("kv", self.keys.shards[rank], self.all_kv_heads)


@dataclass(frozen=True)
class CommunicationPlan:
    """A spec and the program of each rank."""

    spec: Spec
    programs: tuple[RankProgram, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.programs)

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others."""
        return sum(
            self.spec.sizes.bytes(message.piece)
            for step in self.programs[rank].steps
            if isinstance(step, Post)
            for message in step.sends
        )

    def pairs(self, rank: int) -> int:
        """Pairs of a row and a key that a rank computes, over its query heads."""
        return sum(
            block.pairs * len(step.heads)
            for step in self.programs[rank].steps
            if isinstance(step, Compute)
            for block in step.blocks
        )

    def peak_bytes(self, rank: int) -> int:
        """The most that a rank's buffers take at once, those it begins with included."""
        program = self.programs[rank]
        size = {name: self.spec.sizes.bytes(piece) for name, piece in program.holds}
        most = now = sum(size.values())
        for step in program.steps:
            if isinstance(step, Free):
                now -= size.pop(step.buffer, 0)
            for name, piece in made_by(step):
                now += self.spec.sizes.bytes(piece) - size.get(name, 0)
                size[name] = self.spec.sizes.bytes(piece)
            most = max(most, now)
        return most


def made_by(step: Step) -> tuple[tuple[str, Shard], ...]:
    """Buffers that a step writes, and what they hold then."""
    if isinstance(step, Post):
        return tuple((message.buffer, message.piece) for message in step.receives)
    if isinstance(step, Pack):
        return ((step.into, step.piece),)
    if isinstance(step, Compute):
        return tuple((name, x) for name, x in zip(step.out, step.pieces, strict=True) if name)
    return ()
