"""What can go wrong with a plan, found without running it; each finding is one line.

    messages    every send has its receive, of the same piece, in the order of the pair
    progress    no rank waits for ever
    buffers     nothing is read before it is there, written while it is sent, received into while
                it is in use, or freed under way
    pairs       each pair of a row and a key once, with the mask (`symbols`)
    balance     no rank computes much more than the average

Why one order of delivery is enough: a rank's program is a fixed list, a message is named by its
pair of ranks and its number, and a rank decides nothing by what arrives first. A step that can go
on can do so whatever other ranks do, so all orders end in the same state (Kahn 1974): either every
program is through, or the same ranks wait. Channels hold nothing: a message is met by its receiver
(rendezvous), the least that a network gives; what gets through without buffers does with them.
`explore` tries every order, for small plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4.distributed.execute import find_rows
from fa4.distributed.layout import Runs
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
    Step,
)

MOST_IMBALANCE = 1.05
MOST_FINDINGS = 20


@dataclass(frozen=True)
class PlanReport:
    """findings: none for a plan that is right. balance: the most that a rank computes, over the
    mean. sent_bytes, peak_bytes: of the rank that has most.
    """

    findings: tuple[str, ...]
    balance: float
    sent_bytes: int
    peak_bytes: int


def check_plan(plan: CommunicationPlan, most_imbalance: float = float("inf")) -> PlanReport:
    """All rules; later ones only where the earlier ones hold."""
    findings = [*find_unmatched(plan), *find_races(plan)]
    if not findings:
        findings = find_deadlock(plan)
    if not findings:
        from fa4.distributed.symbols import find_wrong_pairs

        findings = find_wrong_pairs(plan)
    ranks = range(plan.ranks)
    work = [plan.pairs(rank) for rank in ranks]
    balance = max(work) * plan.ranks / total if (total := sum(work)) else 1.0
    if not findings and balance > most_imbalance:
        busiest = work.index(max(work))
        findings = [f"rank {busiest} computes {balance:.2f} times the average"]
    return PlanReport(
        tuple(findings[:MOST_FINDINGS]),
        balance,
        max(plan.sent_bytes(rank) for rank in ranks),
        max(plan.peak_bytes(rank) for rank in ranks),
    )


def _shown(piece: Shard) -> str:
    def runs(rows: Runs) -> str:
        shown = ", ".join(
            f"{r.start}:{r.stop}" + (f":{r.step}" if r.step > 1 else "") for r in rows[:3]
        )
        return shown + (", ..." if len(rows) > 3 else "")

    return f"{piece.kind} rows {runs(piece.rows)} heads {piece.heads.start}:{piece.heads.stop}"


def find_unmatched(plan: CommunicationPlan) -> list[str]:
    """Messages whose other side is missing or another one."""
    sent: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
    received: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
    found = []
    for rank, program in enumerate(plan.programs):
        for post in _posts(program):
            found += [
                f"rank {rank}, {post.name}: no peer {message.peer}"
                for message in (*post.sends, *post.receives)
                if not 0 <= message.peer < plan.ranks or message.peer == rank
            ]
            for message in post.sends:
                sent[rank, message.peer].append(message)
            for message in post.receives:
                received[message.peer, rank].append(message)
    for source, to in sorted(sent.keys() | received.keys()):
        out, into = sent[source, to], received[source, to]
        if len(out) != len(into):
            found.append(f"rank {source} sends {len(out)} messages to {to}, which has {len(into)}")
            continue
        for number, (one, other) in enumerate(zip(out, into, strict=True)):
            if one.piece != other.piece:
                found.append(
                    f"message {number} from {source} to {to}: sent {_shown(one.piece)}, "
                    f"expected {_shown(other.piece)}"
                )
    return found


def _posts(program: RankProgram) -> Iterator[Post]:
    return (step for step in program.steps if isinstance(step, Post))


def find_races(plan: CommunicationPlan) -> list[str]:
    """Buffers that are used while they may not be, rank by rank."""
    return [
        f"rank {rank}, {text}"
        for rank, program in enumerate(plan.programs)
        for text in _races(program)
    ]


class _Buffers:
    """What a rank's buffers hold, and which posts still read or fill them."""

    def __init__(self, program: RankProgram) -> None:
        self.held = dict(program.holds)
        self.sending: dict[str, str] = {}
        self.filling: dict[str, str] = {}
        self.under_way: dict[str, Post] = {}
        self.found: list[str] = []

    def read(self, name: str, where: str) -> None:
        """Somebody reads a buffer now."""
        if name in self.filling:
            self.found.append(f"{where}: reads {name} before {self.filling[name]} has filled it")
        elif name not in self.held:
            self.found.append(f"{where}: reads {name}, which holds nothing")

    def write(self, name: str, where: str) -> None:
        """Somebody writes it."""
        if name in self.filling:
            self.found.append(f"{where}: writes {name} while {self.filling[name]} fills it")
        if name in self.sending:
            self.found.append(f"{where}: writes {name} while {self.sending[name]} sends it")


