"""Two threads that take turns: what they share shows, however busy the machine is.

Threads that run freely meet in a window of microseconds only by luck. Here one of them goes on for
some calls of Python functions while the other waits, so that each is in the midst of its work when
the other works. What happens inside one call of a compiled function is not reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from threading import Condition
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 1.0  # for the other thread, which may wait for what this one holds


@contextmanager
def _at_each_call(action: Callable[[], None]) -> Any:
    """Do something wherever this thread calls a Python function."""

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        action()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def count_calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions that one call makes."""
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    with _at_each_call(add):
        function()
    return count


class ThreadTurns:
    """Of the threads 0 and 1: each runs for `every` calls of Python functions, then the other."""

    def __init__(self, every: int) -> None:
        self.every, self.whose = every, 0
        self.apart = False  # one of them has ended, or waits for the other
        self.changed = Condition()

    def run(self, number: int, function: Callable[[], T]) -> T:
        """What the function returns, called by thread `number`."""
        count = 0

        def go_on() -> None:
            nonlocal count
            count += 1
            if count % self.every == 0:
                self._wait(number, give=True)

        try:
            self._wait(number)
            with _at_each_call(go_on):
                return function()
        finally:
            self.leave()

    def leave(self) -> None:
        """The other thread need not wait any more."""
        with self.changed:
            self.apart = True
            self.changed.notify_all()

    def _wait(self, number: int, give: bool = False) -> None:
        """Wait for this thread's turn, having given it to the other one."""
        with self.changed:
            if give:
                self.whose = 1 - number
                self.changed.notify_all()
            if not self.changed.wait_for(
                lambda: self.apart or self.whose == number, PATIENCE_SECONDS
            ):
                self.apart = True
