"""One attention problem as a small frozen value: what a strategy draws and a failure prints.

A `Case` holds sizes, features and the name of a value regime with its seed, never an array;
`fa4.testing.inputs.build_inputs(case)` makes the arrays, always the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fa4.config import Window, normalize_window, require, require_int
from fa4.dtypes import numpy_dtype

LAYOUTS = ("dense", "packed", "padded", "paged")
STRIDES = ("", "fused", "heads_first", "expanded_kv", "expanded_dout", "latent")
SLACKS = ("", "buffer", "max_seqlen", "seqused")
SCALES = ("head", "tensor", "block")
BLOCK_LISTS = ("own", "broadcast", "empty")
AUX_WIDTH = 13  # entries of a table in aux_tensors; a prime, so that it lines up with no tile


def _alibi(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """A linear bias by distance, steeper for each further head."""
    distance = j - i - (info.seqlen_k - info.seqlen_q)
    return score - 0.125 * (h + 1) * abs(distance)


def _alibi_bwd(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return grad


def _temper(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """A factor that depends on the head, the batch entry and the parity of the key."""
    return score * (0.5 + 0.25 * ((h + b + j) % 3))


def _temper_bwd(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return grad * (0.5 + 0.25 * ((h + b + j) % 3))


def _forbid(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """-inf where (i + j) % 3 == 0, and for every key of each fifth row."""
    return np.where(((i + j) % 3 == 0) | (i % 5 == 4), -np.inf, score)


def _forbid_bwd(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return np.where(((i + j) % 3 == 0) | (i % 5 == 4), 0.0, grad)


def _table(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """A bias by batch entry, head and key from aux_tensors[0], (B, Hq, AUX_WIDTH)."""
    return score + aux[0][b, h, (i + j) % AUX_WIDTH]


SCORE_MODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "alibi": (_alibi, _alibi_bwd),
    "temper": (_temper, _temper_bwd),
    "forbid": (_forbid, _forbid_bwd),
    "table": (_table, _alibi_bwd),
}


def _stripes(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Two of three keys, shifted by row, head and batch entry."""
    return (i + j + h + b) % 3 != 0


