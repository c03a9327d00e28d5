"""How many rows and keys work tiles have, and how much the busiest SM has to do of them."""

from __future__ import annotations

import numpy as np

from fa4.config import Window

MOST_ROUNDS = 32  # beyond so many work tiles of an SM, what it has more than others hardly counts


def keys_of_blocks(
    rows: int, block: int, tile_n: int, queries: int, keys: int, window: Window
) -> np.ndarray:
    """Keys of whole KV tiles that each block of `block` rows sees; at least one KV tile.

    rows: of a sequence, several for each of its queries where heads share a tile. window: as of
    `Problem`; (None, None) without a mask that the position alone decides.
    """
    left, right = window
    first = np.arange(0, max(rows, 1), block)
    last = np.minimum(first + block, max(rows, 1)) - 1
    share = max(rows // max(queries, 1), 1)
    start, stop = first // share + keys - queries, last // share + keys - queries
    ends = np.full(len(first), keys) if right is None else np.clip(stop + right + 1, 0, keys)
    begins = 0 * first if left is None else np.clip(start - left, 0, keys)
    tiles = -(-ends // tile_n) - begins // tile_n
    found: np.ndarray = np.maximum(tiles, 1) * tile_n
    return found


def keys_seen(queries: int, keys: int, window: Window) -> int:
    """Keys of a sequence that at least one of its queries sees."""
    left, right = window
    start = 0 if left is None else max(keys - queries - left, 0)
    stop = keys if right is None else min(keys + right, keys)
    return max(stop - start, 0)


def busiest(lengths: np.ndarray, copies: int, sms: int) -> float:
    """What the SM that has most to do has, of `copies` work tiles of each length.

    The longest work tiles begin first, each of the others on the SM that is free first; of many
    work tiles per SM, about the average.
    """
    count = len(lengths) * copies
    if not count:
        return 0.0
    rounds = -(-count // sms)
    ordered = np.sort(lengths)[::-1]
    if rounds > MOST_ROUNDS:
        return float(lengths.sum()) * copies / sms + float(ordered[-1]) / 2
    each = np.zeros(rounds * sms)
    each[:count] = np.repeat(ordered, copies)
    loads = np.zeros(sms)
    for own in each.reshape(rounds, sms):
        loads = np.sort(loads) + own
    return float(loads.max())
