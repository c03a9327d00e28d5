"""Carries out a rank's program: moves pieces, calls what computes a block, merges and sums.

What computes is a `Calculator`: float64 in NumPy (`exact`), any implementation of the public
functions (`public`), or sums of random numbers that stand for pairs (`symbols`). What moves is a
`Channel`: queues in one process (`run_here`) or torch.distributed (`group`). All tensors have
(..., rows, heads, width), LSE and rowsum(dO O) with width 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from fa4.call.arrays import is_torch
from fa4.distributed.blocks import Block
from fa4.distributed.layout import Runs, clip, count
from fa4.distributed.plan import (
    Add,
    Await,
    CommunicationPlan,
    Compute,
    Free,
    Pack,
    Parcel,
    Post,
    RankProgram,
    Shard,
    Sizes,
)

Tensors = tuple[Any, ...]


class Held(NamedTuple):
    """What is in a buffer."""

    piece: Shard
    tensors: Tensors


class BlockPart(NamedTuple):
    """A block of one call: its query heads, and the KV heads that they read."""

    block: Block
    heads: range
    kv_heads: range


class Calculator(Protocol):
    """What computes blocks and sums of pieces."""

    def empty(self, piece: Shard) -> Tensors:
        """Tensors of a piece, uninitialised."""

    def zeros(self, piece: Shard) -> Tensors:
        """Of no key: O = 0 and LSE = -inf; gradients 0."""

    def attend(self, q: Tensors, kv: Tensors, part: BlockPart) -> Tensors:
        """(O, LSE) of a block, of the keys in it alone."""

    def differentiate(
        self, g: Tensors, kv: Tensors, part: BlockPart, wanted: tuple[bool, bool]
    ) -> tuple[Tensors, Tensors]:
        """(dq,) and (dk, dv) of a block, from the LSE of all keys; () for what is not wanted."""

    def accumulate(self, kind: str, into: Tensors, more: Tensors) -> None:
        """Merge partial results (kinds "o" and "out") or add gradients, in place."""

    def widen(self, held: Tensors) -> Tensors:
        """A partial result in the type that it is summed in."""


class Channel(Protocol):
    """What carries messages."""

    def post(
        self, post: Post, sends: Sequence[Tensors], receives: Sequence[Tensors]
    ) -> Sequence[Tensors]:
        """Start. `sends` and `receives` belong to the messages of the post.

        Returns the tensors in which the messages will be: `receives`, or the channel's own of the
        same shapes, which are valid until the next execution.
        """

    def done(self, name: str) -> bool:
        """Is a post done? One that blocks until it is says yes."""


def rows_of(tensor: Any, rows: slice) -> Any:
    """Some rows of (..., rows, heads, width)."""
    return tensor[..., rows, :, :]


def heads_of(tensor: Any, heads: slice) -> Any:
    """Some heads of (..., rows, heads, width)."""
    return tensor[..., heads, :]


def concatenate(parts: Sequence[Any]) -> Any:
    """Tensors of (..., rows, heads, width), one behind the other in their rows."""
    if len(parts) == 1:
        return parts[0]
    if is_torch(parts[0]):
        import torch

        return torch.cat(list(parts), dim=-3)
    import numpy as np

    return np.concatenate(parts, axis=-3)


def find_rows(held: Sequence[Runs], wanted: Runs) -> list[tuple[int, slice]]:
    """(which, slice) of the wanted rows, in their order, in runs that several buffers hold.

    Raises ValueError for rows that none of them has.
    """
    if len(held) == 1 and held[0] == wanted:
        return [(0, slice(0, count(wanted)))] if wanted else []
    places = _places(tuple(held))
    found: list[tuple[int, slice]] = []
    for run in wanted:
        left = run
        while left:
            part, which, first = _find(places, left)
            last = found[-1] if found else None
            if last and last[0] == which and last[1].stop == first:
                found[-1] = (which, slice(last[1].start, first + len(part)))
            else:
                found.append((which, slice(first, first + len(part))))
            left = left[len(part) :]
    return found


@lru_cache(maxsize=1024)
def _places(held: tuple[Runs, ...]) -> tuple[tuple[range, int, int], ...]:
    """(run, which has it, where it begins there)."""
    places = []
    for which, runs in enumerate(held):
        first = 0
        for run in runs:
            places.append((run, which, first))
            first += len(run)
    return tuple(places)


def _find(places: tuple[tuple[range, int, int], ...], wanted: range) -> tuple[range, int, int]:
    """The longest beginning of a run that one place has, and where."""
    for run, which, first in places:
        if wanted[0] not in run:
            continue
        if run.step != wanted.step and len(wanted) > 1 and len(run) > 1:
            part = wanted[:1]
        else:
            part = clip(wanted, wanted[0], run[-1] + 1)
        return part, which, first + run.index(wanted[0])
    raise ValueError(f"row {wanted[0]} is in no buffer that is read")


def select(held: Sequence[Held], rows: Runs, heads: range) -> Tensors:
    """Rows and heads of what buffers hold: a view where one slice has them, otherwise a copy."""
    mine = [x for x in held if covers(x.piece.heads, heads)]
    if not mine:
        raise ValueError(f"heads {heads.start}:{heads.stop} are in no buffer that is read")
    found = find_rows([x.piece.rows for x in mine], rows)
    if not found:
        found = [(0, slice(0, 0))]
    tensors = []
    for number in range(len(mine[0].tensors)):
        parts = []
        for which, place in found:
            first = heads.start - mine[which].piece.heads.start
            part = rows_of(mine[which].tensors[number], place)
            parts.append(heads_of(part, slice(first, first + len(heads))))
        tensors.append(concatenate(parts))
    return tuple(tensors)


def covers(heads: range, wanted: range) -> bool:
    """Are all wanted heads among the heads?"""
    return heads.start <= wanted.start and wanted.stop <= heads.stop


@lru_cache(maxsize=1024)
def uniform_heads(heads: range, sizes: Sizes) -> tuple[tuple[range, range], ...]:
    """Query heads with the KV heads they read, in parts of as many query heads for each KV head."""
    kv_heads = sizes.kv_heads(heads)
    by_kv = [
        range(max(heads.start, kv * sizes.group), min(heads.stop, (kv + 1) * sizes.group))
        for kv in kv_heads
    ]
    if len({len(x) for x in by_kv}) <= 1:
        return ((heads, kv_heads),)
    return tuple((mine, range(kv, kv + 1)) for mine, kv in zip(by_kv, kv_heads, strict=True))


def count_sums(program: RankProgram, sizes: Sizes) -> Counter[str]:
    """How often something is put into, or added to, each buffer."""
    sums: Counter[str] = Counter()
    for step in program.steps:
        if isinstance(step, Add):
            sums[step.into] += 1
        elif isinstance(step, Compute):
            for name in step.out:
                sums[name] += len(step.blocks) * len(uniform_heads(step.heads, sizes))
    return sums


def sent_buffers(program: RankProgram) -> set[str]:
    """Buffers that some post sends."""
    posts = (step for step in program.steps if isinstance(step, Post))
    return {message.buffer for post in posts for message in post.sends}


@dataclass
class Executor:
    """One rank: its program, its buffers, and what computes and carries for it."""

    program: RankProgram
    sizes: Sizes
    calculator: Calculator
    channel: Channel

    def run(self, given: dict[str, Tensors]) -> Iterator[None]:
        """Carry the program out, pausing where a post is not done; `results` has the outputs."""
        self.buffers = {name: Held(piece, given[name]) for name, piece in self.program.holds}
        self.left = count_sums(self.program, self.sizes)
        self.last = {name for name, _ in self.program.results} - sent_buffers(self.program)
        self.arriving: dict[str, list[tuple[str, Held]]] = {}
        for step in self.program.steps:
            if isinstance(step, Await):
                while not self.channel.done(step.name):
                    yield
                self.buffers.update(self.arriving.pop(step.name))
            else:
                self.take(step)
        self.results = self.assemble()

    def take(self, step: Post | Pack | Compute | Add | Free) -> None:
        """One step that waits for nobody."""
        if isinstance(step, Post):
            self.post(step)
        elif isinstance(step, Pack):
            held = [self.buffers[name] for name in step.sources]
            self.buffers[step.into] = Held(step.piece, select(held, *step.piece[1:]))
        elif isinstance(step, Compute):
            self.compute(step)
        elif isinstance(step, Add):
            self.accumulate(step.into, self.buffers[step.source])
        else:
            self.buffers.pop(step.buffer, None)

    def post(self, post: Post) -> None:
        """Hand sends and receives to the channel; what arrives is there after the wait."""
        sends = [self.outgoing(message) for message in post.sends]
        receives = [self.calculator.empty(message.piece) for message in post.receives]
        found = self.channel.post(post, sends, receives)
        self.arriving[post.name] = [
            (message.buffer, Held(message.piece, tensors))
            for message, tensors in zip(post.receives, found, strict=True)
        ]

    def outgoing(self, message: Parcel) -> Tensors:
        """What a message carries, in the types it has on the wire."""
        held = self.buffers[message.buffer]
        found = select([held], message.piece.rows, message.piece.heads)
        wire = self.calculator.empty(message.piece._replace(rows=()))
        return tuple(_in_type(x, like) for x, like in zip(found, wire, strict=True))

    def compute(self, step: Compute) -> None:
        """Every block, by parts of heads that are alike."""
        queries = [self.buffers[name] for name in step.queries]
        keys = [self.buffers[name] for name in step.keys]
        for name, piece in zip(step.out, step.pieces, strict=True):
            if name and name not in self.buffers and not step.blocks:
                self.buffers[name] = Held(piece, self.calculator.zeros(piece))
        for block in step.blocks:
            for heads, kv_heads in uniform_heads(step.heads, self.sizes):
                part = BlockPart(block, heads, kv_heads)
                q = select(queries, block.rows, heads)
                kv = select(keys, block.keys, kv_heads)
                for name, piece, found in self.made(step, part, q, kv):
                    if name not in self.buffers and found.piece == piece:
                        self.buffers[name] = found
                        self.left[name] -= 1
                        continue
                    if name not in self.buffers:
                        self.buffers[name] = Held(piece, self.calculator.zeros(piece))
                    self.accumulate(name, found)

    def made(
        self, step: Compute, part: BlockPart, q: Tensors, kv: Tensors
    ) -> Iterator[tuple[str, Shard, Held]]:
        """(buffer, its piece, what the block adds to it)."""
        if len(step.out) == 1:
            tensors = self.calculator.attend(q, kv, part)
            piece = Shard("o", part.block.rows, part.heads)
            yield step.out[0], step.pieces[0], Held(piece, tensors)
            return
        wanted = (bool(step.out[0]), bool(step.out[1]))
        dq, dkv = self.calculator.differentiate(q, kv, part, wanted)
        if wanted[0]:
            piece = Shard("dq", part.block.rows, part.heads)
            yield step.out[0], step.pieces[0], Held(piece, dq)
        if wanted[1]:
            piece = Shard("dkv", part.block.keys, part.kv_heads)
            yield step.out[1], step.pieces[1], Held(piece, dkv)

    def accumulate(self, name: str, more: Held) -> None:
        """Merge or add a piece to rows and heads of a buffer, which has them all."""
        held = self.buffers[name]
        self.left[name] -= 1
        if self.left[name] or name not in self.last:  # what nothing is added to is rounded here
            held = self.buffers[name] = held._replace(tensors=self.calculator.widen(held.tensors))
        add_piece(self.calculator, held, more)

    def assemble(self) -> dict[str, Tensors]:
        """The outputs: "o" or "dq" and "dkv", of all rows and heads of the rank."""
        results: dict[str, Tensors] = {}
        by_kind: dict[str, list[tuple[str, Shard]]] = {}
        for name, piece in self.program.results:
            by_kind.setdefault("o" if piece.kind == "out" else piece.kind, []).append((name, piece))
        held = dict(self.program.holds)
        posts = (step for step in self.program.steps if isinstance(step, Post))
        arrived = {message.buffer for post in posts for message in post.receives}
        for kind, parts in by_kind.items():
            first = held["kv" if kind == "dkv" else "q"]
            whole = Shard(parts[0][1].kind, first.rows, first.heads)
            name, piece = parts[0]
            if len(parts) == 1 and piece == whole == self.buffers[name].piece:
                tensors = self.buffers[name].tensors
                results[kind] = tuple(map(copied, tensors)) if name in arrived else tensors
                continue
            total = Held(whole, self.calculator.zeros(whole))
            for name, piece in parts:
                part = select([self.buffers[name]], piece.rows, piece.heads)
                add_piece(self.calculator, total, Held(piece, part))
            results[kind] = total.tensors
        return results


def copied(x: Any) -> Any:
    """A tensor of its own memory."""
    return x.clone() if is_torch(x) else x.copy()


def _in_type(x: Any, like: Any) -> Any:
    if x.dtype == like.dtype:
        return x
    return x.to(like.dtype) if is_torch(x) else x.astype(like.dtype)


def add_piece(calculator: Calculator, into: Held, more: Held) -> None:
    """into += more, where more has rows and heads."""
    first = more.piece.heads.start - into.piece.heads.start
    heads = slice(first, first + len(more.piece.heads))
    start = 0
    for _, place in find_rows([into.piece.rows], more.piece.rows):
        stop = start + place.stop - place.start
        target = tuple(heads_of(rows_of(x, place), heads) for x in into.tensors)
        source = tuple(rows_of(x, slice(start, stop)) for x in more.tensors)
        calculator.accumulate(into.piece.kind, target, source)
        start = stop


class Queues:
    """Channels of ranks in one process: a message waits in its queue until it is received."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[Tensors]] = {}

    def of(self, rank: int) -> QueueChannel:
        """The channel of a rank."""
        return QueueChannel(self, rank)


