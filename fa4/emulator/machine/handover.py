"""What a warp hands on through relaxed operations, and what its fences make of what they tell.

A fence of the generic proxy (PTX ISA 8.8, fence patterns) publishes all accesses before it, through
relaxed operations behind it, and takes over all that earlier relaxed operations have seen.
tcgen05.fence does the same for tensor memory alone (9.7.16.6.3): ::before_thread_sync publishes
the operations that the warp knows to be complete, and the order of those that it has given to the
tensor pipe; ::after_thread_sync takes them over.

Approximation towards fewer reports: the fences of one lane count for its warp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.checks.clocks import Message, WarpClock


class WarpFences:
    """The fences of a warp.

    of_tensor: which ids tcgen05.fence speaks of (`ActorRows.of_tensor`). handed_id: the warp's own
    (`ActorRows.handed_id`). published: what relaxed operations publish, by the latest fence of the
    generic proxy and each tcgen05.fence::before_thread_sync since. pending: what relaxed operations
    have seen since the latest fence of the generic proxy. handed: by id, which operations of tensor
    pipes were handed on to the warp before its latest ::after_thread_sync; None before the first.
    """

    __slots__ = ("_clock", "_of_tensor", "handed", "handed_id", "pending", "published")

    def __init__(self, clock: WarpClock, of_tensor: NDArray[np.bool_], handed_id: int) -> None:
        self._clock = clock
        self._of_tensor = of_tensor
        self.handed_id = handed_id
        self.published: Message | None = None
        self.pending: Message | None = None
        self.handed: NDArray[np.int32] | None = None

    def fence(self, mask: int) -> None:
        """fence, membar and their kin, by the lanes in `mask`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self._clock.acquire(pending)
        self.published = self._clock.release(mask)

    def before_thread_sync(self, issued: int) -> None:
        """The tcgen05.fence. issued: the pipe's epoch of the warp's latest operation, 0: none."""
        knowledge = self._clock.knowledge
        knowledge.add(self.handed_id, issued, fenced=False)
        told = knowledge.part(self._of_tensor)
        if self.published is not None:
            told.join(self.published)
        self.published = told

    def after_thread_sync(self) -> None:
        """The tcgen05.fence."""
        if self.pending is not None:
            self._clock.acquire(self.pending.part(self._of_tensor))
        self.handed = self._clock.knowledge.seen.copy()

    def arrive(self, mask: int) -> Message:
        """What a relaxed arrival of the lanes in `mask` publishes."""
        return self._clock.release_order(mask, self.published)

    def wait(self, message: Message) -> None:
        """A relaxed wait has seen the end of a phase, and what its arrivals published."""
        self._clock.acquire_order(message)
        self.see(message)

    def see(self, message: Message) -> None:
        """A relaxed operation has seen what others published."""
        if self.pending is None:
            self.pending = self._clock.knowledge.part(np.zeros_like(self._of_tensor))
        self.pending.join(message)
