"""What some rows see of some keys, as blocks: dense pieces of the mask that one call computes.

A block is rows x keys, each a tuple of runs laid one behind the other, and a band in the numbers
that rows and keys have there: key y is visible to row x if x + low <= y <= x + high. A band is what
kernels know (`window`); hidden corners are cut off, so that its sides are never negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from fa4.distributed.layout import Runs, ascends, clip, count, positions_of

if TYPE_CHECKING:
    import numpy as np


class SequenceMask(NamedTuple):
    """Query at position i sees keys i - left ... i + right of its own document; None: no bound.

    A query's position is that of the key on its diagonal: of fewer queries than keys, the first has
    position Sk - Sq.
    """

    left: int | None
    right: int | None
    documents: tuple[int, ...]

    def visible(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first, stop) key that each row sees, int64 like the rows' positions."""
        import numpy as np

        edges = np.asarray(self.documents)
        mine = np.searchsorted(edges, rows, side="right") - 1
        first, stop = edges[mine], edges[mine + 1]
        if self.left is not None:
            first = np.maximum(first, rows - self.left)
        if self.right is not None:
            stop = np.minimum(stop, rows + self.right + 1)
        return first, np.maximum(stop, first)

    def pairs(self, rows: Runs) -> int:
        """Visible pairs of some rows."""
        first, stop = self.visible(positions_of(rows))
        return int((stop - first).sum())

    def needed(self, rows: Runs) -> Runs:
        """Keys that some of the rows see: runs of step 1, ascending."""
        spans = []
        for run in rows:
            for first, stop in self._documents(run):
                part = clip(run, first, stop)
                low = first if self.left is None else max(first, part[0] - self.left)
                high = stop if self.right is None else min(stop, part[-1] + self.right + 1)
                spans.append(range(low, high))
        return _united(spans)

    def seers(self, keys: Runs) -> Runs:
        """Rows that see some of the keys."""
        return SequenceMask(self.right, self.left, self.documents).needed(keys)

    def _documents(self, run: range) -> Iterator[tuple[int, int]]:
        """Documents that a run of rows has a part in."""
        from bisect import bisect_right

        if not run:
            return
        at = bisect_right(self.documents, run[0]) - 1
        for first, stop in pairwise(self.documents[at:]):
            if first > run[-1]:
                return
            if clip(run, first, stop):
                yield first, stop


def _united(spans: list[range]) -> Runs:
    joined: list[range] = []
    for span in sorted((s for s in spans if s), key=lambda s: s.start):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return tuple(joined)


class Block(NamedTuple):
    """rows x keys and the band; None: no bound on that side."""

    rows: Runs
    keys: Runs
    low: int | None
    high: int | None

    @property
    def is_whole(self) -> bool:
        """Does every row see every key?"""
        return self.low is None and self.high is None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, keys)."""
        return count(self.rows), count(self.keys)

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right) of the band as FlashAttention counts it, bottom-right aligned."""
        rows, keys = self.shape
        left = None if self.low is None else keys - rows - self.low
        right = None if self.high is None else self.high - (keys - rows)
        return left, right

    @property
    def pairs(self) -> int:
        """Visible pairs."""
        rows, keys = self.shape
        if self.is_whole:
            return rows * keys
        return _below(rows, keys, self.high) - (
            0 if self.low is None else _below(rows, keys, self.low - 1)
        )


def _below(rows: int, keys: int, high: int | None) -> int:
    """Pairs with y <= x + high."""
    if high is None:
        return rows * keys
    first = max(0, -high)  # the first row that sees a key
    full = max(first, keys - 1 - high)  # from here on a row sees all
    full, first = min(full, rows), min(first, rows)
    rising = (first + high + 1 + full + high) * (full - first) // 2
    return rising + (rows - full) * keys


