"""Into how many parts the query heads that share keys are divided in Hopper's backward kernels.

A CTA has all of them, or one part each of several CTAs: these hand their sums on in float32, which
are then added up. Costs are counted in query tiles of 64, as a CTA takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.config import WARPGROUP_ROWS, Window

# A CTA's start and end take 10% of one with 16 tiles: measured, at head dim 128.
START_TILES = 1.6
# A part's dK and dV in float32 are written and read again, beside other work; the kernel that adds
# them up starts and ends; and of CTAs of unequal length the last ones end apart, by a share of the
# longest one. Chosen together, for the least loss in 47 calls measured on an H200 with every
# divisor of their groups; 30 were drawn later to judge it (tests/sm90/key_parts_times.py).
STORE_TILES = 3.0
SUM_TILES = 2.0
APART = 0.4
# A step of the wide heads' dQ kernel, with 128 queries, beside one of dK and dV: cycles of
# `fa4.plan.warpgroup_wide`.
BESIDE_STEP = 3072 / 2304
UNEVEN = 1.05  # from which on the longest CTA is longer than the average one


@dataclass(frozen=True, kw_only=True)
class KeyCtas:
    """What CTAs that have the keys do. group: query heads of a KV head.

    ctas: KV tiles of all KV heads. tiles: query tiles of one head that see a KV tile, on average;
    longest: of the one that most of them see. beside, longest_beside: all work of another kernel's
    CTAs that start as soon as no more of these do, and that of its longest one, in such tiles.
    """

    ctas: int
    group: int
    tiles: float
    longest: float
    beside: float = 0.0
    longest_beside: float = 0.0


def key_parts(work: KeyCtas, sm_count: int) -> int:
    """The number of parts: of the divisors of the group, that which costs least."""
    divisors = [parts for parts in range(1, work.group + 1) if work.group % parts == 0]
    return min(divisors, key=lambda parts: cost_of_parts(work, sm_count, parts))


def cost_of_parts(work: KeyCtas, sm_count: int, parts: int) -> float:
    """In query tiles: rounds of CTAs that are alike, else their share of an SM and the end."""
    once = START_TILES + STORE_TILES * (parts > 1)
    one, longest = (once + tiles * work.group / parts for tiles in (work.tiles, work.longest))
    ctas = work.ctas * parts
    shared = (ctas * one + work.beside) / sm_count
    if work.beside:
        found = max(longest, work.longest_beside, shared)
    elif work.longest > UNEVEN * work.tiles:
        found = max(longest, shared) + APART * longest
    else:
        found = -(-ctas // sm_count) * one
    return found + SUM_TILES * (parts > 1)


def seen_tiles(rows: int, keys: int, window: Window, tile_n: int) -> tuple[float, float]:
    """Query tiles that see a KV tile of tile_n keys: on average, and the most.

    rows, keys: of a sequence; a mask is aligned at its end.
    """
    left, right = window
    first = np.arange(0, max(keys, 1), tile_n) - (keys - rows)
    stop = np.full(len(first), rows) if left is None else first + tile_n + left
    start = np.zeros(len(first)) if right is None else first - right
    seen = np.clip(np.clip(stop, 0, rows) - np.clip(start, 0, rows), 0, None) / WARPGROUP_ROWS
    return float(seen.mean()), float(seen.max())
