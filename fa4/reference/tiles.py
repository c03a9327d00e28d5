"""Which KV tiles a block of query rows visits, in which order, and which of them need a mask.

Mirrors the kernel: a band mask becomes a range of tiles per row block and per-row column limits;
tiles are visited in descending order, so that the masked ones at the diagonal come first.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from fa4.reference.sequences import Sequence
from fa4.reference.spec import (
    BLOCK_FULL,
    BLOCK_PARTIAL,
    BLOCK_SKIPPED,
    Attention,
    Region,
    SeqlenInfo,
    apply_mask_mod,
    block_states,
)


class Tile(NamedTuple):
    """Half-open range of rows or keys."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.start, self.stop)

    @property
    def indices(self) -> np.ndarray:
        """The range as an int array."""
        return np.arange(self.start, self.stop)

    @property
    def size(self) -> int:
        """Number of rows or keys."""
        return self.stop - self.start


def cut(length: int, size: int) -> list[Tile]:
    """Tiles of `size` covering [0, length); the last may be shorter."""
    return [Tile(start, min(start + size, length)) for start in range(0, length, size)]


class TileMasks:
    """Masks and tile ranges of one sequence under one `Attention`."""

    def __init__(self, seq: Sequence, spec: Attention) -> None:
        self.spec = spec
        self.batch = seq.batch
        self.heads = np.arange(seq.q.shape[0])
        self.info = SeqlenInfo(seq.q.shape[1], seq.k.shape[1])

    @cached_property
    def _states(self) -> np.ndarray:
        assert self.spec.block_sparse is not None
        return block_states(self.spec.block_sparse, self.batch, len(self.heads))

    def region(self, rows: Tile, cols: Tile) -> Region:
        """The rectangle rows x cols, for callbacks and dropout."""
        return Region(self.batch, self.heads, rows.indices, cols.indices, self.info)

    def key_limits(self, row: int | np.ndarray) -> tuple[int | np.ndarray, int | np.ndarray]:
        """(first, last + 1) key that the band shows to a row, clipped to [0, Sk]."""
        seqlen_q, seqlen_k = self.info
        left, right = self.spec.window
        diagonal = row + (seqlen_k - seqlen_q)
        first = 0 * diagonal if left is None else np.clip(diagonal - left, 0, seqlen_k)
        last = 0 * diagonal + seqlen_k
        if right is not None:
            last = np.clip(diagonal + right + 1, 0, seqlen_k)
        return first, last

    def row_limits(self, key: int) -> tuple[int, int]:
        """(first, last + 1) row that sees a key through the band, clipped to [0, Sq]."""
        seqlen_q, seqlen_k = self.info
        left, right = self.spec.window
        diagonal = key + seqlen_q - seqlen_k
        first = 0 if right is None else min(max(diagonal - right, 0), seqlen_q)
        last = seqlen_q if left is None else min(max(diagonal + left + 1, 0), seqlen_q)
        return first, last

    def kv_tiles(self, rows: Tile, tile_n: int) -> list[Tile]:
        """KV tiles that some row of `rows` may see, in the order the kernel visits them.

        Descending; with block sparsity the tiles that need mask_mod come before the full ones.
        """
        first, _ = self.key_limits(rows.start)
        _, last = self.key_limits(rows.stop - 1)
        tiles = cut(self.info.seqlen_k, tile_n)[int(first) // tile_n : -(-int(last) // tile_n)]
        if self.spec.block_sparse is not None:
            ranked = [(self._tile_state(rows, tile), tile) for tile in reversed(tiles)]
            partial = [tile for state, tile in ranked if state == BLOCK_PARTIAL]
            return partial + [tile for state, tile in ranked if state == BLOCK_FULL]
        return tiles[::-1]

    def q_tiles(self, cols: Tile, tile_m: int) -> list[Tile]:
        """Query tiles with a row that may see some key of `cols`, ascending (backward pass)."""
        first, _ = self.row_limits(cols.start)
        _, last = self.row_limits(cols.stop - 1)
        tiles = cut(self.info.seqlen_q, tile_m)[first // tile_m : -(-last // tile_m)]
        if self.spec.block_sparse is not None:
            tiles = [t for t in tiles if self._tile_state(t, cols) != BLOCK_SKIPPED]
        return tiles

    def _block_mask(self, rows: Tile, cols: Tile) -> np.ndarray:
        assert self.spec.block_sparse is not None
        block_m, block_n = self.spec.block_sparse.block_size
        return self._states[:, rows.indices[:, None] // block_m, cols.indices[None, :] // block_n]

    def _tile_state(self, rows: Tile, cols: Tile) -> int:
        """BLOCK_FULL if all its pairs lie in full blocks, BLOCK_SKIPPED if none is listed."""
        state = self._block_mask(rows, cols)
        if (state == BLOCK_FULL).all():
            return BLOCK_FULL
        return BLOCK_PARTIAL if state.any() else BLOCK_SKIPPED

    def visible(self, rows: Tile, cols: Tile) -> np.ndarray | None:
        """(Hq or 1, rows, cols) bool of visible pairs, or None when all of them are."""
        keep = self._band(rows, cols)
        if self.spec.mask_mod is None and self.spec.block_sparse is None:
            return keep
        chosen = np.ones((1, rows.size, cols.size), bool)
        if self.spec.mask_mod is not None:
            chosen = apply_mask_mod(self.spec, self.region(rows, cols))
        if self.spec.block_sparse is not None:
            state = self._block_mask(rows, cols)
            chosen = (state == BLOCK_FULL) | ((state == BLOCK_PARTIAL) & chosen)
        if keep is not None:
            chosen = chosen & keep
        return None if chosen.all() else chosen

    def hide_unseen(self, keep: np.ndarray, *tiles: np.ndarray) -> None:
        """Zero, in place, the rows (Hk, n, D) of `tiles` that no query of a KV head sees.

        keep is a result of `visible`; what is hidden may be inf or NaN and must not become 0 * inf.
        """
        heads_k = tiles[0].shape[0]
        every_head = np.broadcast_to(keep, (len(self.heads), *keep.shape[1:]))
        seen = every_head.reshape(heads_k, -1, keep.shape[-1]).any(axis=1)
        for tile in tiles:
            tile[~seen] = 0

    def _band(self, rows: Tile, cols: Tile) -> np.ndarray | None:
        first, last = self.key_limits(rows.indices)
        if np.max(first) <= cols.start and np.min(last) >= cols.stop:
            return None
        keys = cols.indices
        keep = (keys >= np.asarray(first)[:, None]) & (keys < np.asarray(last)[:, None])
        return keep[None]
