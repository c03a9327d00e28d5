"""Asynchronous operations: what a unit was told to do, and does later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class AsyncOperation:
    """Something a unit does later.

    complete: does it, and signals. queue: operations of one queue complete in order; None:
    whenever. what, line: for reports. cluster, cta: number of the cluster, and index in the grid,
    of the CTA that it belongs to. order: age. harmless: may be under way when its CTA exits, since
    it needs nothing of the CTA then.
    """

    what: str
    line: int
    cluster: int
    cta: int
    complete: Callable[[], None]
    queue: deque[AsyncOperation] | None = None
    order: int = 0
    harmless: bool = False
