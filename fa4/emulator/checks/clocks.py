"""Vector clocks: who knows that which accesses have happened.

An actor is whoever touches memory: a thread, the tensor pipe of a CTA, or one asynchronous
operation. The actors of a cluster are numbered in rows of 32 (`actor_id`): a row per warp, a row
per tensor pipe, and rows that serve as pools of ids for asynchronous operations. An actor's epoch
counts up whenever it publishes what it did, so (id, epoch) names all that the actor did up to
there, and one vector of epochs per warp says what happened before the warp's next access
("seen"), another what of it was made visible to the async proxy ("fenced", PTX ISA 8.4 "Proxies").
A third says what was executed before although no memory access of it is visible ("executed"): that
is all that relaxed operations tell.

Approximations, all towards fewer reports: the lanes of a warp share one pair of vectors, so what
one lane learns, all of its warp know; a warp's partial `sync_lanes` counts for all its lanes; a
proxy fence counts for the memory of every CTA, also where it names the shared memory of its own;
and an id of a pool stands for its earlier operations too, once it is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.warp_lanes import FULL_MASK, LANES, lanes_of

SEEN, FENCED, EXECUTED = 0, 1, 2
COLUMNS = 3
# (3, ids of the cluster): epochs seen, fenced, and executed where more was executed than seen
Known = NDArray[np.int32]


def actor_id(row: int, lane: int = 0) -> int:
    """The number of an actor within its cluster."""
    return row * LANES + lane


class Foreign:
    """What is known of other clusters: cluster number -> its `Known`. Never changes."""

    __slots__ = ("_flat", "by_cluster")

    def __init__(self, by_cluster: dict[int, Known]) -> None:
        self.by_cluster = by_cluster
        self._flat: tuple[NDArray[np.int64], Known] | None = None

    def __iter__(self) -> Iterator[tuple[int, Known]]:
        return iter(self.by_cluster.items())

    def joined(self, cluster: int, known: Known) -> Foreign:
        """This and what `known` says of one more cluster (its values are copied)."""
        mine = self.by_cluster.get(cluster)
        both = known.copy() if mine is None else np.maximum(mine, known)
        return Foreign({**self.by_cluster, cluster: both})

    def all_fenced(self) -> Foreign:
        """The same after a proxy fence: everything seen is fenced."""
        return Foreign({c: known[[SEEN, SEEN, EXECUTED]] for c, known in self})

    def flat(self) -> tuple[NDArray[np.int64], Known]:
        """For compiled code: (k, 2) [cluster number, first row], and all vectors side by side.

        Clusters of different launches may have different numbers of rows.
        """
        if self._flat is None:
            rows = [known.shape[1] // LANES for known in self.by_cluster.values()]
            starts = np.cumsum([0, *rows])[:-1]
            index = np.array([list(self.by_cluster), starts], dtype=np.int64).T.copy()
            self._flat = index, np.concatenate([_NO_KNOWN, *self.by_cluster.values()], axis=1)
        return self._flat


_NO_KNOWN: Known = np.zeros((COLUMNS, 0), dtype=np.int32)
NOTHING_FOREIGN = Foreign({})


class Message:
    """Knowledge: what a release publishes and an acquire takes over.

    known: int32 (3, ids): epochs of each actor of this cluster that are seen, fenced, executed.
    foreign: the same of other clusters. cluster: the number of this cluster, unique over all
    launches and ascending from launch to launch. known_from: clusters numbered below it belong to
    launches that are over, so everything they did is known.
    """

    __slots__ = ("cluster", "foreign", "known", "known_from")

    def __init__(
        self,
        known: Known,
        cluster: int = 0,
        foreign: Foreign = NOTHING_FOREIGN,
        known_from: int = 0,
    ) -> None:
        self.known = known
        self.cluster = cluster
        self.foreign = foreign
        self.known_from = known_from

    @classmethod
    def nothing(cls, rows: int, cluster: int = 0, known_from: int = 0) -> Message:
        """What is known at the start: nothing but the launches that are over.

        `known_from` is the number of the first cluster of this launch, or of an earlier one that
        this one overlaps.
        """
        known = np.zeros((COLUMNS, rows * LANES), dtype=np.int32)
        return cls(known, cluster, known_from=known_from)

    @property
    def seen(self) -> NDArray[np.int32]:
        """The highest epoch of each actor that happened before."""
        return self.known[SEEN]

    @property
    def fenced(self) -> NDArray[np.int32]:
        """The same, of what the async proxy sees too."""
        return self.known[FENCED]

    @property
    def executed(self) -> NDArray[np.int32]:
        """The highest epoch of each actor that was executed before, seen or not."""
        found: NDArray[np.int32] = np.maximum(self.known[SEEN], self.known[EXECUTED])
        return found

    def part(self, ids: NDArray[np.bool_]) -> Message:
        """What it says of the memory accesses of these ids, bool (ids,), of its own cluster."""
        known = np.where(ids, self.known, np.int32(0))
        known[EXECUTED] = 0
        return Message(known, self.cluster)

    def copy(self) -> Message:
        """A copy that may be changed without changing this one."""
        return Message(self.known.copy(), self.cluster, self.foreign, self.known_from)

    def join(self, other: Message) -> None:
        """Learn all that `other` knows; it may come from another cluster."""
        if other.cluster == self.cluster:
            np.maximum(self.known, other.known, out=self.known)
        else:
            self.foreign = self.foreign.joined(other.cluster, other.known)
        if other.foreign is not self.foreign:
            for cluster, known in other.foreign:
                if cluster == self.cluster:
                    np.maximum(self.known, known, out=self.known)
                elif self.foreign.by_cluster.get(cluster) is not known:
                    self.foreign = self.foreign.joined(cluster, known)
        self.known_from = max(self.known_from, other.known_from)

    def add(self, actor: int, epoch: int, fenced: bool = True) -> None:
        """Learn that everything actor id `actor` did up to `epoch` has happened.

        `fenced`: the async proxy sees it as well, as holds for what the async proxy wrote itself.
        """
        for column in (self.seen, self.fenced) if fenced else (self.seen,):
            if column[actor] < epoch:
                column[actor] = epoch


@dataclass(slots=True)
class Actor:
    """Whoever makes the next access to memory, as the shadow memories see it.

    An access of the actor's own id at epoch `since` or later is ordered before it; earlier ones
    only if `knowledge` has them. 0: the actor does everything in order.
    """

    row: int
    epoch: int
    knowledge: Message
    since: int = 0


class WarpClock(Actor):
    """The clock of a warp, shared by its lanes; `epoch` is that of the accesses made now.

    The warp's own row of `seen` holds the epochs up to which its lanes know each other's accesses.
    Everything that publishes or fences also advances the epoch, so that later accesses are not
    taken for part of what was published.
    """

    __slots__ = ()

    def __init__(self, row: int, rows: int, cluster: int = 0, known_from: int = 0) -> None:
        super().__init__(row, 1, Message.nothing(rows, cluster, known_from))

    def _mark(self, column: NDArray[np.int32], mask: int) -> None:
        """Set the lanes in `mask` of the warp's row to the present epoch."""
        start = self.row * LANES
        if mask == FULL_MASK:
            column[start : start + LANES] = self.epoch
        elif mask & (mask - 1) == 0:
            column[start + mask.bit_length() - 1] = self.epoch
        else:
            column[start + lanes_of(mask)] = self.epoch

    def sync_lanes(self, mask: int = FULL_MASK) -> None:
        """The lanes in `mask` learn each other's accesses (bar.warp.sync)."""
        self._mark(self.knowledge.seen, mask)
        self.epoch += 1

    def release(self, mask: int = FULL_MASK) -> Message:
        """What the lanes in `mask` publish: their accesses so far, and what the warp knows."""
        message = self.knowledge.copy()
        self._mark(message.seen, mask)
        self.epoch += 1
        return message

    def release_order(self, mask: int, published: Message | None) -> Message:
        """What a relaxed operation of the lanes in `mask` publishes: that they have executed all so
        far, as what they know of has been; of memory only what a fence has `published` before."""
        if published is None:
            rows = self.knowledge.known.shape[1] // LANES
            message = Message.nothing(rows, self.knowledge.cluster, self.knowledge.known_from)
        else:
            message = published.copy()
        executed = message.known[EXECUTED]
        np.maximum(executed, self.knowledge.executed, out=executed)
        self._mark(executed, mask)
        self.epoch += 1
        return message

    def acquire_order(self, message: Message) -> None:
        """The warp learns what was executed before, as a relaxed operation tells it."""
        if message.cluster == self.knowledge.cluster:
            executed = self.knowledge.known[EXECUTED]
            np.maximum(executed, message.executed, out=executed)

    def snapshot(self, mask: int) -> Message:
        """What an asynchronous operation carries that the lanes in `mask` issue now.

        It advances the epoch as `release` does: what the lanes do next is not ordered before the
        operation, which may run later.
        """
        return self.release(mask)

    def acquire(self, message: Message) -> None:
        """The whole warp learns `message`, even if only some of its lanes acquired it."""
        self.knowledge.join(message)

    def fence_proxy(self, mask: int = FULL_MASK) -> None:
        """fence.proxy.async by the lanes in `mask`.

        All that they did and know is visible to the async proxy for whoever learns of the fence
        (PTX ISA 8.9.3, proxy-preserved base causality order).
        """
        known = self.knowledge.known
        np.maximum(known[FENCED], known[SEEN], out=known[FENCED])
        self._mark(known[FENCED], mask)
        if self.knowledge.foreign.by_cluster:
            self.knowledge.foreign = self.knowledge.foreign.all_fenced()
        self.epoch += 1

    def finish_launches(self, known_from: int) -> None:
        """Clusters numbered below `known_from` are over and visible (griddepcontrol.wait)."""
        self.knowledge.known_from = max(self.knowledge.known_from, known_from)


