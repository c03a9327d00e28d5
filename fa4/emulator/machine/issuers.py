"""Operations of one tensor pipe that several threads issue (PTX ISA 9.7.16.6.4).

The pipe keeps the order of one thread's operations. Those of different threads that touch the same
tensor memory need either the end of the first (tcgen05.commit and a wait for its mbarrier) or, on
either side of a synchronisation, tcgen05.fence::before_thread_sync and ::after_thread_sync.

Approximation towards fewer reports: the fences of one lane count for its warp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fa4.emulator.checks.clocks import WarpClock
from fa4.emulator.machine.handover import WarpFences
from fa4.emulator.machine.shadows import TMEM_COLUMNS, TMEM_GROUPS, WRITE
from fa4.emulator.warp_lanes import Array


@dataclass(frozen=True, slots=True)
class PipeThread:
    """A thread that issues operations: its warp's row, name, clock and fences, and its lane."""

    row: int
    lane: int
    name: str
    clock: WarpClock
    fences: WarpFences


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

    def __init__(self, pipe_id: int) -> None:
        self._pipe_id = pipe_id
        self._issuers: dict[tuple[int, int], Issuer] = {}

    def unordered(self, thread: PipeThread, rank: int, granules: Array, kind: str) -> str:
        """Another thread whose operation is not ordered before one that touches these granules, and
        what is missing. Empty if there is none."""
        for other in self._others(thread):
            touched = (other.touches if kind == WRITE else other.writes).get(rank)
            if touched is None:
                continue
            latest = int(touched[granules].max())
            handed = thread.fences.handed
            taken_over = int(handed[other.thread.fences.handed_id]) if handed is not None else 0
            if latest > max(self._completed(thread), taken_over):
                missing = _missing(other.thread, thread, latest)
                return f"{other.thread.name} (PTX line {other.line}) has issued: {missing}"
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


def _missing(before: PipeThread, after: PipeThread, epoch: int) -> str:
    """Which step of the hand-over of an operation is not there."""
    handed = before.fences.handed_id
    if before.clock.knowledge.seen[handed] < epoch:
        return f"{before.name} has executed no tcgen05.fence::before_thread_sync since"
    pending = after.fences.pending
    if (
        max(after.clock.knowledge.seen[handed], 0 if pending is None else pending.seen[handed])
        < epoch
    ):
        return (
            f"{after.name} has waited for nothing behind the tcgen05.fence::before_thread_sync of "
            f"{before.name}"
        )
    return f"{after.name} has executed no tcgen05.fence::after_thread_sync since its wait"
