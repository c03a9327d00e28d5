"""Two threads that take turns: what they share shows, however busy the machine is.

Threads that run freely meet in a window of microseconds only by luck. Here one of them goes on for
some calls of Python functions while the other waits, so that each is in the midst of its work when
the other works. What happens inside one call of a compiled function is not reached, nor, before
Python 3.12, a switch inside a `cached_property`: its lock would keep the other thread waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import cached_property
from threading import Condition
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 1.0  # for the other thread, which may wait for what this one holds
_LOCKED = cached_property.__get__.__code__  # up to Python 3.11, the whole class waits for it


@contextmanager
def _at_each_call(action: Callable[[FrameType], None]) -> Any:
    """Do something wherever this thread calls a Python function."""

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        action(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _holds_a_lock(frame: FrameType | None) -> bool:
    """Whether a `cached_property` is being computed: what another thread may wait for."""
    while frame is not None and frame.f_code is not _LOCKED:
        frame = frame.f_back
    return frame is not None


def count_calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions that one call makes."""
    count = 0

    def add(frame: FrameType) -> None:
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

        def go_on(frame: FrameType) -> None:
            nonlocal count
            count += 1
            if count >= self.every and not _holds_a_lock(frame):
                count = 0
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
