"""Which probabilities dropout keeps: Philox 4x32-10 (Salmon et al., SC 2011), all four words.

The random word of (batch, head, query, key) is word `key mod 4` of
Philox(counter = (key // 4, query, head, batch), key = seed); it is kept if at least p 2^32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa4.oracle.visible import SequenceLengths

_MASK = 0xFFFFFFFF


def kept(
    options: Mapping[str, Any], batch: int, heads: int, lengths: SequenceLengths
) -> np.ndarray:
    """Factor of each probability, 0 or 1/(1 - p), (Hq, Sq, Sk); (1, 1, 1) without dropout."""
    probability = float(options.get("dropout_p", 0.0))
    if not probability:
        return np.ones((1, 1, 1))
    fours = -(-lengths.seqlen_k // 4)
    grid = np.indices((heads, lengths.seqlen_q, fours)).astype(np.uint64)
    counter = [grid[2], grid[1], grid[0], np.full_like(grid[0], batch)]
    words = np.stack(philox(counter, int(options.get("dropout_seed", 0))), axis=-1)
    by_key = words.reshape(heads, lengths.seqlen_q, 4 * fours)[..., : lengths.seqlen_k]
    return (by_key >= round(probability * 2**32)) / (1.0 - probability)


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Ten rounds; four uint64 arrays that hold 32-bit words. Constants: Salmon et al., table 2."""
    a, b, c, d = counter
    low, high = seed & _MASK, seed >> 32
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (right >> 32) ^ b ^ low, right & _MASK
        c, d = (left >> 32) ^ d ^ high, left & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return [a, b, c, d]