@dataclass(slots=True)
class AsyncActor(Actor):
    """One asynchronous operation: its accesses happen at some time after it was issued.

    An operation whose parts complete apart (a store that has read its source before it has
    written its target) is one actor per part.
    """

    lane: int = 0

    @property
    def id(self) -> int:
        """The number of this actor within its cluster."""
        return actor_id(self.row, self.lane)

    def completion(self, fenced: bool = True) -> Message:
        """What its completion publishes: its own accesses and all that its issuer knew.

        To publish the accesses alone: `message.add(operation.id, operation.epoch)`. `fenced` is
        False for operations of the generic proxy (cp.async).
        """
        message = self.knowledge.copy()
        message.add(self.id, self.epoch, fenced)
        return message


class AsyncPool:
    """Ids for operations that run in any order: rows first_row .. first_row + rows - 1."""

    def __init__(self, first_row: int, rows: int = 4) -> None:
        self._first_row = first_row
        self._epochs = [0] * (rows * LANES)
        self.begun = 0  # operations so far: number n has id n % ids, in its epoch n // ids + 1

    def begin(self, snapshot: Message) -> AsyncActor:
        """A new operation that knows `snapshot`, which must not be changed afterwards."""
        at = self.begun % len(self._epochs)
        self.begun += 1
        self._epochs[at] += 1
        epoch, row = self._epochs[at], self._first_row + at // LANES
        return AsyncActor(row, epoch, snapshot, since=epoch, lane=at % LANES)


