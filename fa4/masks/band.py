"""A band around the diagonal: causal masks and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4.masks.interval import IntervalMask


@dataclass(frozen=True)
class Band(IntervalMask):
    """Query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; None: no bound.

    Kernels are given the bounds at run time, as arguments of their own.
    """

    left: Any = None
    right: Any = None

    def start(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The key `left` before the diagonal."""
        return None if self.left is None else row + (seqlen_k - seqlen_q) - self.left

    def stop(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """Behind the key `right` after the diagonal."""
        return None if self.right is None else row + (seqlen_k - seqlen_q) + self.right + 1

    def first_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The query whose diagonal is `right` before the key."""
        return None if self.right is None else key - (seqlen_k - seqlen_q) - self.right

    def stop_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """Behind the query whose diagonal is `left` after the key."""
        return None if self.left is None else key - (seqlen_k - seqlen_q) + self.left + 1
