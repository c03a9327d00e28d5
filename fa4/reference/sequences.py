"""From user layouts to single sequences and back.

Every algorithm of the reference works on one `Sequence`: heads first, one batch entry, exact
lengths. Dense, variable-length, seqused and paged inputs are all cut into such sequences here, and
`run_forward`/`run_backward` write the results back into the caller's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fa4.dtypes import dtype_name, numpy_dtype, round_to
from fa4.reference.counters import Counters


class Sequence(NamedTuple):
    """One batch entry, heads first: q (Hq, Sq, d), k (Hk, Sk, d), v (Hk, Sk, dv)."""

    batch: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[0] // self.k.shape[0]


class SequenceOutput(NamedTuple):
    """out (Hq, Sq, dv) in the output type, lse (Hq, Sq) natural log, and the work done."""

    out: np.ndarray
    lse: np.ndarray
    counters: Counters


class Upstream(NamedTuple):
    """What a backward pass starts from, heads first: saved results and incoming gradients."""

    out: np.ndarray  # (Hq, Sq, dv)
    lse: np.ndarray  # (Hq, Sq)
    dout: np.ndarray  # (Hq, Sq, dv)
    dlse: np.ndarray | None  # (Hq, Sq)
    residual: np.ndarray | None  # (Hq, Sq, dv), what rounding took from out


class SequenceGradients(NamedTuple):
    """dq (Hq, Sq, d), dk (Hk, Sk, d), dv (Hk, Sk, dv), dsink (Hq,) or None, and the work done."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None
    counters: Counters


ForwardKernel = Callable[[Sequence], SequenceOutput]
BackwardKernel = Callable[[Sequence, Upstream], SequenceGradients]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How sequences lie in the tensors.

    cu_seqlens_* (B+1,) int: start offsets in (total, heads, dim) tensors. seqused_* (B,) int: used
    length of each sequence. page_table (B, pages) int: K and V are (num_pages, page_size, heads,
    dim) and seqused_k gives the lengths.
    """

    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    seqused_q: np.ndarray | None = None
    seqused_k: np.ndarray | None = None
    page_table: np.ndarray | None = None


@dataclass
class ForwardResult:
    """out in the layout of q, lse float (B, Hq, Sq) or (Hq, total), and the work done."""

    out: np.ndarray
    lse: np.ndarray
    counters: Counters = field(default_factory=Counters)


@dataclass
class BackwardResult:
    """Gradients in the layouts of their inputs (dsink (Hq,) or None), and the work done."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None = None
    counters: Counters = field(default_factory=Counters)


def output_dtype(dtype: np.dtype) -> np.dtype:
    """Element type of O: that of the inputs, but bf16 for FP8."""
    return numpy_dtype("bf16") if dtype.itemsize == 1 else dtype