class QueueChannel:
    """One rank's end of `Queues`."""

    def __init__(self, shared: Queues, rank: int) -> None:
        self.shared, self.rank = shared, rank
        self.posts: deque[tuple[str, list[tuple[int, Tensors]]]] = deque()

    def queue(self, source: int, to: int) -> deque[Tensors]:
        """Messages of a pair of ranks."""
        return self.shared.queues.setdefault((source, to), deque())

    def post(
        self, post: Post, sends: Sequence[Tensors], receives: Sequence[Tensors]
    ) -> Sequence[Tensors]:
        """Put copies in the queues."""
        for message, tensors in zip(post.sends, sends, strict=True):
            self.queue(self.rank, message.peer).append(tuple(map(copied, tensors)))
        peers = [message.peer for message in post.receives]
        self.posts.append((post.name, list(zip(peers, receives, strict=True))))
        return receives

    def done(self, name: str) -> bool:
        """Have all messages of this post, and of those before it, arrived?"""
        while any(name == other for other, _ in self.posts):
            _, waiting = self.posts[0]
            while waiting:
                peer, tensors = waiting[0]
                queue = self.queue(peer, self.rank)
                if not queue:
                    return False
                for into, arrived in zip(tensors, queue.popleft(), strict=True):
                    into[...] = arrived
                waiting.pop(0)
            self.posts.popleft()
        return True


