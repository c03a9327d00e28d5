"""Blocks in float64 NumPy: what a plan must give, and the gradients of one block from given LSE.

    S = scale Q K^T (softcap, score_mod),  LSE = log sum exp S,  O = exp(S - LSE) V
    P = exp(S - LSE of all keys),  dV = P^T dO,  dS = P (dO V^T - D),  dQ = scale dS K, ...

score_mod and mask_mod are called with global positions: those of the layout, not of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.distributed.execute import BlockPart, Tensors, rows_in
from fa4.distributed.layout import positions_of
from fa4.distributed.plan import Shard, Sizes


@dataclass(frozen=True)
class ExactCalculator:
    """float64 throughout, also on the wire.

    score_mod: (score, head, row, key) -> score, positions of shape (rows, 1) and (1, keys);
    score_mod_bwd: (grad, score, head, row, key) -> grad. mask_mod: (head, row, key) -> keep.
    """

    sizes: Sizes
    scale: float
    softcap: float = 0.0
    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None

    def widths(self, kind: str) -> tuple[int, ...]:
        """Of the tensors of a kind."""
        d, dv = self.sizes.head_dim, self.sizes.head_dim_v
        return {
            "q": (d,), "kv": (d, dv), "o": (dv, 1), "out": (dv, 1),
            "g": (d, dv, 1, 1), "dq": (d,), "dkv": (d, dv),
        }[kind]  # fmt: skip

    def zeros(self, piece: Shard) -> Tensors:
        """O = 0 and LSE = -inf; gradients 0."""
        found = self.empty(piece)
        for x in found:
            x[...] = 0
        if piece.kind in ("o", "out"):
            found[1][...] = -np.inf
        return found

    def empty(self, piece: Shard) -> Tensors:
        """Tensors of a piece, NaN: what is used before it arrived shows."""
        shape = (self.sizes.batch, rows_in(piece), len(piece.heads))
        return tuple(np.full((*shape, width), np.nan) for width in self.widths(piece.kind))

    def attend(self, q: Tensors, kv: Tensors, part: BlockPart) -> Tensors:
        """(O, LSE) of a block, (B, rows, heads, .)."""
        scores, seen, _ = self._scores(q[0], kv[0], part)
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
        total = p.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, top + np.log(total), -np.inf)
        out = _products(p / np.where(total > 0, total, 1.0), self._spread(kv[1], part))
        return np.moveaxis(out, 1, 2), np.moveaxis(lse, 1, 2)

    def differentiate(
        self, g: Tensors, kv: Tensors, part: BlockPart, wanted: tuple[bool, bool]
    ) -> tuple[Tensors, Tensors]:
        """(dq,) and (dk, dv)."""
        q, dout, lse, delta = g
        scores, seen, raw = self._scores(q, kv[0], part)
        lse, delta, dout = (np.moveaxis(x, 2, 1) for x in (lse, delta, dout))
        p = np.where(seen, np.exp(np.where(seen, scores - lse, 0.0)), 0.0)
        k, v = self._spread(kv[0], part), self._spread(kv[1], part)
        ds = p * (_products(dout, np.swapaxes(v, 2, 3)) - delta)
        ds = np.where(seen, self._unmodified(ds, raw, part), 0.0) * self.scale
        dq = np.moveaxis(_products(ds, k), 1, 2)
        dk = self._summed(_products(np.swapaxes(ds, 2, 3), np.moveaxis(q, 2, 1)), part)
        dv = self._summed(_products(np.swapaxes(p, 2, 3), dout), part)
        return (dq,) if wanted[0] else (), (dk, dv) if wanted[1] else ()

    def accumulate(self, kind: str, into: Tensors, more: Tensors) -> None:
        """Merge or add, in place."""
        if kind not in ("o", "out"):
            for x, y in zip(into, more, strict=True):
                x += y
            return
        (out, lse), (more_out, more_lse) = into, more
        merged = np.logaddexp(lse, more_lse)
        safe = np.where(np.isneginf(merged), 0.0, merged)
        out[...] = out * np.exp(lse - safe) + more_out * np.exp(more_lse - safe)
        lse[...] = merged

    def widen(self, held: Tensors) -> Tensors:
        """Nothing is wider."""
        return held

    def _spread(self, x: np.ndarray, part: BlockPart) -> np.ndarray:
        """(B, keys, KV heads, w) -> (B, heads, keys, w)."""
        each = len(part.heads) // max(1, len(part.kv_heads))
        return np.repeat(np.moveaxis(x, 2, 1), each, axis=1)

    def _summed(self, x: np.ndarray, part: BlockPart) -> np.ndarray:
        """(B, heads, keys, w) -> (B, keys, KV heads, w)."""
        batch, heads, keys, width = x.shape
        kv = len(part.kv_heads)
        return np.moveaxis(x.reshape(batch, kv, heads // kv, keys, width).sum(axis=2), 1, 2)

    def _scores(
        self, q: np.ndarray, k: np.ndarray, part: BlockPart
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores (B, heads, rows, keys), which are visible, and scores before modification."""
        raw = self.scale * _products(np.moveaxis(q, 2, 1), np.swapaxes(self._spread(k, part), 2, 3))
        rows, keys = part.block.shape
        apart = np.arange(keys)[None] - np.arange(rows)[:, None]
        seen = np.ones((1, 1, rows, keys), bool)
        if part.block.low is not None:
            seen = seen & (apart >= part.block.low)
        if part.block.high is not None:
            seen = seen & (apart <= part.block.high)
        if self.mask_mod is not None:
            seen = seen & np.asarray(self.mask_mod(*_indices(part)), bool)
        if self.softcap:
            return self.softcap * np.tanh(raw / self.softcap), seen, raw
        if self.score_mod is not None:
            return self.score_mod(raw, *_indices(part)), seen, raw
        return raw, seen, raw

    def _unmodified(self, ds: np.ndarray, raw: np.ndarray, part: BlockPart) -> np.ndarray:
        """dS through softcap or score_mod."""
        if self.softcap:
            return ds * (1 - np.tanh(raw / self.softcap) ** 2)
        if self.score_mod is None:
            return ds
        if self.score_mod_bwd is None:
            raise ValueError("gradients through a score_mod need its score_mod_bwd; got None")
        return np.asarray(self.score_mod_bwd(ds, raw, *_indices(part)))


def _products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Matrix products of the last two dimensions."""
    return np.matmul(x, y)


def _indices(part: BlockPart) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """head (heads, 1, 1), row (rows, 1), key (1, keys): in the whole call."""
    heads = np.asarray(part.heads)[:, None, None]
    return heads, positions_of(part.block.rows)[:, None], positions_of(part.block.keys)[None]
