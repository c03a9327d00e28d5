"""Masks that every implementation knows, and whose hidden tiles the kernels skip.

    from fa4 import masks
    fa4.flash_attn_func(q, k, v, mask_mod=masks.Chunked(8192))

A mask is one file here and one line of `MASKS`. `Band` is what `causal` and `window_size` of the
public functions stand for.
"""

from __future__ import annotations

from fa4.masks.band import Band
from fa4.masks.chunked import Chunked
from fa4.masks.interval import IntervalMask

MASKS: tuple[type[IntervalMask], ...] = (
    Band,
    Chunked,
)

__all__ = ["MASKS", "Band", "Chunked", "IntervalMask"]
