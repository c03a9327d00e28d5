"""Operations of one tensor pipe that several threads issue (PTX ISA 9.7.16.6.4).

The pipe keeps the order of one thread's operations. Those of different threads that touch the same
tensor memory need either the end of the first (tcgen05.commit and a wait for its mbarrier) or, on
either side of a synchronisation, tcgen05.fence::before_thread_sync and ::after_thread_sync.

Approximations towards fewer reports: the fences of one lane count for its warp, and nobody checks
that there is a synchronisation between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fa4.emulator.checks.clocks import WarpClock
from fa4.emulator.machine.shadows import TMEM_COLUMNS, TMEM_GROUPS, WRITE
from fa4.emulator.masks import Array


@dataclass(slots=True, eq=False)
class PipeFences:
    """The tcgen05 fences of a warp: the epoch of each pipe of the cluster at the latest, by rank.

    before, after: ::before_thread_sync, ::after_thread_sync; empty: none so far.
    """

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PipeThread:
    """A thread that issues operations: its warp's row, name, clock and fences, and its lane."""

    row: int
    lane: int
    name: str
    clock: WarpClock
    fences: PipeFences


@dataclass(eq=False)
class Issuer:
    """What a thread's operations touched: the pipe's epoch of the latest for each granule.

    By rank of the CTA in the group; line: PTX line of its latest operation.
    """

    thread: PipeThread
    line: int = 0
    writes: dict[int, Array] = field(default_factory=dict)
    touches: dict[int, Array] = field(default_factory=dict)


class Issuers:
    """The threads that have issued operations to one pipe."""

    def __init__(self, pipe_rank: int, pipe_id: int) -> None:
        self._pipe_rank = pipe_rank
        self._pipe_id = pipe_id
        self._issuers: dict[tuple[int, int], Issuer] = {}

    def unordered(self, thread: PipeThread, rank: int, granules: Array, kind: str) -> str:
        """Another thread whose operation is not ordered before one that touches these granules.

        Empty if there is none.
        """
        for other in self._others(thread):
            touched = (other.touches if kind == WRITE else other.writes).get(rank)
            if touched is None:
                continue
            latest = int(touched[granules].max())
            if latest > max(self._completed(thread), self._fenced(other.thread, thread)):
                return f"{other.thread.name} (PTX line {other.line})"
        return ""

    def record(
        self, thread: PipeThread, line: int, epoch: int, rank: int, granules: Array, kind: str
    ) -> None:
        """An operation, as the pipe's `epoch`, touches granules of a CTA of the group."""
        mine = self._issuers.setdefault((thread.row, thread.lane), Issuer(thread))
        mine.line = line
        for epochs in (mine.touches, mine.writes) if kind == WRITE else (mine.touches,):
            if rank not in epochs:
                epochs[rank] = np.zeros(TMEM_GROUPS * TMEM_COLUMNS, np.int64)
            epochs[rank][granules] = epoch

    def _others(self, thread: PipeThread) -> Iterator[Issuer]:
        for key, issuer in self._issuers.items():
            if key != (thread.row, thread.lane):
                yield issuer

    def _completed(self, thread: PipeThread) -> int:
        """Up to which epoch of the pipe the warp knows that operations are complete."""
        return int(thread.clock.knowledge.seen[self._pipe_id])

    def _fenced(self, before: PipeThread, after: PipeThread) -> int:
        """Up to which epoch fences of both warps order the operations of the first."""
        ends = (before.fences.before, after.fences.after)
        return min(epochs[self._pipe_rank] if epochs else 0 for epochs in ends)
