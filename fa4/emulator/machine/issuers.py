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

from fa4.emulator.machine.checks import TMEM_COLUMNS, TMEM_GROUPS, WRITE
from fa4.emulator.machine.state import Warp
from fa4.emulator.masks import Array

BEFORE, AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"


def fence(warp: Warp, which: str) -> None:
    """A fence of a warp: the epochs of the cluster's pipes at that time."""
    warp.unit[which] = [cta.pipe_actor.epoch for cta in warp.cta.cluster.ctas]


@dataclass(eq=False)
class Issuer:
    """What a thread's operations touched: the pipe's epoch of the latest for each granule.

    By rank of the CTA in the group; line: PTX line of its latest operation.
    """

    warp: Warp
    line: int = 0
    writes: dict[int, Array] = field(default_factory=dict)
    touches: dict[int, Array] = field(default_factory=dict)


class Issuers:
    """The threads that have issued operations to one pipe."""

    def __init__(self, pipe_rank: int, pipe_id: int) -> None:
        self._pipe_rank = pipe_rank
        self._pipe_id = pipe_id
        self._issuers: dict[tuple[int, int], Issuer] = {}

    def unordered(self, warp: Warp, lane: int, rank: int, granules: Array, kind: str) -> str:
        """Another thread whose operation is not ordered before one that touches these granules.

        Empty if there is none.
        """
        for other in self._others(warp, lane):
            touched = (other.touches if kind == WRITE else other.writes).get(rank)
            if touched is None:
                continue
            latest = int(touched[granules].max())
            if latest > max(self._completed(warp), self._fenced(other.warp, warp)):
                return f"{other.warp.name} (PTX line {other.line})"
        return ""

    def record(
        self, warp: Warp, lane: int, line: int, epoch: int, rank: int, granules: Array, kind: str
    ) -> None:
        """An operation, as the pipe's `epoch`, touches granules of a CTA of the group."""
        mine = self._issuers.setdefault((warp.row, lane), Issuer(warp))
        mine.line = line
        for epochs in (mine.touches, mine.writes) if kind == WRITE else (mine.touches,):
            if rank not in epochs:
                epochs[rank] = np.zeros(TMEM_GROUPS * TMEM_COLUMNS, np.int64)
            epochs[rank][granules] = epoch

    def _others(self, warp: Warp, lane: int) -> Iterator[Issuer]:
        for thread, issuer in self._issuers.items():
            if thread != (warp.row, lane):
                yield issuer

    def _completed(self, warp: Warp) -> int:
        """Up to which epoch of the pipe the warp knows that operations are complete."""
        return int(warp.clock.knowledge.seen[self._pipe_id])

    def _fenced(self, before: Warp, after: Warp) -> int:
        """Up to which epoch fences of both warps order the operations of the first."""
        ends = [warp.unit.get(which) for warp, which in ((before, BEFORE), (after, AFTER))]
        return min(epochs[self._pipe_rank] if epochs else 0 for epochs in ends)
