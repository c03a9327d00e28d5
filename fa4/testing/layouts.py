"""The arrays of a `Case`: dense, packed, padded or paged, and strided views of them.

What no sequence uses holds large numbers, NaN where the regime is "masked_nan", and unused entries
of a page table point out of range, so that a function that reads them shows it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fa4.dtypes import numpy_dtype
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs, SequenceInputs, build_options, visible_pairs
from fa4.testing.values import draw_upstream, draw_values, poison


def build_inputs(case: Case) -> Inputs:
    """The arrays and keywords of a case; the same case always gives the same ones."""
    options = build_options(case)
    sequences = []
    for b, lengths in enumerate(case.sequences):
        q, k, v = draw_values(case, b)
        dout, dlse = draw_upstream(case, b)
        visible = visible_pairs(options, b, case.heads_q, lengths)
        if case.values == "masked_nan":
            grouped = visible.reshape(case.heads_k, case.group, *visible.shape[1:])
            poison(k, v, np.logical_not(grouped.any(axis=(1, 2))).T)
        sequences.append(SequenceInputs(q, k, v, dout, dlse, visible))
    pack = {"dense": _dense, "packed": _packed, "padded": _padded, "paged": _paged}[case.layout]
    inputs = pack(case, tuple(sequences))
    inputs.options.update(options)
    if case.strided:
        q, k, v = _fused_views(case, inputs)
        inputs = replace(inputs, q=q, k=k, v=v)
    return inputs


def _unused(case: Case, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array as memory that no sequence uses may look: finite but wrong, or NaN."""
    return np.full(shape, np.nan if case.values == "masked_nan" else 96.0, dtype)


def _stack(arrays: list[np.ndarray], empty: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.stack(arrays) if arrays else np.zeros((0, *empty), dtype)


def _dense(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """(B, S, H, D)."""
    dtype = numpy_dtype(case.dtype)
    d, dv = case.head_dim, case.head_dim_v
    shapes = {
        "q": (case.seqlen_q, case.heads_q, d),
        "k": (case.seqlen_k, case.heads_k, d),
        "v": (case.seqlen_k, case.heads_k, dv),
        "dout": (case.seqlen_q, case.heads_q, dv),
    }
    arrays = {
        name: _stack([getattr(seq, name) for seq in sequences], shape, dtype)
        for name, shape in shapes.items()
    }
    dlse = _stack(
        [seq.dlse for seq in sequences], (case.heads_q, case.seqlen_q), np.dtype(np.float32)
    )
    index = tuple((b,) for b in range(case.batch))
    return Inputs(
        **arrays, dlse=dlse, options={}, sequences=sequences,
        q_index=index, kv_index=index, hints={},
    )  # fmt: skip


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _slices(offsets: np.ndarray) -> tuple[tuple[slice], ...]:
    return tuple((slice(int(start), int(stop)),) for start, stop in pairwise(offsets))


def _pack_queries(case: Case, sequences: tuple[SequenceInputs, ...]) -> dict[str, Any]:
    """q, dout (total, H, D), dlse (Hq, total), their index, cu_seqlens_q and its hint."""
    rows = [seq.q.shape[0] for seq in sequences]
    offsets = _offsets(rows)
    return {
        "q": np.concatenate([seq.q for seq in sequences]),
        "dout": np.concatenate([seq.dout for seq in sequences]),
        "dlse": np.concatenate([seq.dlse for seq in sequences], axis=1),
        "q_index": _slices(offsets),
        "options": {"cu_seqlens_q": offsets},
        "hints": {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys for _, keys in case.lengths)},
    }


def _packed(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """(total, H, D) with cu_seqlens_q and cu_seqlens_k."""
    fields = _pack_queries(case, sequences)
    offsets = _offsets([keys for _, keys in case.lengths])
    fields["options"]["cu_seqlens_k"] = offsets
    return Inputs(
        k=np.concatenate([seq.k for seq in sequences]),
        v=np.concatenate([seq.v for seq in sequences]),
        kv_index=_slices(offsets),
        sequences=sequences,
        **fields,
    )


def _padded(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """(B, longest + 3, H, D) with seqused_q and seqused_k."""
    used = np.array(case.lengths, np.int32).reshape(-1, 2)
    longest = used.max(axis=0) + 3
    q_index = tuple((b, slice(0, int(n))) for b, n in enumerate(used[:, 0]))
    kv_index = tuple((b, slice(0, int(n))) for b, n in enumerate(used[:, 1]))
    arrays = {}
    for name, side, index in (("q", 0, q_index), ("dout", 0, q_index),
                              ("k", 1, kv_index), ("v", 1, kv_index)):  # fmt: skip
        rows = [getattr(seq, name) for seq in sequences]
        shape = (len(rows), longest[side], *rows[0].shape[1:])
        arrays[name] = _unused(case, shape, rows[0].dtype)
        for where, row in zip(index, rows, strict=True):
            arrays[name][where] = row
    dlse = np.zeros((len(sequences), case.heads_q, longest[0]), np.float32)
    for (b, span), seq in zip(q_index, sequences, strict=True):
        dlse[b, :, span] = seq.dlse
    options = {"seqused_q": used[:, 0].copy(), "seqused_k": used[:, 1].copy()}
    return Inputs(
        **arrays, dlse=dlse, options=options, sequences=sequences,
        q_index=q_index, kv_index=kv_index, hints={},
    )  # fmt: skip


def _paged(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """Packed q; K and V in shuffled pages.

    Unused entries of the page table point far outside; one page in three belongs to nobody.
    """
    size = case.page_size
    needed = [-(-keys // size) for _, keys in case.lengths]
    rng = np.random.default_rng([case.seed, 4])
    pages = sum(needed) + max(1, sum(needed) // 2)
    order = rng.permutation(pages)
    dtype = sequences[0].k.dtype
    k = _unused(case, (pages, size, case.heads_k, case.head_dim), dtype)
    v = _unused(case, (pages, size, case.heads_k, case.head_dim_v), dtype)
    table = np.full((len(sequences), max(needed) + 2), 2**30, np.int32)
    table[:, -1] = -1
    kv_index = []
    taken = _offsets(needed)
    for b, seq in enumerate(sequences):
        table[b, : needed[b]] = order[taken[b] : taken[b + 1]]
        keys = np.arange(seq.k.shape[0])
        kv_index.append((table[b][keys // size], keys % size))
        k[kv_index[b]], v[kv_index[b]] = seq.k, seq.v
    fields = _pack_queries(case, sequences)
    fields["options"]["page_table"] = table
    fields["options"]["seqused_k"] = np.array([keys for _, keys in case.lengths], np.int32)
    return Inputs(k=k, v=v, kv_index=tuple(kv_index), sequences=sequences, **fields)


def _fused_views(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v as views: k and v of one buffer fused along the heads, q with a padded last axis."""
    *rows, heads, dim = inputs.k.shape
    width = max(dim, inputs.v.shape[-1]) + case.strided
    fused = np.full((*rows, 2 * heads, width), np.nan, inputs.k.dtype)
    fused[..., :heads, :dim] = inputs.k
    fused[..., heads:, : inputs.v.shape[-1]] = inputs.v
    padded = np.full((*inputs.q.shape[:-1], dim + case.strided), np.nan, inputs.q.dtype)
    padded[..., :dim] = inputs.q
    k, v = fused[..., :heads, :dim], fused[..., heads:, : inputs.v.shape[-1]]
    return padded[..., :dim], k, v
