"""Which rank holds which rows of the sequence: a layout is a tuple of runs for each rank.

A run is a Python `range` of global positions; a rank holds its runs one behind the other. All else
follows from them: positions, masks, what has to travel. Nothing is padded: ranks may hold different
numbers of rows, and none.

    contiguous   rank r holds the r-th part: for windows, and for masks without a diagonal
    zigzag       of 2P parts rank r holds parts r and 2P-1-r: the same work everywhere if causal
    striped      rank r holds every P-th row: balanced to one row, but no block without a diagonal
    documents    zigzag of each packed document by itself
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fa4.config import require, require_int

if TYPE_CHECKING:
    import numpy as np

Runs = tuple[range, ...]
LAYOUTS = ("contiguous", "zigzag", "striped", "documents")
MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class RowLayout:
    """shards: the runs of each rank, disjoint, which together are range(seqlen)."""

    name: str
    seqlen: int
    shards: tuple[Runs, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.shards)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(count(runs) for runs in self.shards)

    @property
    def digest(self) -> str:
        """Equal for equal layouts, on every machine."""
        return hashlib.sha256(repr((self.seqlen, self.shards)).encode()).hexdigest()[:16]

    def positions(self, rank: int) -> np.ndarray:
        """(rows,) int64 global positions of a rank's rows, in the order it holds them."""
        require_int("rank", rank, 0, self.ranks - 1)
        return positions_of(self.shards[rank])

    def shard(self, x: Any, rank: int, dim: int = 1) -> Any:
        """A rank's rows of a whole tensor (NumPy or torch), copied together."""
        require_length(f"dimension {dim}", x.shape[dim], self.seqlen)
        return take(x, self.positions(rank), dim)

    def unshard(self, parts: Sequence[Any], dim: int = 1) -> Any:
        """The whole tensor from the parts of all ranks. Raises ValueError for wrong lengths."""
        import numpy as np

        require_length("parts", len(parts), self.ranks)
        for rank, (part, rows) in enumerate(zip(parts, self.lengths, strict=True)):
            require_length(f"rows of part {rank}", part.shape[dim], rows)
        order = np.concatenate([self.positions(rank) for rank in range(self.ranks)])
        return take(_joined(parts, dim), np.argsort(order), dim)


def require_length(what: str, found: int, wanted: int) -> None:
    """ValueError in one line unless two lengths are one."""
    if found != wanted:
        raise ValueError(f"{what} must be {wanted}, as the layout has it; got {found}")


def count(runs: Runs) -> int:
    """Rows of some runs."""
    return sum(map(len, runs))


def positions_of(runs: Runs) -> np.ndarray:
    """(rows,) int64 of some runs, in their order."""
    import numpy as np

    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *(np.arange(r.start, r.stop, r.step) for r in runs)])


def take(x: Any, index: np.ndarray, dim: int) -> Any:
    """x[index] along a dimension, for NumPy and torch."""
    from fa4.call.arrays import is_torch

    if not is_torch(x):
        return x.take(index, axis=dim)
    import torch

    return x.index_select(dim, torch.from_numpy(index).to(x.device))


def _joined(parts: Sequence[Any], dim: int) -> Any:
    from fa4.call.arrays import is_torch

    if is_torch(parts[0]):
        import torch

        return torch.cat(list(parts), dim=dim)
    import numpy as np

    return np.concatenate(parts, axis=dim)