def _races(program: RankProgram) -> list[str]:
    state = _Buffers(program)
    for number, step in enumerate(program.steps):
        where = f"step {number}"
        if isinstance(step, Post):
            _post(state, step, where)
        elif isinstance(step, Await):
            post = state.under_way.pop(step.name, None)
            if post is None:
                state.found.append(f"{where}: waits for {step.name}, which is not under way")
                continue
            for message in post.sends:
                state.sending.pop(message.buffer, None)
            for message in post.receives:
                state.filling.pop(message.buffer, None)
                state.held[message.buffer] = message.piece
        else:
            _use(state, step, where)
    state.found += [f"end: {name} was never waited for" for name in state.under_way]
    for name, piece in program.results:
        state.read(name, "end")
        if name in state.held and not _has(state.held[name], piece):
            state.found.append(f"end: {name} has not {_shown(piece)}")
    return state.found


def _post(state: _Buffers, post: Post, where: str) -> None:
    if post.name in state.under_way:
        state.found.append(f"{where}: {post.name} is under way already")
    for message in post.sends:
        state.read(message.buffer, where)
        held = state.held.get(message.buffer)
        if held is not None and not _has(held, message.piece):
            state.found.append(
                f"{where}: {message.buffer} holds {_shown(held)}, not {_shown(message.piece)}"
            )
    for message in post.receives:
        state.write(message.buffer, where)
        if message.buffer in state.held:
            state.found.append(f"{where}: {post.name} overwrites {message.buffer}, still in use")
    for message in post.sends:
        state.sending[message.buffer] = post.name
    for message in post.receives:
        state.filling[message.buffer] = post.name
    state.under_way[post.name] = post


def _use(state: _Buffers, step: Pack | Compute | Add | Free, where: str) -> None:
    """Steps that read and write at once."""
    if isinstance(step, Free):
        if step.buffer not in state.held:
            state.found.append(f"{where}: frees {step.buffer}, which holds nothing")
        state.write(step.buffer, where)
        state.held.pop(step.buffer, None)
        return
    reads: Sequence[str] = ()
    writes: list[tuple[str, Shard | None]]
    if isinstance(step, Pack):
        reads, writes = step.sources, [(step.into, step.piece)]
    elif isinstance(step, Add):
        reads, writes = (step.source, step.into), [(step.into, state.held.get(step.into))]
        one, other = (state.held.get(name) for name in reads)
        if one and other and one != other:
            state.found.append(f"{where}: adds {_shown(one)} to {_shown(other)}")
    else:
        reads = (*step.queries, *step.keys)
        writes = [(name, x) for name, x in zip(step.out, step.pieces, strict=True) if name]
        for name, x in writes:
            had = state.held.get(name)
            if x is not None and had is not None and had != x:
                state.found.append(f"{where}: adds {_shown(x)} to {name}, that of {_shown(had)}")
    for name in reads:
        state.read(name, where)
    for name, x in writes:
        state.write(name, where)
        if x is not None:
            state.held[name] = x


def _has(held: Shard, wanted: Shard) -> bool:
    """Does a buffer have the rows and heads of a message? O may leave as a finished result."""
    alike = held.kind == wanted.kind or (held.kind, wanted.kind) == ("o", "out")
    heads = held.heads.start <= wanted.heads.start and wanted.heads.stop <= held.heads.stop
    if not alike or not heads:
        return False
    if held.rows == wanted.rows:
        return True
    try:
        find_rows([held.rows], wanted.rows)
    except ValueError:
        return False
    return True


def find_deadlock(plan: CommunicationPlan) -> list[str]:
    """Ranks that wait for ever: run all programs until none can go on."""
    state = Meetings(plan)
    while state.advance():
        pass
    return state.stuck()


