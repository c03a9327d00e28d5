"""An exact happens-before checker by sets, slow and plain, and a world that drives both checkers.

The exact checker has no clocks and no epochs. Each lane and each asynchronous operation holds the
set of accesses that happened before its next one, as the bits of an integer; so does each message.
All accesses of the history are kept and compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fa4.emulator.checks.clocks import AsyncActor, AsyncPool, Message, PipeActor, WarpClock
from fa4.emulator.checks.conflict import (
    MISSING_PROXY_FENCE,
    READ_AFTER_WRITE,
    SAME_INSTRUCTION_WRITE,
    UNINITIALISED,
    WRITE_AFTER_READ,
    WRITE_AFTER_WRITE,
    Access,
    Conflict,
)
from fa4.emulator.checks.memory import ShadowMemory

WARPS = 2  # per cluster
PIPE_ROW, POOL_ROW, ROWS = WARPS, WARPS + 1, WARPS + 2
LANES = (0, 1, 2, 31)  # the lanes that run

Name = tuple[int, int, int]  # cluster, id, epoch of an access
Found = set[tuple[str, int, int, Name]]  # kind, granule, my lane, the other access
NO_ACCESS = (-1, -1, 0)


@dataclass
class Past:
    """What happened before, and what of it the async proxy sees: sets of access numbers."""

    seen: int = 0
    fenced: int = 0

    def join(self, other: Past) -> None:
        self.seen |= other.seen
        self.fenced |= other.fenced

    def copy(self) -> Past:
        return Past(self.seen, self.fenced)


@dataclass(frozen=True)
class Done:
    """An access of the history."""

    bit: int
    name: Name
    granule: int
    is_write: bool
    how: Access
    instruction: int


@dataclass
class ExactMemory:
    """All accesses to a memory, and who conflicts with whom."""

    initialised: frozenset[int] = frozenset()
    history: list[Done] = field(default_factory=list)
    instruction: int = 0

    def conflicts(self, lane: int, granule: int, past: Past, how: Access, is_write: bool) -> Found:
        earlier = [done for done in self.history if done.granule == granule]
        writes = [done for done in earlier if done.is_write]
        found: Found = set()
        for done in earlier:
            if done.bit & past.seen or (done.how.strong and how.strong):
                continue
            if is_write:
                kind = WRITE_AFTER_WRITE if done.is_write else WRITE_AFTER_READ
                found.add((kind, granule, lane, done.name))
            elif done.is_write:
                found.add((READ_AFTER_WRITE, granule, lane, done.name))
        if not is_write and not writes and granule not in self.initialised:
            found.add((UNINITIALISED, granule, lane, NO_ACCESS))
        if not is_write and how.async_proxy and writes:
            for last in writes:
                same = last.instruction == writes[-1].instruction
                if same and not last.how.async_proxy and not last.bit & past.fenced:
                    found.add((MISSING_PROXY_FENCE, granule, lane, last.name))
        return found

    def record(self, name: Name, granule: int, how: Access, is_write: bool) -> int:
        bit = 1 << len(self.history)
        self.history.append(Done(bit, name, granule, is_write, how, self.instruction))
        return bit

    @property
    def everything(self) -> int:
        return (1 << len(self.history)) - 1


def identity(conflict: Conflict, cluster: int) -> tuple[str, int, int, Name]:
    """What the fast checker, asked by an actor of `cluster`, answered, as the exact one puts it."""
    other = NO_ACCESS
    if conflict.other_id >= 0:
        where = conflict.other_cluster if conflict.other_cluster >= 0 else cluster
        other = where, conflict.other_id, conflict.other_epoch
    return conflict.kind, conflict.granule, conflict.mine, other


@dataclass
class Operation:
    """An asynchronous operation in both worlds."""

    fast: AsyncActor
    past: Past
    pipe: bool
    cluster: int
    how: Access  # of all its accesses


class World:
    """Clusters of warps that run the same events through the fast checker and the exact one.

    Box numbers name mailboxes for messages, slot numbers asynchronous operations in flight. The
    lanes that acquire are told to the exact checker; the fast one takes the whole warp.
    """

    def __init__(self, memory: ShadowMemory, exact: ExactMemory, clusters: int, boxes: int) -> None:
        self.memory, self.exact, self.clusters = memory, exact, clusters
        self.boxes: list[tuple[Message, Past] | None] = [None] * boxes
        self.first_cluster = -clusters
        self.over = 0  # accesses of the launches before the present one
        self.launch(overlapping=False)

    def launch(self, overlapping: bool) -> None:
        """The next launch: its warps know all earlier ones, but the last if that overlaps it."""
        before = self.first_cluster
        self.first_cluster += self.clusters
        known_from = max(before, 0) if overlapping else self.first_cluster
        known = self.over if overlapping else self.exact.everything
        self.over = self.exact.everything
        warps = range(self.clusters * WARPS)
        cluster = [self.first_cluster + warp // WARPS for warp in warps]
        self.warps = [WarpClock(w % WARPS, ROWS, cluster[w], known_from) for w in warps]
        self.pasts = [{lane: Past(known, known) for lane in LANES} for _ in warps]
        self.pools = [AsyncPool(POOL_ROW, 1) for _ in range(self.clusters)]
        self.pipes = [PipeActor(PIPE_ROW) for _ in range(self.clusters)]
        self.pipe_past = [Past() for _ in range(self.clusters)]
        self.operations: dict[int, Operation] = {}

    def finish_launches(self, warp: int) -> None:
        """griddepcontrol.wait"""
        self.warps[warp].finish_launches(self.first_cluster)
        for past in self.pasts[warp].values():
            past.join(Past(self.over, self.over))

    def access(
        self, warp: int, where: list[tuple[int, int]], how: Access, is_write: bool
    ) -> tuple[Conflict | None, Found]:
        """One instruction: (lane, granule) pairs."""
        clock, found = self.warps[warp], self.would_find(warp, where, how, is_write)
        lanes, granules = np.array(where, dtype=np.int64).T
        self.latest = clock, how
        fast = (self.memory.write if is_write else self.memory.read)(granules, lanes, clock, how)
        self.exact.instruction += 1
        for lane, granule in where:
            name = clock.knowledge.cluster, clock.row * 32 + lane, clock.epoch
            self.pasts[warp][lane].seen |= self.exact.record(name, granule, how, is_write)
        return fast, found

    def listed(self) -> list[Conflict]:
        """All that the fast checker found at the latest access."""
        return self.memory.conflicts(*self.latest)[0]

    def would_find(
        self, warp: int, where: list[tuple[int, int]], how: Access, is_write: bool
    ) -> Found:
        """The conflicts that an instruction would have, by the exact checker."""
        clock, found = self.warps[warp], set()
        for lane, granule in where:
            past = self.pasts[warp][lane]
            found |= self.exact.conflicts(lane, granule, past, how, is_write)
            for other, same in where:
                if is_write and not how.strong and same == granule and other != lane:
                    name = clock.knowledge.cluster, clock.row * 32 + other, clock.epoch
                    found.add((SAME_INSTRUCTION_WRITE, granule, lane, name))
        return found

    def release(self, warp: int, lanes: tuple[int, ...], box: int) -> None:
        fast, past = self.warps[warp].release(mask_of(lanes)), Past()
        for lane in lanes:
            past.join(self.pasts[warp][lane])
        self.post(box, fast, past)

    def post(self, box: int, fast: Message, past: Past) -> None:
        """Add a message to what a mailbox holds, as arrivals on an mbarrier do."""
        held = self.boxes[box]
        if held is None:
            self.boxes[box] = fast, past
        else:
            held[0].join(fast)
            held[1].join(past)

    def acquire(self, warp: int, lanes: tuple[int, ...], box: int) -> None:
        held = self.boxes[box]
        if held is not None:
            self.warps[warp].acquire(held[0])
            for lane in lanes:
                self.pasts[warp][lane].join(held[1])

    def sync(self, warp: int, lanes: tuple[int, ...]) -> None:
        self.warps[warp].sync_lanes(mask_of(lanes))
        both = Past()
        for lane in lanes:
            both.join(self.pasts[warp][lane])
        for lane in lanes:
            self.pasts[warp][lane].join(both)

    def fence(self, warp: int, lanes: tuple[int, ...]) -> None:
        self.warps[warp].fence_proxy(mask_of(lanes))
        for lane in lanes:
            self.pasts[warp][lane].fenced |= self.pasts[warp][lane].seen

    def issue(self, warp: int, lane: int, slot: int, pipe: bool, how: Access) -> None:
        """Lane `lane` issues an operation, to be named by `slot`, that accesses memory as `how`."""
        cluster = warp // WARPS
        snapshot, past = self.warps[warp].snapshot(1 << lane), self.pasts[warp][lane].copy()
        begin = self.pipes[cluster].begin if pipe else self.pools[cluster].begin
        if pipe:  # one at a time: the earlier operation makes no further accesses
            past.join(self.pipe_past[cluster])
            self.pipe_past[cluster] = past
            self.operations = {
                other: operation
                for other, operation in self.operations.items()
                if not (operation.pipe and operation.cluster == cluster)
            }
        self.operations[slot] = Operation(begin(snapshot), past, pipe, cluster, how)

    def would_operate(self, slot: int, granule: int, is_write: bool) -> Found:
        """The conflicts that an access by an operation would have, by the exact checker."""
        op = self.operations[slot]
        return self.exact.conflicts(op.fast.lane, granule, op.past, op.how, is_write)

    def operate(self, slot: int, granule: int, is_write: bool) -> tuple[Conflict | None, Found]:
        """The operation `slot` accesses a granule."""
        op, found = self.operations[slot], self.would_operate(slot, granule, is_write)
        call = self.memory.write_range if is_write else self.memory.read_range
        self.latest = op.fast, op.how
        fast = call(granule, granule + 1, op.fast.lane, op.fast, op.how)
        self.exact.instruction += 1
        name = op.cluster + self.first_cluster, op.fast.id, op.fast.epoch
        bit = self.exact.record(name, granule, op.how, is_write)
        op.past.join(Past(bit, bit if op.how.async_proxy else 0))
        return fast, found

    def complete(self, slot: int, box: int) -> None:
        """The operation `slot` ends and signals."""
        op = self.operations.pop(slot)
        self.post(box, op.fast.completion(fenced=op.how.async_proxy), op.past.copy())


def mask_of(lanes: tuple[int, ...]) -> int:
    """The mask of some lanes."""
    return sum(1 << lane for lane in lanes)
