"""What all masks here have in common: each query sees one run of keys, which moves with the query.

So what a block of queries sees is told by its first and its last one. The kernels skip every KV
tile outside, and compare columns with a row's bounds only in tiles that a bound goes through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class IntervalMask(ABC):
    """Query i sees the keys from `start` to `stop`; neither goes back from a query to the next.

    Subclasses are frozen dataclasses of integers; what they hold is part of a kernel's code. Their
    bounds are plain arithmetic, as they are asked for Python's integers, arrays and values of a
    kernel that is being traced: no branches, no `min`. Keys below 0 and beyond the sequence's end
    may be named.

    It is a mask_mod as well, for whatever knows no more than that.
    """

    @abstractmethod
    def start(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The first key that query `row` sees; None for a mask that hides no first keys."""

    @abstractmethod
    def stop(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """One past the last key that query `row` sees; None for a mask that hides no last keys."""

    @abstractmethod
    def first_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The first query that sees `key`; None for a mask that hides no last keys."""

    @abstractmethod
    def stop_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """One past the last query that sees `key`; None for a mask that hides no first keys."""

    @property
    def has_start(self) -> bool:
        """Does it hide first keys?"""
        return self.start(0, 1, 1) is not None

    def __call__(self, batch: Any, head: Any, row: Any, key: Any, info: Any, aux: Any) -> Any:
        """mask_mod: does query `row` see `key`?"""
        lengths = info.seqlen_q, info.seqlen_k
        start, stop = self.start(row, *lengths), self.stop(row, *lengths)
        seen = key >= 0 * row
        if start is not None:
            seen = seen & (key >= start)
        return seen if stop is None else seen & (key < stop)