def make_blocks(rows: Runs, keys: Runs, mask: SequenceMask, tile: int = 0) -> tuple[Block, ...]:
    """Blocks in which every visible pair of the rows and keys is once.

    tile: cut the rows at multiples of it, from the beginning of each document, so that the calls
    are those of any other layout whose runs are cut there; 0: as few blocks as possible.
    """
    blocks: list[Block] = []
    for first, stop in pairwise(mask.documents):
        mine = _inside(rows, first, stop)
        theirs = _inside(keys, first, stop) if mine else ()
        if not theirs:
            continue
        if tile:
            mine = tuple(part for run in mine for part in _tiles(run, first, tile))
        causal = mask.left is None and mask.right == 0 and not tile
        if causal and mine == theirs and ascends(mine):
            blocks.append(Block(mine, theirs, None, 0))
            continue
        squares = [_squares(run, theirs, mask) for run in _split(mine, theirs)]
        blocks += [x for found in squares for x in found] if tile else _fused(squares)
    return tuple(blocks)


def _inside(runs: Runs, first: int, stop: int) -> Runs:
    """What of some runs lies in [first, stop); most do not, of many documents."""
    near = (run for run in runs if run.start < stop and run.stop > first)
    return tuple(part for run in near if (part := clip(run, first, stop)))


def _tiles(run: range, first: int, tile: int) -> Iterator[range]:
    number = (run.start - first) // tile
    while first + number * tile < run.stop:
        if part := clip(run, first + number * tile, first + (number + 1) * tile):
            yield part
        number += 1


def _split(rows: Runs, keys: Runs) -> Iterator[range]:
    """Rows in runs of the step that the keys have, where that is greater."""
    step = max(run.step if len(run) > 1 else 1 for run in keys)
    for run in rows:
        parts = step if run.step == 1 and len(run) > 1 else 1
        yield from (run[i::parts] for i in range(min(parts, len(run))))


def _squares(run: range, keys: Runs, mask: SequenceMask) -> list[Block]:
    """Blocks of one run of rows; neighbouring keys that all rows see are one."""
    found: list[Block] = []
    step = run.step if len(run) > 1 else 1
    alike = (x[i::step] for x in keys for i in range(step)) if step > 1 else keys
    alike = keys if all(x.step == step for x in keys) else alike
    for other in alike:
        square = _square(run, other, mask) if other else None
        if square is None:
            continue
        last = found[-1] if found else None
        if last and last.rows == square.rows and last.is_whole and square.is_whole:
            found[-1] = last._replace(keys=last.keys + square.keys)
            continue
        found.append(square)
    return found


def _square(run: range, keys: range, mask: SequenceMask) -> Block | None:
    """One run by one run, of the same document, without its hidden edges."""
    step = run.step
    if keys.step != step and len(run) > 1 and len(keys) > 1:
        raise ValueError(f"runs of different steps have no band; got {run} and {keys}")
    left, right = mask.left, mask.right
    if right is not None:
        run = clip(run, keys[0] - right, run.stop)
    if left is not None:
        run = clip(run, run.start, keys[-1] + left + 1)
    if not run:
        return None
    if right is not None:
        keys = clip(keys, keys.start, run[-1] + right + 1)
    if left is not None:
        keys = clip(keys, run[0] - left, keys.stop)
    if not keys:
        return None
    step = run.step if len(run) > 1 else keys.step
    apart = run.start - keys.start
    low = high = None
    if left is not None and keys[0] < run[-1] - left:
        low = -((left - apart) // step)
    if right is not None and keys[-1] > run[0] + right:
        high = (apart + right) // step
    if low is not None and high is not None and low > high:
        return None  # a window narrower than the step, between its keys
    return Block((run,), (keys,), low, high)


def _fused(by_run: list[list[Block]]) -> list[Block]:
    """Runs of rows that see the same whole keys, in one block."""
    blocks: list[Block] = []
    for squares in by_run:
        for square in squares:
            last = blocks[-1] if blocks else None
            alike = last and last.keys == square.keys and last.rows != square.rows
            if last and alike and last.is_whole and square.is_whole:
                blocks[-1] = last._replace(rows=last.rows + square.rows)
                continue
            blocks.append(square)
    return blocks
