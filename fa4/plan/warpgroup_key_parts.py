"""Into how many parts the query heads that share keys are divided in Hopper's backward kernels.

A CTA has all of them, or one part each of several CTAs: these hand their sums on in float32, which
are then added up. Costs are counted in query tiles, as a CTA takes them.
"""

from __future__ import annotations

# A CTA's start and end take 10% of one with 16 tiles: measured, of 64 queries at head dim 128.
START_TILES = 1.6
# Assumed: storing sums in float32 instead of 16 bits, twice the bytes; and the two small kernels
# that add them up, 10 us where a tile takes 2.
STORE_TILES, SUM_TILES = 1.0, 5.0
LEAST_GAIN = 1.05  # below which more parts, and their memory, are not worth it


def key_parts(ctas: int, group: int, tiles: float, sm_count: int) -> int:
    """The number of parts: of the divisors of the group, the least that costs next to the least.

    ctas: KV tiles of all KV heads. group: query heads of a KV head. tiles: query tiles of one of
    these heads that see a KV tile, on average.
    """
    costs = {parts: _cost(ctas, group, tiles, sm_count, parts)
             for parts in range(1, group + 1) if group % parts == 0}  # fmt: skip
    most = LEAST_GAIN * min(costs.values())
    return min(parts for parts, cost in costs.items() if cost <= most)


def _cost(ctas: int, group: int, tiles: float, sm_count: int, parts: int) -> float:
    rounds = -(-ctas * parts // sm_count)
    one = START_TILES + tiles * group / parts
    return rounds * one if parts == 1 else rounds * (one + STORE_TILES) + SUM_TILES
