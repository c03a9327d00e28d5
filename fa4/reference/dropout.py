"""Counter-based dropout: Philox 4x32-10 (Salmon et al., SC 2011), vectorised in NumPy.

The random word of (batch, head, query, key) is word `key mod 4` of
Philox(counter = (key // 4, query, head, batch), key = seed), so any tile can be replayed in any
order and only its own words are computed.
"""

from __future__ import annotations

import numpy as np

from fa4.reference.spec import Dropout, Region

# Multipliers and Weyl increments of Philox 4x32: Salmon et al. 2011, section 4.3 / Random123.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_4x32(counter: tuple[np.ndarray, ...], seed: int) -> list[np.ndarray]:
    """Four random 32-bit words (as uint64 arrays) for each broadcast 4-word counter."""
    words = [np.asarray(word, np.uint64) for word in counter]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _SHIFT) ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> _SHIFT) ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    return words


def keep_scale(dropout: Dropout, region: Region) -> np.ndarray:
    """(Hq, rows, cols) float64 factor of each probability: 0 or 1/(1 - p); (1, 1, 1) if p is 0."""
    if dropout.probability == 0.0:
        return np.ones((1, 1, 1))
    quads, position = np.unique(region.cols // 4, return_inverse=True)
    counter = (
        quads[None, None, :],
        region.rows[None, :, None],
        region.heads[:, None, None],
        np.array(region.batch)[None, None, None],
    )
    shape = (len(region.heads), len(region.rows), len(quads))
    words = philox_4x32(counter, dropout.seed)
    table = np.stack([np.broadcast_to(word, shape) for word in words], axis=-1)
    drawn = table[:, :, position, region.cols % 4]
    keep = drawn >= np.uint64(round(dropout.probability * 2.0**32))
    return keep / (1.0 - dropout.probability)