class Meetings:
    """Where every rank stands: at which step, and how far the posts of each have come."""

    def __init__(self, plan: CommunicationPlan) -> None:
        self.programs = [program.steps for program in plan.programs]
        self.at = [0] * plan.ranks
        self.posted: list[list[tuple[str, list[list[tuple[str, int]]]]]] = [
            [] for _ in self.programs
        ]
        self.met: list[set[tuple[str, int, int]]] = [set() for _ in self.programs]
        self.names: list[set[str]] = [set() for _ in self.programs]
        for rank in range(plan.ranks):
            self._run(rank)

    def _run(self, rank: int) -> None:
        """A rank goes on to its next wait that is not over, posting on its way."""
        steps = self.programs[rank]
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            if isinstance(step, Await) and step.name not in self.names[rank]:
                return
            if isinstance(step, Post):
                self._enter(rank, step)
            self.at[rank] += 1

    def _enter(self, rank: int, post: Post) -> None:
        both = [("send", m.peer) for m in post.sends] + [("receive", m.peer) for m in post.receives]
        stages = [both]
        if post.in_turn:
            sends, receives = iter(both[: len(post.sends)]), iter(both[len(post.sends) :])
            stages = [[next(sends if kind == "send" else receives)] for kind in post.in_turn]
        self.posted[rank].append((post.name, [list(stage) for stage in stages]))
        self._close(rank)

    def _close(self, rank: int) -> None:
        """Posts with nothing left to meet are done, in their order."""
        while self.posted[rank]:
            name, stages = self.posted[rank][0]
            while stages and not stages[0]:
                stages.pop(0)
            if stages:
                return
            self.posted[rank].pop(0)
            self.names[rank].add(name)

    def open(self, rank: int) -> list[tuple[str, int]]:
        """What the rank's oldest post offers to its peers now."""
        return self.posted[rank][0][1][0] if self.posted[rank] else []

    def meetings(self) -> list[tuple[int, int]]:
        """(source, to) of messages of which both sides are there."""
        return [
            (rank, peer)
            for rank in range(len(self.programs))
            for kind, peer in dict.fromkeys(self.open(rank))
            if kind == "send" and ("receive", rank) in self.open(peer)
        ]

    def meet(self, source: int, to: int) -> None:
        """One message is handed over."""
        self.open(source).remove(("send", to))
        self.open(to).remove(("receive", source))
        for rank in (source, to):
            self._close(rank)
            self._run(rank)

    def advance(self) -> bool:
        """Hand over all messages that can be; were there any?"""
        meetings = self.meetings()
        for source, to in meetings:
            self.meet(source, to)
        return bool(meetings)

    def stuck(self) -> list[str]:
        """One line about who waits for whom; none if all programs are through."""
        waiting = [r for r, steps in enumerate(self.programs) if self.at[r] < len(steps)]
        waiting = waiting or [r for r, posts in enumerate(self.posted) if posts]
        if not waiting:
            return []
        chain = []
        for rank in waiting[:4]:
            step: Step | None = None
            if self.at[rank] < len(self.programs[rank]):
                step = self.programs[rank][self.at[rank]]
            name = step.name if isinstance(step, Await) else "its end"
            needs = ", ".join(f"{kind} {peer}" for kind, peer in self.open(rank)[:3])
            chain.append(f"rank {rank} waits for {name} (open: {needs or 'nothing'})")
        more = f"; {len(waiting) - 4} more" if len(waiting) > 4 else ""
        return [f"deadlock: {'; '.join(chain)}{more}"]


def explore(plan: CommunicationPlan, most: int = 100_000) -> set[bool]:
    """Every order of handing messages over; whether the ends reached are right (True) or stuck.

    ValueError for a plan with more than so many states.
    """
    ends: set[bool] = set()
    seen: set[tuple[object, ...]] = set()
    waiting: list[tuple[tuple[int, int], ...]] = [()]
    while waiting:
        path = waiting.pop()
        state = Meetings(plan)
        for meeting in path:
            state.meet(*meeting)
        key = (tuple(state.at), str(state.posted))
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > most:
            raise ValueError(f"explore must have at most {most} states; got more")
        nexts = state.meetings()
        if not nexts:
            ends.add(not state.stuck())
        waiting += [(*path, meeting) for meeting in nexts]
    return ends
