"""Which keys a row sees: causal, window, mask_mod and block lists, bottom-right aligned.

    i + Sk - Sq - left <= j <= i + Sk - Sq + right

A side of None or -1 is unbounded; causal means right = 0, whatever side is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class SequenceLengths(NamedTuple):
    """Lengths of the sequence that a callback is looking at."""

    seqlen_q: int
    seqlen_k: int


def visible_keys(
    options: Mapping[str, Any], batch: int, heads: int, lengths: SequenceLengths
) -> np.ndarray:
    """(Hq, Sq, Sk) bool of one sequence."""
    head, row, key = np.ogrid[:heads, : lengths.seqlen_q, : lengths.seqlen_k]
    shape = (heads, *lengths)
    left, right = options.get("window_size") or (None, None)
    if options.get("causal"):
        right = 0
    last = row + lengths.seqlen_k - lengths.seqlen_q
    seen = np.ones(shape, bool)
    if left not in (None, -1):
        seen &= key + left >= last
    if right not in (None, -1):
        seen &= key - right <= last
    function = options.get("mask_mod")
    chosen = np.ones(shape, bool)
    if function is not None:
        chosen &= np.asarray(
            function(batch, head, row, key, lengths, options.get("aux_tensors")), bool
        )
    sparse = options.get("block_sparse_tensors")
    if sparse is not None:
        partial, full = (_listed(sparse, kind, batch, shape) for kind in ("mask", "full"))
        chosen = (partial & ~full & chosen) | full
    return seen & chosen


def _listed(sparse: Any, kind: str, batch: int, shape: tuple[int, ...]) -> np.ndarray:
    """(Hq, Sq, Sk) bool: does the pair lie in a block of the "mask" or of the "full" list?"""
    listed = np.zeros(shape, bool)
    counts, indices = (getattr(sparse, f"{kind}_block_{part}", None) for part in ("cnt", "idx"))
    if counts is None or indices is None:
        return listed
    height, width = (int(n) for n in sparse.block_size)
    counts = np.broadcast_to(counts[min(batch, len(counts) - 1)], (shape[0], counts.shape[2]))
    indices = indices[min(batch, len(indices) - 1)]
    indices = np.broadcast_to(indices, (shape[0], *indices.shape[1:]))
    for head, block_row in np.ndindex(*counts.shape):
        rows = slice(block_row * height, (block_row + 1) * height)
        for block in indices[head, block_row, : counts[head, block_row]]:
            listed[head, rows, block * width : (block + 1) * width] = True
    return listed
