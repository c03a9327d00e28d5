"""Groups of asynchronous copies, which a thread commits and waits for (PTX ISA 9.7.9.25.3).

cp.async and cp.async.bulk have groups of their own. Each is kept per warp, with the lanes that
issued and committed as masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fa4.emulator.machine.copies import CopyGroups, IssuedCopy
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.machine.waits import Blocked, wait_for
from fa4.emulator.translate.context import Handler

# The groups of a warp that an instruction means.
GroupsOf: TypeAlias = Callable[[Warp], CopyGroups]


def commit_handler(groups_of: GroupsOf) -> Handler:
    """The handler of a commit_group instruction."""

    def handler(fragment: Fragment, mask: int) -> None:
        groups_of(fragment.warp).commit(mask)

    return handler


def wait_handler(groups_of: GroupsOf, newest: int, only_read: bool, what: str) -> Handler:
    """The handler of a wait_group instruction: all groups but the `newest` last are complete.

    only_read: until the copies have read their sources.
    """

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp = fragment.warp
        groups = groups_of(warp)
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


def take_over(warp: Warp, copy: IssuedCopy, only_read: bool) -> None:
    """The warp learns what a copy published so far, or only that it has read its source."""
    for messages in (copy.read_messages, [] if only_read else copy.messages):
        for message in messages:
            warp.clock.acquire(message)
        messages.clear()