def lse_dtype(dtype: np.dtype) -> np.dtype:
    """Element type of the LSE: float64 for float64 inputs, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


class _Span(NamedTuple):
    """Where a sequence lies: x[place] is (S, H, D); and its used length."""

    place: tuple
    length: int


def _spans(
    tensor: np.ndarray, cu_seqlens: np.ndarray | None, used: np.ndarray | None
) -> list[_Span]:
    """Spans of a dense (B, S, H, D) or packed (total, H, D) tensor."""
    if cu_seqlens is None:
        length = tensor.shape[1]
        lengths = [length] * tensor.shape[0] if used is None else [int(n) for n in used]
        return [_Span((b, slice(0, n)), n) for b, n in enumerate(lengths)]
    spans = []
    for b in range(len(cu_seqlens) - 1):
        start, stop = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        stop = stop if used is None else start + int(used[b])
        spans.append(_Span((slice(start, stop),), stop - start))
    return spans


def _page_rows(packing: Packing, batch: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(page, slot) of each key of a sequence."""
    assert packing.page_table is not None and packing.seqused_k is not None
    keys = np.arange(int(packing.seqused_k[batch]))
    return packing.page_table[batch][keys // page_size], keys % page_size


def _heads_first(rows: np.ndarray) -> np.ndarray:
    return rows.transpose(1, 0, 2)


def _kv_indices(k: np.ndarray, packing: Packing) -> list[tuple]:
    """For each sequence, the index of its K (and V) rows: K[index] is (Sk, Hk, d)."""
    if packing.page_table is not None:
        batch = packing.page_table.shape[0]
        return [_page_rows(packing, b, k.shape[1]) for b in range(batch)]
    return [span.place for span in _spans(k, packing.cu_seqlens_k, packing.seqused_k)]


def _sequences(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, packing: Packing
) -> Iterator[tuple[Sequence, tuple, tuple]]:
    """(sequence, index into q, index into k and v) of every batch entry."""
    spans = _spans(q, packing.cu_seqlens_q, packing.seqused_q)
    for b, (span, kv) in enumerate(zip(spans, _kv_indices(k, packing), strict=True)):
        seq = Sequence(b, *(_heads_first(x) for x in (q[span.place], k[kv], v[kv])))
        yield seq, span.place, kv


def _lse_index(index: tuple) -> tuple:
    """Index of a sequence in an LSE laid out (B, H, S) or (H, total), giving (H, Sq)."""
    *batch, rows = index
    return (*batch, slice(None), rows)


def run_forward(
    kernel: ForwardKernel,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    packing: Packing,
) -> ForwardResult:
    """Run `kernel` on every sequence of a batch.

    q is (B, Sq, Hq, d) or (total, Hq, d). Rows outside the used length get out 0 and LSE -inf.
    """
    lse_shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    result = ForwardResult(
        np.zeros((*q.shape[:-1], v.shape[-1]), output_dtype(q.dtype)),
        np.full(lse_shape, -np.inf, lse_dtype(q.dtype)),
    )
    for seq, q_index, _ in _sequences(q, k, v, packing):
        output = kernel(seq)
        result.out[q_index] = output.out.transpose(1, 0, 2)
        result.lse[_lse_index(q_index)] = output.lse
        result.counters.add(output.counters)
    return result


@dataclass(frozen=True, kw_only=True)
class SavedForward:
    """What the backward pass of a batch starts from, in the caller's layout."""

    out: np.ndarray
    lse: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None = None
    residual: np.ndarray | None = None


def run_backward(
    kernel: BackwardKernel,
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    saved: SavedForward,
    packing: Packing,
    sink: np.ndarray | None = None,
) -> BackwardResult:
    """Run the backward `kernel` on every sequence of a batch; inputs are (q, k, v).

    sink: the kernel's, whose gradient is 0 where there is no sequence. Rows outside the used
    lengths get zero gradients; a page that several sequences share gets the sum of theirs.
    """
    q, k, v = inputs
    work = lse_dtype(q.dtype)
    dq, dk, dv = (np.zeros(x.shape, work) for x in inputs)
    result = BackwardResult(dq, dk, dv, None if sink is None else np.zeros(sink.shape, work))
    for seq, q_index, kv_index in _sequences(q, k, v, packing):
        lse_index = _lse_index(q_index)
        upstream = Upstream(
            _heads_first(saved.out[q_index]),
            saved.lse[lse_index],
            _heads_first(saved.dout[q_index]),
            None if saved.dlse is None else saved.dlse[lse_index],
            None if saved.residual is None else _heads_first(saved.residual[q_index]),
        )
        grads = kernel(seq, upstream)
        dq[q_index] = grads.dq.transpose(1, 0, 2)
        for total, part in ((dk, grads.dk), (dv, grads.dv)):
            if packing.page_table is None:
                total[kv_index] += part.transpose(1, 0, 2)
            else:  # rows of a page may come more than once
                np.add.at(total, kv_index, part.transpose(1, 0, 2))
        if grads.dsink is not None:
            result.dsink = grads.dsink + result.dsink
        result.counters.add(grads.counters)
    name = dtype_name(output_dtype(q.dtype))
    result.dq, result.dk, result.dv = (round_to(x, name) for x in (dq, dk, dv))
    return result
