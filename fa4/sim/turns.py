"""A fixed order of sums: CTAs wait for their turn at each dQ tile, and hold an SM while they do.

Turns go through the blocks of keys of a head, first ones first or last ones first. A CTA that is
resident may wait for one that is not: if all resident ones do, the launch order never ends
(`fa4.plan.resident`, before anything is simulated).
"""

from __future__ import annotations

import heapq

import numpy as np

from fa4.designs.tiles import WorkTiles
from fa4.plan.resident import Stuck, find_stuck
from fa4.sim.chip import ChipRun, Execution, TileRunner, summarize
from fa4.sim.limits import check_turns


class TurnDeadlock(ValueError):
    """All resident CTAs wait for the turn of CTAs that start only when one of them ends."""


def run_in_turn(
    runner: TileRunner,
    tiles: WorkTiles,
    machines: int,
    start_cycles: float,
    hop_cycles: float,
    *,
    last_first: bool = False,
) -> ChipRun:
    """Deterministic backward on `machines` CTAs (or pairs) at a time, launched as tiles lie.

    A CTA may add to a query tile only `hop_cycles` after the one whose turn is before. Its own adds
    are evenly spaced over its run, and a wait delays everything after it. Raises TurnDeadlock.
    """
    check_turns(int(tiles.trips[:, 0].sum()))
    runner.expect(tiles.trips[:, None])
    before = turn_before(tiles, last_first=last_first)
    stuck = find_stuck(before.tolist(), machines)
    if stuck is not None:
        raise TurnDeadlock(_describe(tiles, before, stuck, last_first))
    after = {int(first): i for i, first in enumerate(before) if first >= 0}
    free, starts = [0.0] * machines, np.zeros(len(before))
    runs: list[Execution] = []
    adds: dict[int, np.ndarray] = {-1: np.zeros(0)}
    while len(runs) < len(before):
        tile: int | None = len(runs)
        starts[tile] = heapq.heappop(free) + start_cycles
        runs.append(runner.run(tiles.trips[tile][None]))
        # It, and those that are resident and have waited for it, one after the other.
        while tile is not None and tile < len(runs) and int(before[tile]) in adds:
            first = int(before[tile])
            tail = runs[tile].tail_cycles
            pace = (runs[tile].cycles - tail) / (int(tiles.trips[tile, 0]) + 1)
            own = starts[tile] + pace * np.arange(1, int(tiles.trips[tile, 0]) + 1)
            earliest = _earliest(tiles, first, tile, adds[first] + hop_cycles)
            # adds[m] = max(own pace after adds[m - 1], earliest[m]): a running maximum of delays
            adds[tile] = own + np.maximum.accumulate(np.maximum(earliest - own, 0.0))
            heapq.heappush(free, float(adds[tile][-1] + pace + tail))
            tile = after.get(tile)
    return summarize(runner, np.array(free), runs, machines)


def turn_before(tiles: WorkTiles, *, last_first: bool) -> np.ndarray:
    """(T,) which work tile of the same head has the turn before each one; -1 for the first."""
    rank = -tiles.block if last_first else tiles.block
    order = np.lexsort((rank, tiles.head, tiles.batch))
    before = np.full(len(order), -1)
    same = (np.diff(tiles.head[order]) == 0) & (np.diff(tiles.batch[order]) == 0)
    before[order[1:][same]] = order[:-1][same]
    return before


def _earliest(tiles: WorkTiles, first: int, tile: int, adds: np.ndarray) -> np.ndarray:
    """When the tile's adds may come at the earliest: after `first`'s to the same query tiles."""
    count = int(tiles.trips[tile, 0]) // tiles.group
    earliest = np.full((tiles.group, count), -np.inf)
    if first >= 0:
        theirs = adds.reshape(tiles.group, -1)
        shift = int(tiles.first[tile] - tiles.first[first])
        start, stop = max(0, -shift), min(count, theirs.shape[1] - shift)
        if start < stop:
            earliest[:, start:stop] = theirs[:, start + shift : stop + shift]
    return earliest.ravel()


def _describe(tiles: WorkTiles, before: np.ndarray, stuck: Stuck, last_first: bool) -> str:
    """Who waits for whom, and in which order it would end."""
    tile = next(tile for tile in stuck.waiting if before[tile] >= stuck.launched)
    return (
        f"this launch order never ends in a fixed order of sums: all {len(stuck.waiting)} that are "
        f"resident wait, such as block {tiles.block[tile]} of head {tiles.head[tile]} for block "
        f"{tiles.block[before[tile]]}, which has not started; turns go from the "
        f"{'last' if last_first else 'first'} keys on, and so must launches"
    )
