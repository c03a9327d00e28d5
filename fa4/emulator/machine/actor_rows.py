"""The numbers of the actors of a cluster: which rows of its clocks are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.checks.clocks import actor_id
from fa4.emulator.warp_lanes import LANES

POOL_ROWS = 8  # rows of 32 ids for a CTA's asynchronous operations
# Warps that share a row of ids for their tensor memory loads and stores: each of them reaches other
# lanes, so that the shadow, which remembers one read for each row, forgets none.
WARPS_PER_STREAM_ROW = 4


@dataclass(frozen=True)
class ActorRows:
    """The rows of a cluster: of all warps, of the CTAs' tensor pipes, of what warps hand on of what
    they have given to a pipe, of the pools of asynchronous operations, of the warps' tensor memory
    loads and stores, of their wgmma instructions.

    ctas, warps: how many CTAs the cluster has, and warps each of them. with_wgmma: the program has
    wgmma instructions; else there are no rows for them.
    """

    ctas: int
    warps: int
    with_wgmma: bool = False

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.products(self.ctas, 0) if self.with_wgmma else self.stream(self.ctas, 0)

    def warp(self, rank: int, index: int) -> int:
        """The row of a warp's lanes."""
        return rank * self.warps + index

    def pipe(self, rank: int) -> int:
        """The row of a CTA's tensor pipe."""
        return self.ctas * self.warps + rank

    def handed_id(self, rank: int, warp: int) -> int:
        """The id that no access has, whose epoch is the pipe's of the latest operation that a warp
        has issued before a tcgen05.fence::before_thread_sync."""
        return actor_id(self.ctas * (self.warps + 1) + rank, warp)

    @cached_property
    def of_tensor(self) -> NDArray[np.bool_]:
        """Which ids a tcgen05.fence speaks of, bool (ids,): pipes, what was given to them, tensor
        memory loads and stores."""
        ids = np.zeros(self.count * LANES, bool)
        ids[actor_id(self.pipe(0)) : actor_id(self.pool(0))] = True
        ids[actor_id(self.stream(0, 0)) : actor_id(self.products(0, 0))] = True
        return ids

    def pool(self, rank: int) -> int:
        """The first row of a CTA's asynchronous operations."""
        return self.ctas * (self.warps + 2) + rank * POOL_ROWS

    def stream(self, rank: int, warp: int) -> int:
        """The row of the tensor memory loads and stores of a warp."""
        rows = -(-self.warps // WARPS_PER_STREAM_ROW)
        return self.pool(self.ctas) + rank * rows + warp // WARPS_PER_STREAM_ROW

    def products(self, rank: int, warp: int) -> int:
        """The row of the wgmma instructions of a warp: one of its own, since the warps of a group
        read the same operand, and the shadow remembers one read for each row."""
        return self.stream(self.ctas, 0) + rank * self.warps + warp

    def name_of(self, identity: int, ctas: Sequence[int]) -> str:
        """Text for an actor id in reports. ctas: the indices of the CTAs in the grid, by rank."""
        row, lane = divmod(identity, LANES)
        if row < self.pipe(0):
            rank, index = divmod(row, self.warps)
            return f"CTA {ctas[rank]} warp {index} lane {lane}"
        if row < self.pool(0):
            return f"the tensor pipe of CTA {ctas[row - self.pipe(0)]}"
        if row < self.stream(0, 0):
            return f"an asynchronous operation of CTA {ctas[(row - self.pool(0)) // POOL_ROWS]}"
        if row >= self.products(0, 0):
            rank, index = divmod(row - self.products(0, 0), self.warps)
            return f"a wgmma of CTA {ctas[rank]} warp {index}"
        rank, index, what = self.stream_of(identity)
        return f"a {what} of CTA {ctas[rank]} warp {index}"

    def stream_of(self, identity: int) -> tuple[int, int, str]:
        """(rank, warp, tcgen05.ld or .st) of an id of a tensor memory load or store."""
        row, lane = divmod(identity, LANES)
        rank, group = divmod(row - self.stream(0, 0), self.stream(1, 0) - self.stream(0, 0))
        index = WARPS_PER_STREAM_ROW * group + lane // 2
        return rank, index, "tcgen05.st" if lane % 2 else "tcgen05.ld"
