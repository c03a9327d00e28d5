"""What asynchronous operations do to an mbarrier when they complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fa4.emulator.checks.clocks import Message
from fa4.emulator.isa.mbarriers import describe_barrier
from fa4.emulator.machine.machine_state import Stop
from fa4.emulator.machine.mbarrier import MBarrier, MBarrierFault
from fa4.emulator.machine.state import Cta


@dataclass(frozen=True, eq=False)
class MBarrierSignal:
    """The mbarrier that an operation will signal, looked up when it was issued.

    offset: shared address in `cta`, without a rank. line: PTX line of the operation.
    """

    cta: Cta
    offset: int
    barrier: MBarrier
    line: int

    def complete(self, size_bytes: int, message: Message) -> None:
        """complete_tx: bytes have come."""
        with self._reported():
            self.barrier.complete(size_bytes, message)

    def arrive(self, count: int, message: Message | None, who: str) -> None:
        """Arrivals; `who` is the warp they belong to, for deadlock reports."""
        with self._reported():
            self.barrier.arrivers.add(who)
            self.barrier.arrive(count, message)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turns a fault of the barrier into a finding that ends the run."""
        try:
            if self.cta.mbarriers.get(self.offset) is not self.barrier:
                raise MBarrierFault("invalidated or initialised again before the operation's end")
            yield
        except MBarrierFault as fault:
            text = describe_barrier(self.cta, self.barrier)
            self.cta.report("mbarrier", f"{text}: {fault}", self.line)
            raise Stop from None
