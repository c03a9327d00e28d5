"""Into how many parts the keys are divided in Hopper's dQ kernel of wide heads.

A CTA has all keys of its queries, or one part each of several CTAs: these hand their sums on in
float32, which are then added up. Costs are counted in steps of 64 keys, as a CTA takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.plan.warpgroup_key_parts import START_TILES, UNEVEN

# A part's dQ in float32 is written and read again: 8 bytes of each column of 128 queries at 4 TB/s
# over 132 SMs take 5 steps, of any head dim. Chosen, of four, for the least loss in 24 calls that
# were measured on an H200 (tests/sm90/test_query_parts.py).
STORE_STEPS = 7.0
# The kernel that adds them up takes 5 to 7 us longer in the shortest of those calls.
SUM_STEPS = 5.0
# Assumed: no more parts were timed, and a part of fewer steps is mostly its start and its end.
MOST_PARTS = 32
FEWEST_STEPS = 4.0  # of a part


@dataclass(frozen=True, kw_only=True)
class QueryCtas:
    """What CTAs that have the queries do.

    ctas: blocks of 128 queries of all query heads. steps: KV tiles of 64 that one of them sees, on
    average; longest: of the one that sees most of them.
    """

    ctas: int
    steps: float
    longest: float


def query_parts(work: QueryCtas, sm_count: int) -> int:
    """The number of parts that costs least."""
    most = int(min(work.longest / FEWEST_STEPS, MOST_PARTS))
    return min(
        range(1, max(most, 1) + 1), key=lambda parts: cost_of_query_parts(work, sm_count, parts)
    )


def cost_of_query_parts(work: QueryCtas, sm_count: int, parts: int) -> float:
    """In steps: rounds of CTAs that are alike, else the longest one or its share of all."""
    once = START_TILES + STORE_STEPS * (parts > 1)
    one, longest = (once + steps / parts for steps in (work.steps, work.longest))
    ctas = work.ctas * parts
    if work.longest > UNEVEN * work.steps:
        found = max(longest, ctas * one / sm_count)
    else:
        found = -(-ctas // sm_count) * one
    return found + SUM_STEPS * (parts > 1)
