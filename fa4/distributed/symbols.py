"""Pairs counted by carrying a plan out with random 64-bit numbers in place of tensors.

Each (head, row) and (head, key) has a random number. Attention of a block adds up the numbers of
the keys that a row meets, its gradient also those of the rows that a key meets. A row that met each
key that its mask shows once, and no other, has one right sum modulo 2^64; any other set of keys has
it with a chance of 2^-64 (2^-63 if it met every wrong key twice, and so on). What was sent from, or
read in, the wrong buffer carries other numbers, and shows as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4.distributed.execute import BlockPart, Tensors, rows_in, run_here
from fa4.distributed.layout import RowLayout, positions_of
from fa4.distributed.plan import CommunicationPlan, Shard, Sizes, Spec


@dataclass(frozen=True)
class SymbolCalculator:
    """Sums of uint64, (rows, heads, 1); of "kv" and "q" the numbers themselves."""

    sizes: Sizes

    def empty(self, piece: Shard) -> Tensors:
        """Noise that no sum expects."""
        return (np.full((rows_in(piece), len(piece.heads), 1), 0xBAD0BAD0BAD0BAD0, np.uint64),)

    def zeros(self, piece: Shard) -> Tensors:
        """Nothing met yet."""
        return (np.zeros((rows_in(piece), len(piece.heads), 1), np.uint64),)

    def attend(self, q: Tensors, kv: Tensors, part: BlockPart) -> Tensors:
        """Per row the sum of the keys' numbers; times the row's own, so that a wrong row shows."""
        return (q[0] * _band_sums(self._spread(kv[0], part), *part.block.shape, part),)

    def differentiate(
        self, g: Tensors, kv: Tensors, part: BlockPart, wanted: tuple[bool, bool]
    ) -> tuple[Tensors, Tensors]:
        """The same for rows, and for keys the sum of the rows' numbers, times its own."""
        rows, keys = part.block.shape
        dq = self.attend(g, kv, part) if wanted[0] else ()
        if not wanted[1]:
            return dq, ()
        met = _turned_sums(g[0], rows, keys, part)
        each = len(part.heads) // len(part.kv_heads)
        met = met.reshape(keys, len(part.kv_heads), each).sum(axis=2, dtype=np.uint64)
        return dq, (kv[0] * met[..., None],)

    def accumulate(self, kind: str, into: Tensors, more: Tensors) -> None:
        """Add, in place."""
        for x, y in zip(into, more, strict=True):
            x += y

    def widen(self, held: Tensors) -> Tensors:
        """A copy: what a block made may be a view."""
        return held

    def _spread(self, x: np.ndarray, part: BlockPart) -> np.ndarray:
        return np.repeat(x, len(part.heads) // len(part.kv_heads), axis=1)


def _cumulated(x: np.ndarray) -> np.ndarray:
    """(n, ...) -> (n + 1, ...): sums of the first 0, 1, ... n."""
    return np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis=0, dtype=np.uint64)])


def _band_sums(x: np.ndarray, rows: int, keys: int, part: BlockPart) -> np.ndarray:
    """(keys, heads, 1) -> (rows, heads, 1): sums over each row's keys."""
    low, high = part.block.low, part.block.high
    if part.block.is_whole:
        return np.broadcast_to(x.sum(axis=0, dtype=np.uint64), (rows, *x.shape[1:]))
    total, row = _cumulated(x), np.arange(rows)
    first = np.zeros(rows, int) if low is None else np.clip(row + low, 0, keys)
    stop = np.full(rows, keys) if high is None else np.clip(row + high + 1, 0, keys)
    stop = np.maximum(first, stop)
    return np.asarray(total[stop] - total[first])


def _turned_sums(x: np.ndarray, rows: int, keys: int, part: BlockPart) -> np.ndarray:
    """(rows, heads, 1) -> (keys, heads, 1): sums over the rows that see each key."""
    low, high = part.block.low, part.block.high
    if part.block.is_whole:
        return np.broadcast_to(x.sum(axis=0, dtype=np.uint64), (keys, *x.shape[1:]))
    total, key = _cumulated(x), np.arange(keys)
    first = np.zeros(keys, int) if high is None else np.clip(key - high, 0, rows)
    stop = np.full(keys, rows) if low is None else np.clip(key - low + 1, 0, rows)
    stop = np.maximum(first, stop)
    return np.asarray(total[stop] - total[first])


def _numbers(layout: RowLayout, heads: int, seed: int) -> np.ndarray:
    """(positions, heads, 1) odd random numbers, so that each has an inverse."""
    last = max((run[-1] + 1 for runs in layout.shards for run in runs if run), default=0)
    drawn = np.random.default_rng(seed).integers(0, 2**63, (last, heads, 1), np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def find_wrong_pairs(plan: CommunicationPlan) -> list[str]:
    """Carry the plan out; one line for each rank and result with a wrong set of pairs."""
    spec = plan.spec
    rows = _numbers(spec.rows, spec.sizes.heads_q, 1)
    keys = _numbers(spec.keys, spec.sizes.heads_k, 2)
    given = []
    for rank in range(plan.ranks):
        mine, theirs = (positions_of(x.shards[rank]) for x in (spec.rows, spec.keys))
        given.append({"q": (rows[mine],), "kv": (keys[theirs],)})
    try:
        results = run_here(plan, SymbolCalculator(spec.sizes), given)
    except ValueError as error:  # rows that are in none of the buffers that a step reads
        return [str(error)]
    wanted = _expected(spec, rows, keys)
    found = []
    for rank, result in enumerate(results):
        for kind, whole in wanted.items():
            layout = spec.keys if kind == "dkv" else spec.rows
            positions = positions_of(layout.shards[rank])
            what = "key" if kind == "dkv" else "row"
            if kind not in result:
                if len(positions):
                    found.append(f"rank {rank} has no result {kind}")
                continue
            wrong = (result[kind][0] != whole[positions]).any(axis=(1, 2))
            if wrong.any():
                at = positions[wrong.argmax()]
                others = f", and {wrong.sum() - 1} more" if wrong.sum() > 1 else ""
                found.append(f"rank {rank}: {what} {at} met a wrong set of pairs ({kind}{others})")
    return found


def _expected(spec: Spec, rows: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
    """The sums over what the mask shows, from the mask alone."""
    group = spec.sizes.group
    position = np.arange(len(rows))
    first, stop = spec.mask.visible(position)
    total = _cumulated(np.repeat(keys, group, axis=1))
    met = rows * (total[stop] - total[first])
    if not spec.backward:
        return {"o": met}
    turned = spec.mask._replace(left=spec.mask.right, right=spec.mask.left)
    first, stop = turned.visible(np.arange(len(keys)))
    of_rows = _cumulated(rows)
    last = len(of_rows) - 1
    sums = of_rows[np.minimum(stop, last)] - of_rows[np.minimum(first, last)]
    sums = sums.reshape(len(keys), spec.sizes.heads_k, group).sum(axis=2, dtype=np.uint64)
    return {"dq": met, "dkv": keys * sums[..., None]}
