"""The arrays of a `Case`: dense, packed, padded or paged; `fa4.testing.views` has their strides.

What no sequence uses holds large numbers, NaN where the regime is "masked_nan", and unused entries
of a page table point out of range, so that a function that reads them shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fa4.dtypes import numpy_dtype
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs, SequenceInputs, build_options, visible_pairs
from fa4.testing.values import draw_upstream, draw_values, poison
from fa4.testing.views import with_strides

_BUFFER_ROWS, _BUFFER_KEYS = 5, 9  # of slack "buffer", behind the last sequence
_MAX_SEQLEN_ABOVE = 70  # of slack "max_seqlen": more than half a tile


def build_inputs(case: Case) -> Inputs:
    """The arrays and keywords of a case; the same case always gives the same ones."""
    options = build_options(case)
    values = [draw_values(case, b) for b in range(len(case.sequences))]
    visible = [visible_pairs(options, b, case.heads_q, x) for b, x in enumerate(case.sequences)]
    shared = shared_prefix(case)
    _share_values(values, *shared)
    if case.values == "masked_nan":
        for (_, k, v), unseen in zip(values, _unseen_keys(case, visible, *shared), strict=True):
            poison(k, v, unseen)
    sequences = [
        SequenceInputs(*values[b], *draw_upstream(case, b), visible[b]) for b in range(len(values))
    ]
    pack = {"dense": _dense, "packed": _packed, "padded": _padded, "paged": _paged}[case.layout]
    inputs = pack(case, tuple(sequences))
    inputs.options.update(options)
    return with_strides(case, replace(inputs, shared=shared))


def shared_prefix(case: Case) -> tuple[tuple[int, ...], int]:
    """(sequences, keys) that lie in the same pages: the whole pages of all but the longest."""
    lengths = sorted(keys for _, keys in case.sequences)
    if not case.shared_prefix or len(lengths) < 2 or lengths[-2] < case.page_size:
        return (), 0
    count = lengths[-2] // case.page_size * case.page_size
    return tuple(b for b, (_, keys) in enumerate(case.sequences) if keys >= count), count


def _unseen_keys(
    case: Case, visible: list[np.ndarray], members: tuple[int, ...], count: int
) -> list[np.ndarray]:
    """(Sk, Hk) of each sequence: keys that no row sees, nor any through the same memory."""
    heads = (case.heads_k, case.group)
    seen = [np.any(x.reshape(*heads, *x.shape[1:]), axis=(1, 2)) for x in visible]
    if case.strides == "expanded_kv":
        seen = [x | np.any(x, axis=0) for x in seen]
    for b in members[1:]:
        seen[members[0]][:, :count] |= seen[b][:, :count]
    for b in members[1:]:
        seen[b][:, :count] = seen[members[0]][:, :count]
    return [np.logical_not(x).T for x in seen]


def _share_values(values: list[Any], members: tuple[int, ...], count: int) -> None:
    """The first keys and values of all members become those of the first, in place."""
    for b in members[1:]:
        for mine, common in zip(values[b][1:], values[members[0]][1:], strict=True):
            mine[:count] = common[:count]


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
    arrays: dict[str, Any] = {
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


def _spans(case: Case, lengths: list[int]) -> tuple[np.ndarray, tuple[tuple[slice], ...]]:
    """cu_seqlens, with room behind each sequence for slack "seqused", and where each lies."""
    room = [1 + b % 3 if case.slack == "seqused" else 0 for b in range(len(lengths))]
    offsets = _offsets([length + more for length, more in zip(lengths, room, strict=True)])
    starts = offsets[:-1].tolist()
    return offsets, tuple(
        (slice(start, start + length),) for start, length in zip(starts, lengths, strict=True)
    )


def _scatter(
    case: Case, arrays: list[np.ndarray], spans: tuple[tuple[slice], ...], total: int
) -> np.ndarray:
    """(total, H, D) with each sequence in its place."""
    packed = _unused(case, (total, *arrays[0].shape[1:]), arrays[0].dtype)
    for (span,), rows in zip(spans, arrays, strict=True):
        packed[span] = rows
    return packed


def _pack_queries(case: Case, sequences: tuple[SequenceInputs, ...]) -> dict[str, Any]:
    """q, dout (total, H, D), dlse (Hq, total), their index, cu_seqlens_q and its hint."""
    rows = [seq.q.shape[0] for seq in sequences]
    offsets, spans = _spans(case, rows)
    total = int(offsets[-1]) + (_BUFFER_ROWS if case.slack == "buffer" else 0)
    dlse = np.zeros((case.heads_q, total), np.float32)
    for (span,), seq in zip(spans, sequences, strict=True):
        dlse[:, span] = seq.dlse
    above = _MAX_SEQLEN_ABOVE if case.slack == "max_seqlen" else 0
    keys = _spans(case, [keys for _, keys in case.lengths])[0]
    longest = [max(1, int(np.diff(x).max())) for x in (offsets, keys)]
    options: dict[str, Any] = {"cu_seqlens_q": offsets}
    if case.slack == "seqused":
        options["seqused_q"] = np.array(rows, np.int32)
    return {
        "q": _scatter(case, [seq.q for seq in sequences], spans, total),
        "dout": _scatter(case, [seq.dout for seq in sequences], spans, total),
        "dlse": dlse,
        "q_index": spans,
        "options": options,
        "hints": {"max_seqlen_q": longest[0] + above, "max_seqlen_k": longest[1] + above},
    }


def _packed(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """(total, H, D) with cu_seqlens_q and cu_seqlens_k."""
    fields = _pack_queries(case, sequences)
    keys = [keys for _, keys in case.lengths]
    offsets, spans = _spans(case, keys)
    total = int(offsets[-1]) + (_BUFFER_KEYS if case.slack == "buffer" else 0)
    fields["options"]["cu_seqlens_k"] = offsets
    if case.slack == "seqused":
        fields["options"]["seqused_k"] = np.array(keys, np.int32)
    return Inputs(
        k=_scatter(case, [seq.k for seq in sequences], spans, total),
        v=_scatter(case, [seq.v for seq in sequences], spans, total),
        kv_index=spans,
        sequences=sequences,
        **fields,
    )


def _padded(case: Case, sequences: tuple[SequenceInputs, ...]) -> Inputs:
    """(B, longest + 3, H, D) with seqused_q and seqused_k."""
    used = np.array(case.lengths, np.int32).reshape(-1, 2)
    longest = used.max(axis=0) + 3
    q_index = tuple((b, slice(0, int(n))) for b, n in enumerate(used[:, 0]))
    kv_index = tuple((b, slice(0, int(n))) for b, n in enumerate(used[:, 1]))
    arrays: dict[str, Any] = {}
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
    """Packed q; K and V in shuffled pages, those of a shared prefix once.

    Unused entries of the page table point far outside; at least one page in three belongs to
    nobody.
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
    members, common = shared_prefix(case)
    for b, seq in enumerate(sequences):
        table[b, : needed[b]] = order[taken[b] : taken[b + 1]]
        if b in members:
            table[b, : common // size] = table[members[0], : common // size]
        keys = np.arange(seq.k.shape[0])
        kv_index.append((table[b][keys // size], keys % size))
        k[kv_index[b]], v[kv_index[b]] = seq.k, seq.v
    fields = _pack_queries(case, sequences)
    fields["options"]["page_table"] = table
    fields["options"]["seqused_k"] = np.array([keys for _, keys in case.lengths], np.int32)
    return Inputs(k=k, v=v, kv_index=tuple(kv_index), sequences=sequences, **fields)