class Stream:
    """Operations of one warp that end in order (its tcgen05.ld, its tcgen05.st, its wgmma).

    All have the same id: whoever knows of one knows of the earlier ones. awaited: epoch up to which
    the warp has waited by an instruction for it.
    """

    __slots__ = ("_clock", "_epoch", "_lane", "_row", "awaited")

    def __init__(self, row: int, lane: int, clock: WarpClock) -> None:
        self._row = row
        self._lane = lane
        self._clock = clock
        self._epoch = 0
        self.awaited = 0

    def begin(self) -> AsyncActor:
        """A new operation. It knows what its warp knows: use it now, and do not keep it."""
        self._epoch += 1
        knowledge = self._clock.knowledge
        return AsyncActor(self._row, self._epoch, knowledge, since=self._epoch, lane=self._lane)

    def wait(self) -> None:
        """The warp has executed the instruction that waits for all of them."""
        self.awaited = self._epoch

    def settle(self, epoch: int | None = None) -> None:
        """All, or those up to `epoch`, are complete and the warp has waited for that.

        What they knew, the warp knew: only their own accesses are news.
        """
        done = self._epoch if epoch is None else epoch
        self._clock.knowledge.add(actor_id(self._row, self._lane), done, fenced=False)


class PipeActor:
    """A pipe that runs its operations in the order of issue (tcgen05.mma, tcgen05.cp).

    committed: epoch of the latest that a tcgen05.commit follows.
    """

    def __init__(self, row: int) -> None:
        self._row = row
        self.committed = 0
        self._latest: AsyncActor | None = None

    @property
    def epoch(self) -> int:
        """That of the latest operation, 0 before the first."""
        return self._latest.epoch if self._latest is not None else 0

    def begin(self, snapshot: Message) -> AsyncActor:
        """The next operation: it also knows what the earlier ones of the pipe knew.

        Its `completion()` publishes it and the earlier ones: tcgen05.commit takes that of the
        latest operation that the committing thread issued.
        """
        before = self._latest
        knowledge = snapshot
        if before is not None:
            knowledge = before.knowledge.copy()
            knowledge.join(snapshot)
        self._latest = AsyncActor(self._row, before.epoch + 1 if before else 1, knowledge)
        return self._latest
