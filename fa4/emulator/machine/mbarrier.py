"""The mbarrier object (PTX ISA 9.7.13.15): phase, pending arrivals, bytes still to come."""

from __future__ import annotations

from collections.abc import Callable

from fa4.emulator.checks.clocks import Message
from fa4.emulator.checks.phases import PhaseOrder
from fa4.emulator.machine.waits import Waitable

MAX_COUNT = (1 << 20) - 1  # PTX ISA 9.7.13.15.1: expected and pending counts, tx-count range


class MBarrierFault(Exception):
    """A use of an mbarrier that the manual forbids; the message says which."""


class MBarrier(Waitable):
    """One mbarrier. phase counts completed phases; its parity is what try_wait.parity tests.

    message: what the arrivals of the current phase published; last_message: of the phase that
    completed last, which waiters take over. overtakes: called with the PTX line and the clock row
    of a wait that the end of a phase may overtake.
    """

    def __init__(
        self,
        address: int,
        count: int,
        line: int,
        overtakes: Callable[[MBarrier, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= count <= MAX_COUNT:
            raise MBarrierFault(f"initialised with count {count}, allowed are 1..{MAX_COUNT}")
        self.address = address
        self.count = count
        self.line = line
        self.pending = count
        self.tx_bytes = 0
        self.phase = 0
        self.message: Message | None = None
        self.last_message: Message | None = None
        self.made_by = (0, 0, 0)  # cluster number, actor id and epoch of the initialisation
        self.visible_to: set[int] = set()  # clock rows of the warps that know of it
        self.fenced_in: int | None = None  # epoch of the fence.mbarrier_init of its maker
        self.visible_to_copies = False  # a copy has seen its initialisation
        self.order = PhaseOrder()
        self._overtakes = overtakes
        self.arrivers: set[str] = set()  # names of the warps that arrived, for deadlock reports

    def describe(self) -> str:
        """Its state, for reports."""
        text = f"phase {self.phase}, {self.pending} of {self.count} arrivals missing"
        return text + (f", {self.tx_bytes} bytes missing" if self.tx_bytes else "")

    def publish(self, message: Message | None) -> None:
        """Adds what an arrival, or the end of a copy, publishes to the current phase."""
        if message is None:
            return
        if self.message is None:
            self.message = message.copy()
        else:
            self.message.join(message)

    def arrive(self, count: int, message: Message | None) -> int:
        """count arrivals. Returns the state token: the phase before."""
        state = self.phase
        if count > self.pending:
            raise MBarrierFault(
                f"{count} arrival(s) where {self.pending} are pending: more arrive in one phase "
                f"than the {self.count} it was initialised with"
            )
        self.publish(message)
        self.pending -= count
        self._advance()
        return state

    def expect(self, tx_bytes: int) -> None:
        """expect_tx: the phase waits for this many bytes more."""
        self.tx_bytes += tx_bytes
        if self.tx_bytes > MAX_COUNT:
            raise MBarrierFault(f"expects {self.tx_bytes} bytes, at most {MAX_COUNT} are allowed")

    def complete(self, tx_bytes: int, message: Message | None = None) -> None:
        """complete_tx: bytes have come."""
        self.publish(message)
        self.tx_bytes -= tx_bytes
        if self.tx_bytes < -MAX_COUNT:
            raise MBarrierFault(f"{-self.tx_bytes} bytes more than expected, {MAX_COUNT} allowed")
        self._advance()

    def drop(self, count: int) -> None:
        """arrive_drop: so many arrivals fewer in all later phases."""
        self.count -= count

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over (PTX ISA: test_wait.parity)."""
        return (self.phase & 1) != parity

    def _advance(self) -> None:
        if self.pending == 0 and self.tx_bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.last_message, self.message = self.message, None
            for line, row in self.order.ended(self.last_message):
                if self._overtakes is not None:
                    self._overtakes(self, line, row)
            self.wake()
