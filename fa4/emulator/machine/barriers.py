"""Barriers of a CTA's threads (bar, barrier) and of a cluster's (barrier.cluster)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fa4.emulator.checks.clocks import Message
from fa4.emulator.machine.waits import Waitable
from fa4.emulator.warp_lanes import Array


@dataclass(eq=False)
class Episode:
    """One use of a named barrier, from the first arrival to the last.

    message: what the arrivals published. votes: of barrier.red, of each warp's lanes.
    """

    message: Message
    votes: list[Array] = field(default_factory=list)


class NamedBarrier(Waitable):
    """One of the 16 barriers of a CTA: threads that arrived, threads expected (0: all)."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = 0
        self.arrived = 0
        self.episode: Episode | None = None

    def publish(self, message: Message) -> Episode:
        """Adds what an arrival publishes, and may change the message later. Returns the episode."""
        if self.episode is None:
            self.episode = Episode(message)
        else:
            self.episode.message.join(message)
        return self.episode

    def complete(self) -> None:
        """Ends an episode: all who wait go on, the barrier can be used again."""
        self.episode = None
        self.arrived = 0
        self.wake()

    def leave(self, live_threads: int) -> None:
        """Threads have exited: a barrier for all waits for them no longer."""
        if self.arrived and not self.expected and self.arrived >= live_threads:
            self.complete()


class ClusterBarrier(Waitable):
    """barrier.cluster: threads that arrived in this phase, and what they published.

    last_message: what those of the phase before did, which waiters take over.
    """

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self.arrived = 0
        self.phase = 0
        self.message: Message | None = None
        self.last_message: Message | None = None

    def publish(self, message: Message) -> None:
        """Adds what an arrival publishes."""
        if self.message is None:
            self.message = message.copy()
        else:
            self.message.join(message)

    def arrive(self, threads: int) -> None:
        """Threads arrive."""
        self.arrived += threads
        if self.arrived >= self.threads:
            self.arrived = 0
            self.phase += 1
            self.last_message, self.message = self.message, None
            self.wake()

    def leave(self, threads: int, arrived_in: int | None) -> bool:
        """Threads exit, and are no longer waited for (PTX ISA: exited threads count as arrived).

        arrived_in: the phase in which they arrived last. Returns whether that ends a phase.
        """
        self.threads -= threads
        if arrived_in == self.phase:
            self.arrived -= threads
        if not self.threads or self.arrived < self.threads:
            return False
        self.arrive(0)
        return True


@dataclass(slots=True)
class ClusterVisits:
    """What a warp did at the barrier of its cluster.

    arrived_in: the phase in which it arrived last. waited_in, waited: the phase and the lanes that
    have waited for its end.
    """

    arrived_in: int | None = None
    waited_in: int = -1
    waited: int = 0