def _documents(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Only keys of the same block of 37, and none after the row."""
    return (i // 37 == j // 37) & (j <= i)


def _odd_rows_empty(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Even rows see even keys, odd rows nothing."""
    return (i % 2 == 0) & (j % 2 == 0)


def _far_keys(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Nothing but the first seven keys, so that whole tiles are empty."""
    return (j < 7) & (i + h >= 0)


def _listed(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Keys that aux_tensors[1], (B, Hq, AUX_WIDTH), lists for a batch entry and head."""
    return aux[1][b, h, (2 * i + j) % AUX_WIDTH] != 0


MASK_MODS: dict[str, Callable[..., Any]] = {
    "stripes": _stripes,
    "documents": _documents,
    "odd_rows_empty": _odd_rows_empty,
    "first_keys": _far_keys,
    "listed": _listed,
}
READ_AUX = frozenset({"table", "listed"})  # mods that read aux_tensors
_NAMES = {"layout": LAYOUTS, "strides": STRIDES, "slack": SLACKS, "sparse_lists": BLOCK_LISTS,
          "scales": SCALES}  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One problem. Its repr is the shortest constructor expression that rebuilds it.

    Query heads: heads_k * group. softmax_scale None is 1/sqrt(head_dim). sink: logit of head 0;
    head h has sink + h/4. score_mod, mask_mod: names in SCORE_MODS, MASK_MODS. sparse_block: (rows,
    keys) of a block of a dense problem; which are skipped, partial or full follows from the seed.
    tiles: (tile_m, tile_n, q_tiles) and tau: rescale threshold, for back ends that take `config`.
    descale: True for factors of FP8 q, k and v, or the letters of those that have one, as "kv";
    scales: what each belongs to, a "head" of a batch entry, the "tensor", or a "block" of rows.
    sparse_lists: block lists of each batch entry and head, one for all ("broadcast"), or nothing
    listed ("empty"). strided: elements by which the rows of q, k and v are longer in their buffers.
    strides: q, k and v as parts of one buffer ("fused"), as (B, H, S, D) in memory ("heads_first"),
    K and V, or dO, with a stride of 0: one KV head for all ("expanded_kv"), all ones as `.sum()`
    gives it ("expanded_dout"), v a view of k's first channels ("latent").
    layout "packed" (cu_seqlens), "padded" (seqused) or "paged" takes `lengths`, (seqlen_q,
    seqlen_k) of each sequence, instead of batch and seqlen_*. slack: rows
    behind the last sequence ("buffer"), max_seqlen_* above the longest ("max_seqlen"), room behind
    each packed sequence ("seqused"). shared_prefix: sequences share their first pages. dlse: the
    gradient of a loss that reads the LSE too.
    """

    batch: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    heads_k: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: str = "fp32"
    values: str = "normal"
    seed: int = 0
    causal: bool = False
    window_size: Window = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    sink: float | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    sparse_block: tuple[int, int] | None = None
    sparse_lists: str = "own"
    dropout_p: float = 0.0
    descale: bool | str = False
    scales: str = "head"
    num_splits: int = 1
    tiles: tuple[int, int, int] | None = None
    tau: float | None = None
    strided: int = 0
    strides: str = ""
    layout: str = "dense"
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = 16
    slack: str = ""
    shared_prefix: bool = False
    dlse: bool = False

    def __post_init__(self) -> None:
        """Check sizes and names; a window that hides every key is refused as `fa4` does."""
        for name in ("batch", "seqlen_q", "seqlen_k"):
            require_int(name, getattr(self, name), 0)
        for name in ("heads_k", "group", "head_dim", "head_dim_v", "num_splits", "page_size"):
            require_int(name, getattr(self, name), 1)
        require_int("seed", self.seed, 0)
        numpy_dtype(self.dtype)
        normalize_window(self.window_size, self.causal)
        for name, names in _NAMES.items():
            value = getattr(self, name)
            require(value in names, f"{name} must be one of {names}", value)
        require(
            self.layout == "dense" or bool(self.lengths),
            f'lengths must be given with layout "{self.layout}"',
            self.lengths,
        )
        for name, layouts in (("slack", ("packed", "paged")), ("shared_prefix", ("paged",))):
            given, fits = getattr(self, name), self.layout in layouts
            require(fits or not given, f"{name} needs a layout of {layouts}", self.layout)
        require(
            not (self.slack == "seqused" and self.layout != "packed"),
            'slack "seqused" needs the layout "packed"',
            self.layout,
        )
        dense = self.layout == "dense" or self.sparse_block is None
        require(dense, 'block lists need the layout "dense"', self.layout)
        if "latent" in (self.strides, self.values):
            what = "head_dim_v must be at most head_dim where v is k's first channels"
            require(self.head_dim_v <= self.head_dim, what, self.head_dim_v)
        letters = self.descale if isinstance(self.descale, str) else ""
        require(set(letters) <= set("qkv"), 'descale must be of letters of "qkv"', letters)
        for name, table in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS)):
            value = getattr(self, name)
            require(value is None or value in table, f"{name} must be one of {list(table)}", value)

    def __repr__(self) -> str:
        """`Case(...)` with the fields that differ from their defaults."""
        shown = [
            f"{field.name}={_literal(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(shown)})"

    @property
    def heads_q(self) -> int:
        """Query heads."""
        return self.heads_k * self.group

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of each batch entry, in any layout."""
        if self.layout == "dense":
            return ((self.seqlen_q, self.seqlen_k),) * self.batch
        return self.lengths

    @property
    def reads_aux(self) -> bool:
        """Does a callback of it read aux_tensors?"""
        return bool(READ_AUX & {self.score_mod, self.mask_mod})

    @property
    def is_varlen(self) -> bool:
        """Does it need the variable-length interface?"""
        return self.layout != "dense"


def _literal(value: Any) -> str:
    """Source text of a field; infinities, which have no literal, as float("...")."""
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return repr(value)
