"""When each rank does what: a communication plan, timed step by step.

Each rank has a stream of kernels and one of messages, as the executors have. A post starts when the
kernels before it and the posts before it are through, here and at its peers; a wait holds the
kernels until its post is done. Where messages are not hidden (`fa4.sim.links`), kernels that come
after a post begin when it is done.

All ranks are followed up to `MOST_RANKS`; of more, those that can be last (`find_sample`), each as
if its peers were as far as itself: nobody waits for a peer then, which the slowest rank does not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fa4.distributed.execute import count_sums, sent_buffers, uniform_heads
from fa4.distributed.kernel_times import EAGER_KERNELS, BlockTimes, MemoryTimes
from fa4.distributed.layout import count
from fa4.distributed.methods import check_spec, make_program
from fa4.distributed.plan import (
    Add,
    Await,
    CommunicationPlan,
    Compute,
    Free,
    Pack,
    Post,
    RankProgram,
    Shard,
    Sizes,
    Spec,
    made_by,
)
from fa4.sim.links import Fabric

MOST_RANKS = 16  # followed together
MOST_STEPS = 1 << 14  # of them together

# kinds of spans
COMPUTE, MERGE, COPY, WAIT, SEND = "compute", "merge", "copy", "wait", "send"


class TimeSpan(NamedTuple):
    """What a rank does from when to when. peer: whom it waits for, if somebody is late; else -1."""

    kind: str
    start_s: float
    end_s: float
    what: str
    peer: int = -1
    step: int = -1


@dataclass(frozen=True)
class RankTimes:
    """One rank. spans: of its stream of kernels, gapless; sends: of its messages."""

    rank: int
    spans: tuple[TimeSpan, ...]
    sends: tuple[TimeSpan, ...]

    @property
    def seconds(self) -> float:
        """Until its result is there."""
        return self.spans[-1].end_s if self.spans else 0.0

    def spent(self, kind: str) -> float:
        """Seconds of a kind."""
        return sum(x.end_s - x.start_s for x in self.spans if x.kind == kind)


@dataclass(frozen=True)
class TimingModel:
    """What computes, what memory traffic takes, what connects the ranks; SMs of a GPU."""

    blocks: BlockTimes
    memory: MemoryTimes
    fabric: Fabric
    sm_count: int


class _Sending(NamedTuple):
    """A post under way, at one rank."""

    name: str
    ready_s: float
    seconds: float
    num_bytes: int
    links: str
    step: int


def time_plan(plan: CommunicationPlan, model: TimingModel) -> list[RankTimes]:
    """All ranks of a plan, together. ValueError for a plan in which some wait for ever."""
    return _time(dict(enumerate(plan.programs)), plan.spec, model, paired=True)


def time_spec(spec: Spec, model: TimingModel) -> list[RankTimes]:
    """The plan of a spec: all ranks, or of many those that can be last."""
    spec = check_spec(spec)
    sample = find_sample(spec, model.fabric)
    programs = {rank: make_program(spec, rank) for rank in sample}
    return _time(programs, spec, model, paired=len(sample) == spec.ranks)


def find_sample(spec: Spec, fabric: Fabric) -> list[int]:
    """All ranks if they are few; otherwise the ends, those beside another node, the busiest."""
    ranks = spec.ranks
    if ranks <= MOST_RANKS:
        return list(range(ranks))
    each = ranks // fabric.nodes
    chosen = {0, each - 1, each % ranks, ranks // 2, ranks - each, ranks - 1}
    work = [spec.mask.pairs(runs) for runs in spec.rows.shards] if spec.mask.documents[2:] else []
    if work:
        chosen.add(work.index(max(work)))
    return sorted(chosen)


def _time(
    programs: Mapping[int, RankProgram], spec: Spec, model: TimingModel, paired: bool
) -> list[RankTimes]:
    clocks = {rank: _Clock(rank, x, spec.sizes, model) for rank, x in programs.items()}
    peers = _meetings(programs) if paired else {}
    going = True
    while going:
        going = False
        for clock in clocks.values():
            going |= clock.advance()
            going |= _settle(clock, clocks, peers)
    late = [rank for rank, clock in clocks.items() if not clock.is_done]
    if late:
        raise ValueError(f"ranks {late[:4]} wait for messages that nobody sends")
    return [RankTimes(rank, tuple(x.spans), tuple(x.sends)) for rank, x in clocks.items()]


def _meetings(programs: Mapping[int, RankProgram]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """(rank, number of its post) -> the posts of others that it has messages with."""
    sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    received: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for rank, program in programs.items():
        posts = (step for step in program.steps if isinstance(step, Post))
        for number, post in enumerate(posts):
            for message in post.sends:
                sent[rank, message.peer].append(number)
            for message in post.receives:
                received[message.peer, rank].append(number)
    found: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for source, to in sorted(sent.keys() | received.keys()):
        out, into = sent[source, to], received[source, to]
        if len(out) != len(into):
            raise ValueError(
                f"rank {source} sends {len(out)} messages to {to}, which has {len(into)}"
            )
        for one, other in zip(out, into, strict=True):
            found[source, one].add((to, other))
            found[to, other].add((source, one))
    return found


def _settle(
    clock: _Clock,
    clocks: Mapping[int, _Clock],
    peers: Mapping[tuple[int, int], set[tuple[int, int]]],
) -> bool:
    """When the oldest post of a rank ends, if all whom it has messages with are there."""
    if clock.waiting is None:
        return False
    mine, late, start = clock.waiting, -1, clock.waiting.ready_s
    for rank, number in peers.get((clock.rank, clock.settled), ()):
        ready = clocks[rank].ready.get(number)
        if ready is None:
            return False
        if ready > start:
            late, start = rank, ready
    clock.settle(start, start + mine.seconds, late)
    return True


class _Clock:
    """One rank on its way through its program."""

    def __init__(self, rank: int, program: RankProgram, sizes: Sizes, model: TimingModel) -> None:
        self.rank, self.program, self.sizes, self.model = rank, program, sizes, model
        self.at, self.now, self.settled, self.free_s = 0, 0.0, 0, 0.0
        self.spans: list[TimeSpan] = []
        self.sends: list[TimeSpan] = []
        self.ready: dict[int, float] = {}
        self.posted: deque[_Sending] = deque()
        self.waiting: _Sending | None = None
        self.ends: dict[str, TimeSpan] = {}
        self.held = dict(program.holds)
        self.wide: set[str] = set()
        self.left = count_sums(program, sizes)
        self.last = {name for name, _ in program.results} - sent_buffers(program)
        self.assembled = False

    @property
    def is_done(self) -> bool:
        """Is the result there?"""
        return self.assembled and self.waiting is None and not self.posted

    def advance(self) -> bool:
        """Go on until the next wait that is not over; was there anything to do?"""
        before = self.at, self.assembled
        while self.at < len(self.program.steps):
            step = self.program.steps[self.at]
            in_the_way = self._outstanding(step)
            if in_the_way is not None:
                if in_the_way not in self.ends:
                    break
                self._wait(in_the_way)
                continue
            self._take(step)
            self.at += 1
        if self.at == len(self.program.steps) and not self.assembled:
            self._assemble()
            self.assembled = True
        return before != (self.at, self.assembled)

    def _outstanding(self, step: object) -> str | None:
        """The post that a step has to wait for."""
        if isinstance(step, Await):
            return step.name if not self._is_over(step.name) else None
        if isinstance(step, Compute) and not self._hides(step):
            if self.posted:
                return self.posted[-1].name
            if self.waiting is not None:
                return self.waiting.name
            return None if self.free_s <= self.now else next(reversed(self.ends))
        return None

    def _hides(self, step: Compute) -> bool:
        backward = len(step.out) == 2
        return ("backward" if backward else "forward") in self.model.fabric.transport.hidden

    def _slowed(self, seconds: float) -> float:
        """A kernel that has not all SMs: some are kept from it, or messages hold them."""
        transport, sms = self.model.fabric.transport, self.model.sm_count
        seconds *= sms / (sms - transport.kept)
        under_way = sum(x.seconds for x in self.posted)
        if self.waiting is not None:
            under_way += self.waiting.seconds
        else:
            under_way = max(under_way, self.free_s - self.now)
        return seconds + max(0.0, min(seconds, under_way)) * transport.sms / sms

    def _is_over(self, name: str) -> bool:
        return name in self.ends and self.ends[name].end_s <= self.now

    def _wait(self, name: str) -> None:
        sent = self.ends[name]
        self._span(WAIT, sent.end_s - self.now, f"{name}: {sent.what}", sent.peer)

    def _span(self, kind: str, seconds: float, what: str, peer: int = -1) -> None:
        if seconds > 0:
            self.spans.append(TimeSpan(kind, self.now, self.now + seconds, what, peer, self.at))
            self.now += seconds

    def _take(self, step: object) -> None:
        if isinstance(step, Post):
            self._post(step)
        elif isinstance(step, Compute):
            self._compute(step)
        elif isinstance(step, Pack):
            self._copy(step.piece, f"packs {step.piece.kind}")
            self.held[step.into] = step.piece
        elif isinstance(step, Add):
            self._add(step.into, self.held[step.into], None)
        elif isinstance(step, Free):
            self.held.pop(step.buffer, None)

    def _copy(self, piece: Shard, what: str) -> None:
        """Read and write."""
        self._span(COPY, self.model.memory.seconds(2 * self.sizes.bytes(piece)), what)

    def _post(self, post: Post) -> None:
        for message in post.sends:  # a part of a tensor is copied together before it leaves
            if message.piece.heads != self.held[message.buffer].heads:
                self._copy(message.piece, f"copies {message.piece.kind} to send it")
        sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for way, messages in enumerate((post.sends, post.receives)):
            for message in messages:
                link = self.model.fabric.link(self.rank, message.peer).name
                sizes[link][way] += self.sizes.bytes(message.piece)
        by_link = {link: float(max(both)) for link, both in sizes.items()}
        seconds = self.model.fabric.seconds(by_link)
        links = " and ".join(sorted(by_link)) or "nothing"
        total = sum(map(int, by_link.values()))
        self.posted.append(_Sending(post.name, self.now, seconds, total, links, self.at))
        for message in post.receives:
            self.held[message.buffer] = message.piece
        self._start()

    def _start(self) -> None:
        """The oldest post goes on when those before it are done."""
        if self.waiting is None and self.posted:
            oldest = self.posted.popleft()
            self.waiting = oldest._replace(ready_s=max(oldest.ready_s, self.free_s))
            self.ready[self.settled] = self.waiting.ready_s

    def settle(self, start: float, end: float, late: int) -> None:
        """The oldest post goes from start to end; `late`: the peer that came last, or -1."""
        assert self.waiting is not None
        mine = self.waiting
        what = f"{mine.num_bytes / 2**20:.3g} MiB over {mine.links}"
        self.sends.append(TimeSpan(SEND, start, end, f"{mine.name}: {what}", late, mine.step))
        self.ends[mine.name] = self.sends[-1]._replace(what=what)
        self.free_s, self.waiting = end, None
        self.settled += 1
        self._start()

    def _compute(self, step: Compute) -> None:
        if len(step.keys) > 1:  # keys of several buffers are put together
            for block in step.blocks:
                heads = self.sizes.kv_heads(step.heads)
                self._copy(Shard("kv", block.keys, heads), "puts keys together")
        backward = len(step.out) == 2
        for block in step.blocks:
            for heads, kv_heads in uniform_heads(step.heads, self.sizes):
                seconds = self.model.blocks.seconds(block, len(heads), len(kv_heads), backward)
                rows, keys = block.shape
                what = f"{rows} rows x {keys} keys, {len(heads)} heads"
                self._span(COMPUTE, self._slowed(seconds), what)
                made = [Shard("dq" if backward else "o", block.rows, heads)]
                if backward:
                    made.append(Shard("dkv", block.keys, kv_heads))
                for name, piece, part in zip(step.out, step.pieces, made, strict=True):
                    if name:
                        self._add(name, piece, part)
        for name, piece in made_by(step):
            self.held.setdefault(name, piece)

    def _add(self, name: str, piece: Shard, part: Shard | None) -> None:
        """A block's part is put into a buffer, or added to it; None: another buffer is added."""
        self.left[name] -= 1
        fresh, memory, item = name not in self.held, self.model.memory, self.sizes.item_bytes
        self.held[name] = piece
        if fresh and part == piece:
            return
        found, summed = 0, part or piece
        if fresh:
            found += self._elements(piece) * (item if piece.kind == "o" else 4)
        widens = memory.is_eager or self.left[name] or name not in self.last
        if name not in self.wide and widens:
            self.wide.add(name)
            found += self._elements(piece) * (item + 4)
        more = item if part else 4
        if piece.kind == "o":
            found += self._elements(summed) * memory.merge_bytes(name in self.wide, more)
        else:
            found += self._elements(summed) * (4 + more + 4)
        kernels = EAGER_KERNELS if memory.is_eager else 1
        self._span(MERGE, memory.seconds(found, kernels), f"into {piece.kind}")

    def _elements(self, piece: Shard) -> int:
        """Of its tensors that are as wide as a head."""
        d, dv = self.sizes.head_dim, self.sizes.head_dim_v
        width = {"o": dv, "out": dv, "dq": d, "dkv": d + dv}[piece.kind]
        return self.sizes.batch * count(piece.rows) * len(piece.heads) * width

    def _assemble(self) -> None:
        """The results in one tensor each, in the type of the inputs."""
        kinds = [piece.kind for _, piece in self.program.results]
        for name, piece in self.program.results:
            if kinds.count(piece.kind) > 1:
                found = 2 * self._elements(piece) * self.sizes.item_bytes
                self._span(COPY, self.model.memory.seconds(found), f"puts {piece.kind} together")
            elif name in self.wide or piece.kind in ("dq", "dkv"):
                found = self._elements(piece) * (4 + self.sizes.item_bytes)
                self._span(COPY, self.model.memory.seconds(found), f"rounds {piece.kind}")
