"""The asynchronous copies of a warp (PTX ISA 9.7.9.25.3): what is under way, open or committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fa4.emulator.checks.clocks import Message
from fa4.emulator.machine.waits import Waitable
from fa4.emulator.warp_lanes import LANES, lanes_of


class IssuedCopy(Waitable):
    """One copy that a thread can wait for: first it has read its source, then it is done.

    mask: lanes that issued it. line: its PTX line. read_messages, messages: what its two ends
    publish, until the warp has taken it over. when_done: called once, at the end.
    """

    def __init__(self, mask: int, line: int = 0) -> None:
        super().__init__()
        self.mask = mask
        self.line = line
        self.has_read = False
        self.is_done = False
        self.read_messages: list[Message] = []
        self.messages: list[Message] = []
        self.when_done: list[Callable[[], None]] = []

    def finish_read(self, message: Message) -> None:
        """The source has been read."""
        self.has_read = True
        self.read_messages.append(message)
        self.wake()

    def finish(self, message: Message) -> None:
        """The destination has been written."""
        self.has_read = self.is_done = True
        self.messages.append(message)
        self.wake()
        for call in self.when_done:
            call()


@dataclass
class CopyGroup:
    """Copies that lanes committed together, each with the lanes it belongs to in this group.

    waited: the lanes that have waited until all is done.
    """

    mask: int
    copies: list[tuple[int, IssuedCopy]]
    waited: int = 0


class CopyGroups:
    """The copies of a warp that are open (not committed) and its groups, oldest first."""

    def __init__(self) -> None:
        self.open: list[tuple[int, IssuedCopy]] = []
        self.committed: deque[CopyGroup] = deque()

    def add(self, copy: IssuedCopy) -> None:
        """A copy was issued."""
        self.open.append((copy.mask, copy))

    def commit(self, mask: int) -> None:
        """The lanes in `mask` close a group of what they have issued, perhaps nothing."""
        taken = [(lanes & mask, copy) for lanes, copy in self.open if lanes & mask]
        self.open = [(lanes & ~mask, copy) for lanes, copy in self.open if lanes & ~mask]
        self.committed.append(CopyGroup(mask, taken))

    def older(self, mask: int, newest: int) -> Iterator[tuple[int, CopyGroup]]:
        """Groups of lanes in `mask` but the `newest` last ones of each lane: (lanes, group)."""
        counts = [0] * LANES
        for group in reversed(self.committed):
            late = group.mask & mask
            if newest:
                here, late = late, 0
                for lane in lanes_of(here).tolist():
                    late |= (counts[lane] >= newest) << lane
                    counts[lane] += 1
            if late:
                yield late, group

    def unawaited(self) -> Iterator[IssuedCopy]:
        """Copies of which no lane has waited until their sources are read."""
        for copies in (self.open, *(group.copies for group in self.committed)):
            yield from (copy for _, copy in copies if copy.read_messages or not copy.has_read)

    def drop_finished(self) -> None:
        """Forgets the oldest groups that nobody can wait for any more."""
        while self.committed and self.committed[0].mask & ~self.committed[0].waited == 0:
            self.committed.popleft()


@dataclass(slots=True)
class ThreadCopies:
    """The cp.async of a warp: their groups, which are under way, what the finished published."""

    groups: CopyGroups = field(default_factory=CopyGroups)
    under_way: list[IssuedCopy] = field(default_factory=list)
    finished: Message | None = None

    def begin(self, copy: IssuedCopy) -> None:
        """A copy was issued."""
        self.groups.add(copy)
        self.under_way.append(copy)

    def end(self, copy: IssuedCopy, message: Message) -> None:
        """A copy is done and publishes `message`."""
        self.under_way.remove(copy)
        if self.finished is None:
            self.finished = message.copy()
        else:
            self.finished.join(message)
        copy.finish(message)
