"""From a `Case` to the arrays and keywords of one call, and from its results back to sequences.

`Inputs` is what a back end is called with, in one of four layouts, next to the same problem as a
list of plain sequences, which is what the judge looks at. Results are cut into sequences again, so
that no judge knows of layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fa4.config import ForwardConfig, normalize_window
from fa4.dtypes import dtype_name
from fa4.reference import BlockSparseTensors, SeqlenInfo
from fa4.testing.case import AUX_WIDTH, MASK_MODS, SCORE_MODS, Case
from fa4.testing.numerics import SCALE_BLOCK


class SequenceInputs(NamedTuple):
    """One batch entry: q (Sq, Hq, d), k (Sk, Hk, d), v (Sk, Hk, dv), dout (Sq, Hq, dv), dlse."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray  # (Hq, Sq)
    visible: np.ndarray  # (Hq, Sq, Sk) bool


@dataclass(frozen=True)
class Inputs:
    """q, k, v, dout, dlse in the layout of the call; `options` are its keywords.

    Options with FlashAttention's defaults are left out. `hints` are keywords that only some back
    ends name (max_seqlen_*). Row b of the index lists says where sequence b lies:
    `q[q_index[b]]` is (Sq, Hq, d), `k[kv_index[b]]` is (Sk, Hk, d). shared: sequences whose first
    keys, so many, are the same memory; their dK and dV add up.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    options: dict[str, Any]
    sequences: tuple[SequenceInputs, ...]
    q_index: tuple[tuple[Any, ...], ...]
    kv_index: tuple[tuple[Any, ...], ...]
    hints: dict[str, Any]
    shared: tuple[tuple[int, ...], int] = ((), 0)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return dtype_name(self.q.dtype)

    @property
    def is_varlen(self) -> bool:
        """Does the call need the variable-length interface?"""
        return any(name.startswith(("cu_seqlens", "seqused", "page")) for name in self.options)

    def split_rows(self, x: np.ndarray) -> list[np.ndarray]:
        """(Sq, Hq, D) of each sequence from an array in the layout of q."""
        return [x[index] for index in self.q_index]

    def split_keys(self, x: np.ndarray) -> list[np.ndarray]:
        """(Sk, Hk, D) of each sequence from an array in the layout of k."""
        return [x[index] for index in self.kv_index]

    def unused(self, x: np.ndarray, *, rows: bool) -> np.ndarray:
        """(n, H, D) of what no sequence uses, from an array in the layout of q, or of k."""
        if not self.is_varlen:
            return x[:0].reshape(0, *x.shape[-2:])
        free = np.ones(x.shape[:-2], bool)
        for index in self.q_index if rows else self.kv_index:
            free[index] = False
        return x[free]

    def split_lse(self, x: np.ndarray) -> list[np.ndarray]:
        """(Hq, Sq) of each sequence from (B, Hq, S) or (Hq, total)."""
        rows_first = np.moveaxis(x, -2, -1)  # (B, S, Hq) or (total, Hq)
        return [rows_first[index].T for index in self.q_index]


def visible_pairs(
    options: dict[str, Any], batch: int, heads_q: int, lengths: tuple[int, int]
) -> np.ndarray:
    """(Hq, Sq, Sk) bool: may row i of head h see key j? Bottom-right aligned.

    Written apart from the oracle's own mask, so that each checks the other.
    """
    rows, keys = lengths
    head = np.arange(heads_q)[:, None, None]
    row, key = np.arange(rows)[None, :, None], np.arange(keys)[None, None, :]
    window = options.get("window_size", (None, None))
    left, right = normalize_window(window, options.get("causal", False))
    distance = key - row - (keys - rows)  # 0 on the diagonal that ends in the last corner
    band = np.ones((heads_q, rows, keys), bool)
    if left is not None:
        band &= distance >= -left
    if right is not None:
        band &= distance <= right
    chosen = np.ones_like(band)
    if options.get("mask_mod") is not None:
        info, aux = SeqlenInfo(rows, keys), options.get("aux_tensors")
        chosen &= np.asarray(options["mask_mod"](batch, head, row, key, info, aux), bool)
    sparse = options.get("block_sparse_tensors")
    if sparse is None:
        return band & chosen
    listed = {"mask": np.zeros_like(band), "full": np.zeros_like(band)}
    block_rows, block_keys = sparse.block_size
    for kind, member in listed.items():
        for h, m, n in _listed_blocks(sparse, kind, batch, heads_q):
            block = member[h, m * block_rows : (m + 1) * block_rows]
            block[:, n * block_keys : (n + 1) * block_keys] = True
    return band & (listed["full"] | (listed["mask"] & chosen))


def _listed_blocks(
    sparse: Any, kind: str, batch: int, heads_q: int
) -> Iterator[tuple[int, int, int]]:
    """(head, row block, key block) of every entry of the "mask" or "full" lists."""
    counts, indices = getattr(sparse, f"{kind}_block_cnt"), getattr(sparse, f"{kind}_block_idx")
    if counts is None:
        return
    b = batch if counts.shape[0] > 1 else 0
    for head in range(heads_q):
        h = head if counts.shape[1] > 1 else 0
        for m in range(counts.shape[2]):
            for n in indices[b, h, m, : counts[b, h, m]]:
                yield head, m, int(n)


def of_rows(table: np.ndarray, count: int) -> np.ndarray:
    """(heads, count) factors of rows or keys from those of blocks, (heads, blocks)."""
    return np.repeat(table, SCALE_BLOCK, axis=-1)[..., :count]


def draw_scales(case: Case) -> dict[str, np.ndarray]:
    """q_descale, k_descale and v_descale, those that the case has: (B, Hk), of blocks (B, Hk, n).

    Within a factor of two of 1. All the same where the scale is the tensor's.
    """
    rng = np.random.default_rng([case.seed, 3])
    found: dict[str, np.ndarray] = {}
    for letter, side in (("q", 0), ("k", 1), ("v", 1)):
        shape: tuple[int, ...] = (len(case.sequences), case.heads_k)
        if case.scales == "block":
            longest = max((lengths[side] for lengths in case.sequences), default=0)
            shape += (max(1, -(-longest // SCALE_BLOCK)),)
        table = rng.uniform(0.5, 2.0, shape).astype(np.float32)
        if case.scales == "tensor":
            table[...] = table.flat[0] if table.size else 1.0
        if case.descale is True or letter in str(case.descale):
            found[f"{letter}_descale"] = table
    return found


def draw_sparsity(case: Case) -> BlockSparseTensors:
    """Block lists drawn from the seed; about a third of the row blocks visits nothing.

    Lists of one batch entry and head stand for all of them if they are broadcast.
    """
    assert case.sparse_block is not None
    rng = np.random.default_rng([case.seed, 2])
    blocks_q = -(-case.seqlen_q // case.sparse_block[0])
    blocks_k = max(1, -(-case.seqlen_k // case.sparse_block[1]))  # a list has room for one
    lists_of = (1, 1) if case.sparse_lists == "broadcast" else (case.batch, case.heads_q)
    states = rng.integers(0, 3, (*lists_of, blocks_q, blocks_k))
    states[rng.random(states.shape[:3]) < 0.3] = 0
    if case.sparse_lists == "empty" or not case.seqlen_k:
        states[...] = 0
    lists: list[np.ndarray] = []
    for state in (1, 2):
        listed = states == state
        lists.append(listed.sum(axis=-1, dtype=np.int32))
        # Listed blocks first, ascending; what follows must not be read.
        lists.append(np.argsort(~listed, axis=-1, kind="stable").astype(np.int32))
    mask_count, mask_index, full_count, full_index = lists
    return BlockSparseTensors(mask_count, mask_index, full_count, full_index, case.sparse_block)


def sink_values(case: Case) -> np.ndarray:
    """(Hq,) float32 logits: sink + h/4."""
    assert case.sink is not None
    return (case.sink + 0.25 * np.arange(case.heads_q)).astype(np.float32)


def draw_aux(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """aux_tensors of the mods that read them: float32 biases, int32 flags; (B, Hq, AUX_WIDTH)."""
    rng = np.random.default_rng([case.seed, 7])
    shape = (len(case.sequences), case.heads_q, AUX_WIDTH)
    return rng.standard_normal(shape).astype(np.float32), rng.integers(0, 2, shape, np.int32)


def build_options(case: Case) -> dict[str, Any]:
    """Keywords of the call, without those of the layout and without defaults."""
    options: dict[str, Any] = {}
    for name in ("causal", "softcap", "dropout_p"):
        if getattr(case, name):
            options[name] = getattr(case, name)
    if case.dropout_p:
        options["dropout_seed"] = case.seed
    if case.window_size != (None, None):
        options["window_size"] = case.window_size
    if case.softmax_scale is not None:
        options["softmax_scale"] = case.softmax_scale
    if case.num_splits != 1:
        options["num_splits"] = case.num_splits
    if case.sink is not None:
        options["learnable_sink"] = sink_values(case)
    if case.score_mod is not None:
        options["score_mod"] = SCORE_MODS[case.score_mod][0]
    if case.mask_mod is not None:
        options["mask_mod"] = MASK_MODS[case.mask_mod]
    if case.reads_aux:
        options["aux_tensors"] = draw_aux(case)
    if case.sparse_block is not None:
        options["block_sparse_tensors"] = draw_sparsity(case)
    if case.descale:
        options |= draw_scales(case)
    if case.tiles is not None or case.tau is not None:
        options["config"] = _build_config(case)
    return options


def _build_config(case: Case) -> ForwardConfig:
    right = normalize_window(case.window_size, case.causal)[1]
    config = ForwardConfig.tuned(case.dtype, case.head_dim, right == 0)
    if case.tiles is not None:
        tile_m, tile_n, q_tiles = case.tiles
        config = replace(config, tile_m=tile_m, tile_n=tile_n, q_tiles=q_tiles)
    return config if case.tau is None else replace(config, rescale_threshold_log2=case.tau)


def dense_inputs(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, seed: int = 0, **options: Any
) -> Inputs:
    """`Inputs` of your own dense arrays (B, S, H, D) and keywords; dout is drawn from the seed."""
    rng = np.random.default_rng(seed)
    batch, rows, heads_q, _ = q.shape
    dout = rng.standard_normal((batch, rows, heads_q, v.shape[-1])).astype(q.dtype)
    dlse = rng.standard_normal((batch, heads_q, rows)).astype(np.float32)
    index = tuple((b,) for b in range(batch))
    sequences = tuple(
        SequenceInputs(
            q[b], k[b], v[b], dout[b], dlse[b],
            visible_pairs(options, b, heads_q, (rows, k.shape[1])),
        )
        for b in range(batch)
    )  # fmt: skip
    return Inputs(q, k, v, dout, dlse, dict(options), sequences, index, index, {})
