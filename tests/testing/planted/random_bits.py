"""The random words of dropout, written from the definition that `fa4` documents.

Word `key mod 4` of Philox 4x32-10 (Salmon et al., SC 2011) at the counter (key // 4, query, head,
batch) under the seed as key; a probability is kept where its word is at least p 2^32.
"""

from __future__ import annotations

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Salmon et al. 2011, the constants of Philox 4x32
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def keep_factors(
    probability: float, seed: int, batch: int, indices: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> np.ndarray:
    """0 or 1 / (1 - probability), float64 (heads, rows, keys), for three vectors of indices."""
    heads, rows, keys = indices
    quads, inverse = np.unique(keys >> 2, return_inverse=True)
    shape = (heads.size, rows.size, quads.size)
    counter = np.empty((4, *shape), np.uint64)
    counter[0], counter[1] = quads, rows[:, None]
    counter[2], counter[3] = heads[:, None, None], batch
    mask, shift = np.uint64(2**32 - 1), np.uint64(32)
    round_keys = [seed & (2**32 - 1), seed >> 32]
    for _ in range(ROUNDS):
        left = counter[0] * np.uint64(MULTIPLIERS[0])
        right = counter[2] * np.uint64(MULTIPLIERS[1])
        first = (right >> shift) ^ counter[1] ^ np.uint64(round_keys[0])
        third = (left >> shift) ^ counter[3] ^ np.uint64(round_keys[1])
        counter[0], counter[1] = first, right & mask
        counter[2], counter[3] = third, left & mask
        round_keys = [(key + step) % 2**32 for key, step in zip(round_keys, WEYL, strict=True)]
    lanes = np.broadcast_to(keys & 3, (heads.size, rows.size, keys.size))[None]
    words = np.take_along_axis(counter[..., inverse], lanes, axis=0)[0]
    return (words >= np.uint64(round(probability * 2**32))) / (1.0 - probability)
