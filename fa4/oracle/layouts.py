"""Batches in any layout, one sequence at a time: dense, packed, padded, paged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fa4.oracle.definition import OracleGradients, attend, differentiate

Tensors = tuple[np.ndarray, np.ndarray, np.ndarray]


class SequencePlace(NamedTuple):
    """Where a sequence lies: q[rows] is (Sq, Hq, d), k[keys] is (Sk, Hk, d)."""

    rows: tuple[Any, ...]
    keys: tuple[Any, ...]

    @property
    def lse(self) -> tuple[Any, ...]:
        """lse[lse] is (Hq, Sq)."""
        return (*self.rows[:-1], slice(None), self.rows[-1])


def _places(inputs: Tensors, options: Mapping[str, Any]) -> Iterator[SequencePlace]:
    """The place of each batch entry, from cu_seqlens_*, seqused_* and page_table."""
    q, k, _ = inputs
    pages = options.get("page_table")
    starts = options.get("cu_seqlens_q")
    for b in range(q.shape[0] if starts is None else len(starts) - 1):
        rows = _span(b, q.shape[-3], starts, options.get("seqused_q"))
        if pages is None:
            used = options.get("seqused_k")
            keys = _span(b, k.shape[-3], options.get("cu_seqlens_k"), used)
        else:
            key = np.arange(int(options["seqused_k"][b]))
            keys = (np.asarray(pages)[b, key // k.shape[1]], key % k.shape[1])
        yield SequencePlace(rows, keys)


def _span(batch: int, length: int, starts: Any, used: Any) -> tuple[Any, ...]:
    first, last = (0, length) if starts is None else (int(x) for x in starts[batch : batch + 2])
    if used is not None:
        last = first + int(used[batch])
    return (slice(first, last),) if starts is not None else (batch, slice(first, last))


def attend_batch(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """out like q with dv columns and lse (B, Hq, Sq) or (Hq, total), float64.

    Rows that no sequence uses have out 0 and LSE -inf. Options as for
    `fa4.flash_attn_varlen_func`, taken as valid.
    """
    *batch, rows, heads, _ = q.shape
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full((*batch, heads, rows), -np.inf)
    for b, place in enumerate(_places((q, k, v), options)):
        out[place.rows], lse[place.lse] = attend(
            q[place.rows], k[place.keys], v[place.keys], options, b
        )
    return out, lse


def differentiate_batch(
    inputs: Tensors, dout: np.ndarray, dlse: np.ndarray | None, options: Mapping[str, Any]
) -> OracleGradients:
    """Gradients in the layouts of `inputs` (q, k, v); pages that sequences share get the sum."""
    q, k, v = inputs
    dq, dk, dv = (np.zeros(x.shape) for x in inputs)
    dsink = None if options.get("learnable_sink") is None else np.zeros(q.shape[-2])
    for b, place in enumerate(_places(inputs, options)):
        mine = (q[place.rows], k[place.keys], v[place.keys])
        upstream = None if dlse is None else dlse[place.lse]
        grads = differentiate(mine, dout[place.rows], options, dlse=upstream, batch=b)
        dq[place.rows] = grads.dq
        np.add.at(dk, place.keys, grads.dk)
        np.add.at(dv, place.keys, grads.dv)
        if dsink is not None and grads.dsink is not None:
            dsink += grads.dsink
    return OracleGradients(dq, dk, dv, dsink)
