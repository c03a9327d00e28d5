"""Whether more than luck makes the waits and arrivals of an mbarrier meet the phase they mean.

A parity tells a phase from its neighbours only, and an arrival counts for whatever phase is under
way. So, for phases k of a barrier:

- a wait by parity that finds phase k over needs to know that phase k - 1 was over: found one phase
  earlier, the barrier would let it pass;
- phase k + 1 must not end before it: found one phase later, the barrier would hold it;
- an arrival in phase k + 1 needs to know that phase k was over, or it might count for that.

"Know" is what `clocks.py` calls executed, so that a fault shows under every schedule: relaxed
operations and tcgen05.commit, which make no access visible, tell of it too. Lanes of a warp count
as one.
"""

from __future__ import annotations

from fa4.emulator.checks.clocks import Message, WarpClock
from fa4.emulator.warp_lanes import LANES


class PhaseOrder:
    """What the ends of an mbarrier's last two phases published, and who waited for the last."""

    __slots__ = ("_before", "_last", "_waits")

    def __init__(self) -> None:
        self._last: Message | None = None
        self._before: Message | None = None
        self._waits: dict[int, tuple[int, int, int]] = {}  # row -> cluster, epoch, PTX line

    def ended(self, message: Message | None) -> list[tuple[int, int]]:
        """A phase ended, publishing `message`; (PTX line, clock row) of the waits that it may
        overtake."""
        overtaken = []
        if message is not None and self._waits:
            executed = message.executed
            for row, (cluster, epoch, line) in self._waits.items():
                known = executed[row * LANES : (row + 1) * LANES].max()
                if cluster == message.cluster and known < epoch:
                    overtaken.append((line, row))
        self._waits.clear()
        self._before, self._last = self._last, message
        return overtaken

    def waited(self, clock: WarpClock, line: int) -> bool:
        """A wait by parity finds the last phase over; whether it knows of the phase before that.

        To be called before the wait takes over what the phase published.
        """
        self._waits[clock.row] = clock.knowledge.cluster, clock.epoch, line
        return self._known(self._before, clock)

    def arrives(self, clock: WarpClock) -> bool:
        """An arrival; whether it knows that the last phase is over."""
        return self._known(self._last, clock)

    def _known(self, message: Message | None, clock: WarpClock) -> bool:
        known = clock.knowledge
        if message is None or message.cluster != known.cluster:
            return True
        behind = known.executed < message.executed
        behind[clock.row * LANES : (clock.row + 1) * LANES] = False
        return not behind.any()
