"""Attention in chunks: causal, and only inside of a chunk of so many keys (Llama 4's local layers).

Query i, whose diagonal is key d = i + Sk - Sq, sees the keys of d's chunk up to d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4.config import require_int
from fa4.masks.interval import IntervalMask


@dataclass(frozen=True)
class Chunked(IntervalMask):
    """Causal attention inside of chunks of `size` keys."""

    size: int

    def __post_init__(self) -> None:
        """Check that chunks have keys."""
        require_int("size", self.size, 1, 2**31 - 1)

    def start(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The chunk's first key."""
        return (row + (seqlen_k - seqlen_q)) // self.size * self.size

    def stop(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """Behind the diagonal."""
        return row + (seqlen_k - seqlen_q) + 1

    def first_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The query on whose diagonal the key is."""
        return key - (seqlen_k - seqlen_q)

    def stop_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """The first query of the next chunk."""
        return (key // self.size + 1) * self.size - (seqlen_k - seqlen_q)