def run_here(
    plan: CommunicationPlan, calculator: Calculator, given: Sequence[dict[str, Tensors]]
) -> list[dict[str, Tensors]]:
    """All ranks of a plan in this process, a turn each. given: "q" and "kv" of each rank.

    Returns the results of each rank. Raises RuntimeError if no rank can go on, ValueError for a
    step that reads what its buffers have not.
    """
    queues = Queues()
    executors = [
        Executor(program, plan.spec.sizes, calculator, queues.of(rank))
        for rank, program in enumerate(plan.programs)
    ]
    running = {rank: x.run(given[rank]) for rank, x in enumerate(executors)}
    while running:
        before = len(running), _progress(queues)
        for rank, turns in list(running.items()):
            if not _goes_on(rank, turns):
                del running[rank]
        if before == (len(running), _progress(queues)):
            raise RuntimeError(f"ranks {sorted(running)} wait for messages that nobody sends")
    return [x.results for x in executors]


def _goes_on(rank: int, turns: Iterator[None]) -> bool:
    """One turn of a rank; is anything left of its program?"""
    try:
        return next(turns, turns) is None
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from error


def _progress(queues: Queues) -> tuple[int, ...]:
    return tuple(map(len, queues.queues.values()))


def rows_in(piece: Shard) -> int:
    """Rows of a piece."""
    return count(piece.rows)
