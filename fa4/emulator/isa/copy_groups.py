"""Groups of asynchronous copies, which a thread commits and waits for (PTX ISA 9.7.9.25.3).

cp.async and cp.async.bulk have groups of their own. Each is kept per warp, with the lanes that
issued and committed as masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fa4.emulator.checks.clocks import Message
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.machine.waits import Wait, Waitable, wait_for
from fa4.emulator.masks import lanes_of
from fa4.emulator.translate.context import Handler


class Copy(Waitable):
    """One copy that a thread can wait for: first it has read its source, then it is done.

    mask: lanes that issued it. read_messages, messages: what its two ends publish, until the warp
    has taken it over. when_done: called once, at the end.
    """

    def __init__(self, mask: int) -> None:
        super().__init__()
        self.mask = mask
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
class Group:
    """Copies that lanes committed together, each with the lanes it belongs to in this group.

    waited: the lanes that have waited until all is done.
    """

    mask: int
    copies: list[tuple[int, Copy]]
    waited: int = 0


class CopyGroups:
    """The copies of a warp that are open (not committed) and its groups, oldest first."""

    def __init__(self) -> None:
        self.open: list[tuple[int, Copy]] = []
        self.committed: deque[Group] = deque()

    def add(self, copy: Copy) -> None:
        """A copy was issued."""
        self.open.append((copy.mask, copy))

    def commit(self, mask: int) -> None:
        """The lanes in `mask` close a group of what they have issued, perhaps nothing."""
        taken = [(lanes & mask, copy) for lanes, copy in self.open if lanes & mask]
        self.open = [(lanes & ~mask, copy) for lanes, copy in self.open if lanes & ~mask]
        self.committed.append(Group(mask, taken))

    def older(self, mask: int, newest: int) -> Iterator[tuple[int, Group]]:
        """Groups of lanes in `mask` but the `newest` last ones of each lane: (lanes, group)."""
        counts = [0] * 32
        for group in reversed(self.committed):
            late = group.mask & mask
            if newest:
                here, late = late, 0
                for lane in lanes_of(here).tolist():
                    late |= (counts[lane] >= newest) << lane
                    counts[lane] += 1
            if late:
                yield late, group

    def drop_finished(self) -> None:
        """Forgets the oldest groups that nobody can wait for any more."""
        while self.committed and self.committed[0].mask & ~self.committed[0].waited == 0:
            self.committed.popleft()


def groups_of(warp: Warp, kind: str) -> CopyGroups:
    """The groups of a warp. kind: "cp.async" or "cp.async.bulk"."""
    groups: CopyGroups = warp.unit.setdefault(kind, CopyGroups())
    return groups


def commit_handler(kind: str) -> Handler:
    """The handler of a commit_group instruction."""

    def handler(fragment: Fragment, mask: int) -> None:
        groups_of(fragment.warp, kind).commit(mask)

    return handler


def wait_handler(kind: str, newest: int, only_read: bool, what: str) -> Handler:
    """The handler of a wait_group instruction: all groups but the `newest` last are complete.

    only_read: until the copies have read their sources.
    """

    def handler(fragment: Fragment, mask: int) -> Wait | None:
        warp = fragment.warp
        groups = groups_of(warp, kind)
        for lanes, group in groups.older(mask, newest):
            for by, copy in group.copies:
                if not by & lanes:
                    continue
                if not (copy.has_read if only_read else copy.is_done):
                    return wait_for(copy, what)
                take_over(warp, copy, only_read)
        if not only_read:
            for lanes, group in groups.older(mask, newest):
                group.waited |= lanes
        groups.drop_finished()
        return None

    return handler


def take_over(warp: Warp, copy: Copy, only_read: bool) -> None:
    """The warp learns what a copy published so far, or only that it has read its source."""
    for messages in (copy.read_messages, [] if only_read else copy.messages):
        for message in messages:
            warp.clock.acquire(message)
        messages.clear()