def coalesce(runs: Runs) -> Runs:
    """The same rows, by the beginnings of their runs; runs of step 1 that touch made one."""
    filled = sorted((r for r in runs if r), key=lambda r: (r.start, r.stop))
    if filled and count(runs) == max(r[-1] for r in filled) - filled[0][0] + 1:
        return (range(filled[0][0], filled[0][0] + count(runs)),)
    joined: list[range] = []
    for run in filled:
        last = joined[-1] if joined else None
        if last is not None and last.stop == run.start and {last.step, run.step} == {1}:
            joined[-1] = range(last.start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def ascends(runs: Runs) -> bool:
    """Do the rows ascend from run to run?"""
    return all(a[-1] < b[0] for a, b in pairwise(r for r in runs if r))


def clip(run: range, first: int, stop: int) -> range:
    """What of a run lies in [first, stop)."""
    if first <= run.start and run.stop <= stop:
        return run
    if run.step == 1:
        return range(max(first, run.start), min(stop, run.stop))
    skipped = max(0, -(-(first - run.start) // run.step))
    kept = max(0, -(-(min(stop, run.stop) - run.start) // run.step))
    return run[skipped:kept]


def overlap(runs: Runs, others: Runs) -> Runs:
    """What of some runs lies in others, which have step 1, or are the same runs."""
    if runs == others:
        return runs
    return tuple(part for run in runs for other in others if (part := _common(run, other)))


def _common(run: range, other: range) -> range:
    if other.step == 1:
        return clip(run, other.start, other.stop)
    if run.step == 1:
        return clip(other, run.start, run.stop)
    same = run.step == other.step and (run.start - other.start) % run.step == 0
    return clip(run, other.start, other.stop) if same else run[:0]


def _cuts(first: int, stop: int, parts: int, tile: int) -> list[range]:
    """[first, stop) in parts of nearly equal length, cut at multiples of `tile` from `first`."""
    tiles = -(-(stop - first) // tile)
    edges = [min(stop, first + tiles * i // parts * tile) for i in range(parts)] + [stop]
    return [range(a, b) for a, b in pairwise(edges)]


def make_layout(
    name: str,
    seqlen: int,
    ranks: int,
    *,
    cu_seqlens: Sequence[int] = (),
    tile: int = 1,
) -> RowLayout:
    """A layout by its name. Raises ValueError: one line, what is wrong.

    Args:
        cu_seqlens: offsets of packed documents, for "documents": 0, ..., seqlen.
        tile: parts are cut at multiples of it (of "striped", rows of a stripe); the last part of a
            sequence has what is left.
    """
    require(name in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}", name)
    require_int("seqlen", seqlen, 0, 2**40)
    require_int("ranks", ranks, 1, MOST_RANKS)
    require_int("tile", tile, 1, 2**31)
    offsets = check_offsets(cu_seqlens, seqlen)
    if name == "documents":
        require(len(cu_seqlens) > 0, "layout documents needs cu_seqlens", None)
    shards: list[list[range]] = [[] for _ in range(ranks)]
    if name == "contiguous":
        shards = [[run] for run in _cuts(0, seqlen, ranks, tile)]
    elif name == "striped":
        for rank, mine in enumerate(shards):
            mine += _stripes(rank, seqlen, ranks, tile)
    else:
        for first, stop in pairwise(offsets if name == "documents" else (0, seqlen)):
            parts = _cuts(first, stop, 2 * ranks, tile)
            for rank, mine in enumerate(shards):
                mine += [parts[rank], parts[-1 - rank]]
    return RowLayout(name, seqlen, tuple(coalesce(tuple(mine)) for mine in shards))


def _stripes(rank: int, seqlen: int, ranks: int, tile: int) -> list[range]:
    if tile == 1:
        return [range(rank, seqlen, ranks)]
    starts = range(rank * tile, seqlen, ranks * tile)
    return [range(start, min(seqlen, start + tile)) for start in starts]


def check_offsets(cu_seqlens: Sequence[int], seqlen: int) -> tuple[int, ...]:
    """Offsets of documents as a tuple; (0, seqlen) for none. ValueError if they are not ones."""
    offsets = tuple(int(x) for x in cu_seqlens) or (0, seqlen)
    ascending = all(a <= b for a, b in pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != seqlen or not ascending or len(offsets) < 2:
        shown = offsets if len(offsets) < 9 else (*offsets[:4], "...", *offsets[-3:])
        raise ValueError(f"cu_seqlens must ascend from 0 to the {seqlen} rows; got {shown}")
    return offsets
