"""An honest attention forward for one sequence: tiles of 128 keys, online softmax, all options.

It shares no code with `fa4`. Sums are float32 (float64 for fp64), P is rounded once to the element
type before the product with V, and O once. Every decision is a small method, so that a fault is one
method replaced; arrays are heads first, (H, S, D), and scores are (Hq, Sq, keys of the tile).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.testing.planted.random_bits import keep_factors

FP8 = {np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)}
SCALE_BLOCK = 128  # rows or keys that share a factor, where it is a block's


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keywords of a call, with the names and defaults of `fa4.flash_attn_varlen_func`."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    learnable_sink: np.ndarray | None = None
    softcap: float = 0.0
    num_splits: int = 1
    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux_tensors: Any = None
    block_sparse_tensors: Any = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    seqused_q: np.ndarray | None = None
    seqused_k: np.ndarray | None = None
    page_table: np.ndarray | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_descale: np.ndarray | None = None
    k_descale: np.ndarray | None = None
    v_descale: np.ndarray | None = None

    @property
    def layout(self) -> str:
        """dense, packed, padded or paged."""
        if self.page_table is not None:
            return "paged"
        if self.cu_seqlens_q is not None or self.cu_seqlens_k is not None:
            return "packed"
        return "dense" if self.seqused_q is None and self.seqused_k is None else "padded"

    @property
    def is_windowed(self) -> bool:
        """Does window_size bound anything?"""
        return any(side not in (None, -1) for side in self.window_size)


class Lengths(NamedTuple):
    """What callbacks get as seqlen_info."""

    seqlen_q: int
    seqlen_k: int


class Place(NamedTuple):
    """Where a sequence lies: q[rows], k[keys]; first row and key; keys that its buffer can hold."""

    batch: int
    rows: tuple[Any, ...]
    keys: tuple[Any, ...]
    first_row: int
    first_key: int
    room: int


class State(NamedTuple):
    """Of the tiles so far: maximum and sum of the exponentials (Hq, Sq), sum of P V."""

    top: np.ndarray
    total: np.ndarray
    out: np.ndarray


def finite(top: np.ndarray) -> np.ndarray:
    """A maximum to subtract: 0 where there is none."""
    return np.where(np.isneginf(top), top.dtype.type(0), top)


class Kernel:
    """Attention over one sequence: q (Sq, Hq, d), k (Sk, Hk, d), v (Sk, Hk, dv)."""

    tile = 128
    is_backward = False

    def __init__(
        self, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], place: Place, options: Options
    ) -> None:
        self.q, self.k, self.v = (x.transpose(1, 0, 2) for x in arrays)
        self.place, self.options = place, options
        self.dtype = self.q.dtype
        self.work = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        self.is_fp8 = self.dtype in FP8
        self.heads, self.rows, self.dim = self.q.shape
        self.heads_k, self.keys, self.dim_v = self.v.shape
        self.group = self.heads // self.heads_k
        self.wide_q = self.operand(self.q)

    def scale(self) -> float:
        """The factor of the products."""
        given = self.options.softmax_scale
        return self.dim**-0.5 if given is None else float(given)

    def descale(self, name: str, first: int, count: int) -> np.ndarray | None:
        """(Hq, count) factors of rows or keys from `first` on, or None: of a head, or of blocks."""
        table = getattr(self.options, f"{name}_descale")
        if table is None:
            return None
        heads = np.repeat(table[self.place.batch], self.group, axis=0)
        if heads.ndim == 1:
            return np.repeat(heads[:, None], count, axis=1)
        return np.repeat(heads, SCALE_BLOCK, axis=1)[:, first : first + count]

    def score_factor(self, cols: slice) -> np.ndarray:
        """(Hq, Sq, keys of the tile), or 1: what undoes the quantisation of q and k."""
        q = self.descale("q", 0, self.rows)
        k = self.descale("k", cols.start, cols.stop - cols.start)
        factor = self.work.type(1) if q is None else q[:, :, None]
        return factor if k is None else factor * k[:, None, :]

    def value_factor(self, cols: slice) -> np.ndarray:
        """(Hq, keys of the tile, 1), or 1: what undoes the quantisation of v."""
        v = self.descale("v", cols.start, cols.stop - cols.start)
        return self.work.type(1) if v is None else v[:, :, None]

    def p_offset_log2(self) -> int:
        """The power of two that P in FP8 bears."""
        return 8

    def softcap(self) -> float:
        """0 for none."""
        return self.options.softcap

    def score_mod(self) -> Callable[..., Any] | None:
        """The callback on scaled scores."""
        return self.options.score_mod

    def sides(self) -> tuple[int | None, int | None]:
        """(left, right) of the window; causal makes the right side 0."""
        left, right = (None if side == -1 else side for side in self.options.window_size)
        if self.options.causal:
            right = 0
        return left, right

    def diagonal(self) -> int:
        """The key that row 0 stands on."""
        return self.keys - self.rows

    def kv_heads(self, cols: slice) -> np.ndarray:
        """(Hq,) KV head of each query head."""
        return np.arange(self.heads) // self.group

    def sink(self) -> np.ndarray | None:
        """(Hq, 1) logits, or None."""
        sink = self.options.learnable_sink
        return None if sink is None else np.asarray(sink)[:, None].astype(self.work)

    def operand(self, x: np.ndarray) -> np.ndarray:
        """An input as the matrix unit reads it."""
        return x.astype(self.work)

    def tiles(self) -> list[slice]:
        """The tiles with a key inside the band of any row."""
        left, right = self.sides()
        first = 0 if left is None else self.diagonal() - left
        last = self.keys - 1 if right is None else self.diagonal() + self.rows - 1 + right
        starts = range(0, self.keys, self.tile)
        spans = [slice(start, min(start + self.tile, self.keys)) for start in starts]
        return [span for span in spans if span.stop > first and span.start <= last]

    def splits(self) -> list[list[slice]]:
        """The tiles of each split."""
        tiles, count = self.tiles(), max(1, self.options.num_splits)
        each = max(1, -(-len(tiles) // count))
        return [tiles[i : i + each] for i in range(0, len(tiles), each)]

    def grid(self, cols: slice) -> tuple[Any, ...]:
        """(batch, head, row, key, lengths) as callbacks take them."""
        heads, rows = np.arange(self.heads)[:, None, None], np.arange(self.rows)[None, :, None]
        keys = np.arange(cols.start, cols.stop)[None, None, :]
        return self.place.batch, heads, rows, keys, Lengths(self.rows, self.keys)

    def mask_grid(self, cols: slice) -> tuple[Any, ...]:
        """As mask_mod takes it."""
        return self.grid(cols)

    def score_grid(self, cols: slice) -> tuple[Any, ...]:
        """As score_mod takes it."""
        return self.grid(cols)

    def dropout_grid(self, cols: slice) -> tuple[Any, ...]:
        """As dropout's generator takes it."""
        return self.grid(cols)

    def distance(self, cols: slice) -> np.ndarray:
        """(Sq, keys) keys past the diagonal."""
        keys, rows = np.arange(cols.start, cols.stop), np.arange(self.rows)
        return keys - rows[:, None] - self.diagonal()

    def band(self, cols: slice) -> np.ndarray:
        """(1, Sq, keys) bool: inside the window?"""
        distance = self.distance(cols)
        left, right = self.sides()
        inside = np.ones(distance.shape, bool)
        if left is not None:
            inside &= distance >= -left
        if right is not None:
            inside &= distance <= right
        return inside[None]

    def chosen(self, cols: slice) -> np.ndarray:
        """(Hq or 1, Sq, keys) bool: taken by mask_mod and the block lists?"""
        every = np.ones((1, self.rows, cols.stop - cols.start), bool)
        mask_mod, sparse = self.options.mask_mod, self.options.block_sparse_tensors
        if mask_mod is not None:
            taken = np.asarray(mask_mod(*self.mask_grid(cols), self.options.aux_tensors), bool)
            every = every & taken
        if sparse is None:
            return every
        partial = self.listed(sparse.mask_block_cnt, sparse.mask_block_idx, cols)
        full = self.listed(sparse.full_block_cnt, sparse.full_block_idx, cols)
        return full | (partial & every)

    def listed(self, counts: Any, indices: Any, cols: slice) -> np.ndarray:
        """(Hq, Sq, keys) bool: in a listed block?"""
        block_rows, block_keys = self.options.block_sparse_tensors.block_size
        member = np.zeros((self.heads, self.rows, cols.stop - cols.start), bool)
        if counts is None:
            return member
        row_blocks = np.arange(self.rows) // block_rows
        key_blocks = np.arange(cols.start, cols.stop) // block_keys
        b = self.place.batch % counts.shape[0]
        for head in range(self.heads):
            h = head % counts.shape[1]
            used = np.arange(indices.shape[-1]) < counts[b, h][:, None]
            table = np.where(used, indices[b, h], -1)[row_blocks]
            member[head] = (table[:, :, None] == key_blocks).any(axis=1)
        return member

    def keep(self, cols: slice) -> np.ndarray:
        """(Hq or 1, Sq, keys) bool: visible?"""
        return self.band(cols) & self.chosen(cols)

    def keys_and_values(self, cols: slice, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K and V (Hq, keys, D) of a tile; what no row sees counts as 0, whatever it holds."""
        heads = self.kv_heads(cols)
        seen = keep.any(axis=1)[..., None]
        k, v = (self.operand(x[heads, cols]) for x in (self.k, self.v))
        zero = self.work.type(0)
        return np.where(seen, k, zero), np.where(seen, v * self.value_factor(cols), zero)

    def exp(self, x: np.ndarray) -> np.ndarray:
        """The exponential of scores below their maximum."""
        return np.exp(x)

    def tanh(self, x: np.ndarray) -> np.ndarray:
        """Of softcap."""
        return np.tanh(x)

    def products(self, k: np.ndarray) -> np.ndarray:
        """Q K^T."""
        return self.wide_q @ k.transpose(0, 2, 1)

    def scaled(self, k: np.ndarray) -> np.ndarray:
        """scale Q K^T."""
        return self.products(k) * self.work.type(self.scale())

    def bent(self, scaled: np.ndarray, cols: slice) -> np.ndarray:
        """Softcap, score_mod."""
        cap, score_mod = self.softcap(), self.score_mod()
        if cap:
            scaled = self.tanh(scaled / self.work.type(cap)) * self.work.type(cap)
        if score_mod is not None:
            scaled = score_mod(scaled, *self.score_grid(cols), self.options.aux_tensors)
        return np.asarray(scaled, self.work)

    def scores(self, k: np.ndarray, keep: np.ndarray, cols: slice) -> np.ndarray:
        """What the softmax sees: -inf where masked."""
        return np.where(
            keep, self.bent(self.scaled(k) * self.score_factor(cols), cols), self.work.type(-np.inf)
        )

    def dropout(self, cols: slice) -> np.ndarray:
        """Factor of each probability; () if nothing is dropped."""
        if not self.options.dropout_p:
            return np.ones((), self.work)
        batch, heads, rows, keys, _ = self.dropout_grid(cols)
        indices = heads.ravel(), rows.ravel(), keys.ravel()
        chance, seed = self.options.dropout_p, self.options.dropout_seed
        return keep_factors(chance, seed, batch, indices).astype(self.work)

    def rounded_p(self, p: np.ndarray) -> np.ndarray:
        """P as the second product reads it."""
        if not self.is_fp8:
            return p.astype(self.dtype).astype(self.work)
        factor = self.work.type(2.0 ** self.p_offset_log2())
        most = self.work.type(ml_dtypes.finfo(self.dtype).max)
        return np.minimum(p * factor, most).astype(self.dtype).astype(self.work) / factor

    def weights(self, p: np.ndarray, cols: slice) -> np.ndarray:
        """P as V sees it. Dropout's factor comes behind the rounding: 2^8 / (1 - p) saturates."""
        return self.rounded_p(p) * self.dropout(cols)

    def rounded_out(self, out: np.ndarray) -> np.ndarray:
        """O in the element type, or bf16."""
        return out.astype(ml_dtypes.bfloat16 if self.is_fp8 else self.dtype)

    def new_top(self, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
        """The maximum with those of a tile."""
        return np.maximum(top, scores.max(axis=-1))

    def row_sum(self, p: np.ndarray, total: np.ndarray) -> np.ndarray:
        """The sum of exponentials with those of a tile."""
        return total + p.sum(axis=-1)

    def accumulate(self, out: np.ndarray, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
        """O + P V."""
        return out + weights @ v

    def rescale(self, out: np.ndarray, alpha: np.ndarray, cols: slice) -> np.ndarray:
        """O under the new maximum."""
        return out * alpha[..., None]

    def step(self, state: State, cols: slice) -> State:
        """One tile of keys."""
        keep = self.keep(cols)
        k, v = self.keys_and_values(cols, keep)
        scores = self.scores(k, keep, cols)
        top = self.new_top(state.top, scores, cols)
        alpha = np.exp(state.top - finite(top))
        p = self.exp(scores - finite(top)[..., None])
        total = self.row_sum(p, state.total * alpha)
        weights = self.weights(p, cols)
        return State(top, total, self.accumulate(self.rescale(state.out, alpha, cols), weights, v))

    def start(self) -> State:
        """No tile yet."""
        top = np.full((self.heads, self.rows), -np.inf, self.work)
        return State(top, np.zeros_like(top), np.zeros((*top.shape, self.dim_v), self.work))

    def part(self, tiles: list[slice]) -> State:
        """One split."""
        state = self.start()
        for cols in tiles:
            state = self.step(state, cols)
        return state

    def merge(self, first: State, second: State) -> State:
        """Two splits as one."""
        top = np.maximum(first.top, second.top)
        a, b = (np.exp(part.top - finite(top)) for part in (first, second))
        out = first.out * a[..., None] + second.out * b[..., None]
        return State(top, first.total * a + second.total * b, out)

    def add_sink(self, state: State) -> State:
        """The sink takes probability and has no value."""
        sink = self.sink()
        if sink is None:
            return state
        top = np.maximum(state.top, sink)
        alpha = np.exp(state.top - finite(top))
        total = state.total * alpha + np.exp(sink - finite(top))
        return State(top, total, state.out * alpha[..., None])

    def lse(self, state: State) -> np.ndarray:
        """(Hq, Sq), natural logarithm; -inf for rows without a key."""
        with np.errstate(divide="ignore"):
            return finite(state.top) + np.log(state.total)

    def normalised(self, state: State) -> np.ndarray:
        """O; 0 for rows without a key."""
        return state.out / np.where(state.total == 0, 1, state.total)[..., None]

    def combined(self) -> State:
        """All splits, and the sink."""
        state = self.start()
        for tiles in self.splits():
            state = self.merge(state, self.part(tiles))
        return self.add_sink(state)

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """O (Sq, Hq, dv) in the element type and LSE (Hq, Sq) in the work type."""
        state = self.combined()
        return self.rounded_out(self.normalised(state)).transpose(1, 0, 2), self.lse(state)
