"""Waiting: why a fragment of a warp stands still, and what wakes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Runnable(Protocol):
    """What may wait, and runs again later: a fragment of a warp."""

    @property
    def warp(self) -> object:
        """The warp that it is a part of."""

    def make_ready(self) -> None:
        """Its wait is over."""


@dataclass(slots=True, eq=False)
class Blocked:
    """Returned by a handler whose instruction cannot finish now.

    on: what it waits for, or None for a wait that only other warps' progress ends. retry: the
    instruction is executed again when the fragment wakes; otherwise it is over and the fragment
    continues behind it. times_out: the hardware lets this wait end without success
    (mbarrier.try_wait), so that a machine where nothing else can happen wakes it once.
    wake: called with the fragment when it continues (not for retries). describe: text for reports.
    """

    on: Waitable | None
    describe: Callable[[], str]
    retry: bool = True
    times_out: bool = False
    wake: Callable[[Any], None] | None = None


class Spin:
    """Returned by a handler that polled without success: the fragment goes on, others first."""


SPIN = Spin()


class Waitable:
    """Anything fragments wait on. Subclasses call `wake` when their state changed."""

    def __init__(self) -> None:
        self.waiters: list[Runnable] = []

    def wake(self) -> None:
        """Makes all waiting fragments ready; those that retry may wait again."""
        waiters, self.waiters = self.waiters, []
        for fragment in waiters:
            fragment.make_ready()


class Countdown(Waitable):
    """A number of operations under way; wakes when it falls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def started(self) -> None:
        """One more is under way."""
        self.count += 1

    def finished(self) -> None:
        """One less; whoever waits looks again."""
        self.count -= 1
        self.wake()


def wait_for(on: Waitable, what: str, **keywords: Any) -> Blocked:
    """A retrying wait with a fixed description."""
    return Blocked(on, lambda: what, **keywords)
