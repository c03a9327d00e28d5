"""Whole calls on top of the kernel: where sequences lie in dense, packed, padded, paged arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np

from tests.testing.planted.gradients import GradientKernel
from tests.testing.planted.kernel import FP8, Options, Place

TAKEN = {np.dtype(x) for x in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)} | FP8
LAYOUT_KEYWORDS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table",
                   "max_seqlen_q", "max_seqlen_k")  # fmt: skip


class Call:
    """One call: q, k, v in the caller's layout and its options."""

    kernel: type[GradientKernel] = GradientKernel

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options) -> None:
        if q.dtype not in TAKEN:
            raise TypeError(
                f"the element type must be fp32, fp64, fp16, bf16 or FP8; got {q.dtype}"
            )
        self.q, self.k, self.v, self.options = q, k, v, options

    def sequences(self) -> list[int]:
        """Batch entries."""
        offsets = self.options.cu_seqlens_q
        return list(range(len(self.q) if offsets is None else len(offsets) - 1))

    def row_span(self, b: int) -> tuple[int, int]:
        """(first, number) of the rows of a sequence."""
        first, count = 0, self.q.shape[-3]
        if self.options.cu_seqlens_q is not None:
            first, stop = (int(n) for n in self.options.cu_seqlens_q[b : b + 2])
            count = stop - first
        used = self.options.seqused_q
        return first, count if used is None else int(used[b])

    def key_span(self, b: int) -> tuple[int, int]:
        """(first, number) of the keys of a sequence; the first of its buffer is 0 if it has one."""
        first, count = 0, self.k.shape[-3]
        if self.options.cu_seqlens_k is not None:
            first, stop = (int(n) for n in self.options.cu_seqlens_k[b : b + 2])
            count = stop - first
        used = self.options.seqused_k
        return first, count if used is None else int(used[b])

    def pages(self, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, slot) of the keys of a sequence."""
        assert self.options.page_table is not None
        keys, size = np.arange(count), self.k.shape[1]
        return self.options.page_table[b][keys // size], keys % size

    def place(self, b: int) -> Place:
        """Where sequence b lies."""
        row, rows = self.row_span(b)
        key, keys = self.key_span(b)
        span, key_span = slice(row, row + rows), slice(key, key + keys)
        at_q = (b, span) if self.options.cu_seqlens_q is None else (span,)
        at_k: tuple[Any, ...] = (key_span,) if self.options.cu_seqlens_k is not None else (
            b, key_span,
        )  # fmt: skip
        if self.options.page_table is not None:
            at_k = self.pages(b, keys)
        return Place(b, at_q, at_k, row, key, self.k.shape[-3])

    def gather(self, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v (S, H, D) of a sequence."""
        return self.q[place.rows], self.k[place.keys], self.v[place.keys]

    def load(self, b: int) -> GradientKernel:
        """The kernel on sequence b."""
        place = self.place(b)
        return self.kernel(self.gather(place), place, self.options)

    def buffers(self) -> tuple[np.ndarray, np.ndarray]:
        """Fresh O, all 0, and LSE, all -inf."""
        *rows, heads, _ = self.q.shape
        work = np.float64 if self.q.dtype == np.float64 else np.float32
        lse = np.full((*rows[:-1], heads, rows[-1]), -np.inf, work)
        out_type = ml_dtypes.bfloat16 if self.q.dtype in FP8 else self.q.dtype
        return np.zeros((*rows, heads, self.v.shape[-1]), out_type), lse

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """O and LSE in the layout of q."""
        out, lse = self.buffers()
        rows_first = lse.swapaxes(-1, -2)
        for b in self.sequences():
            kernel = self.load(b)
            out[kernel.place.rows], part = kernel.forward()
            rows_first[kernel.place.rows] = part.T
        return out, lse

    def rounded(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """ "dq", "dk" or "dv" in the element type."""
        return gradient.astype(self.q.dtype)

    def backward(
        self, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """dq, dk, dv in the layouts of q, k, v; dsink (Hq,) float32, or None without a sink."""
        dlse = np.zeros_like(lse) if dlse is None else dlse
        totals = self.gradient_buffers(lse.dtype)
        dsink = None
        if self.options.learnable_sink is not None:
            dsink = np.zeros(self.options.learnable_sink.shape, lse.dtype)
        for b in self.sequences():
            kernel = self.load(b)
            rows, keys = kernel.place.rows, kernel.place.keys
            of_rows = (x.swapaxes(-1, -2)[rows].T for x in (lse, dlse))
            part = kernel.backward(dout[rows], out[rows], *of_rows)
            totals[0][rows] = part.dq
            self.add_keys(totals[1], keys, part.dk)
            self.add_keys(totals[2], keys, part.dv)
            if dsink is not None:
                dsink = self.add_dsink(dsink, part.dsink)
        dq, dk, dv = (
            self.rounded(name, x) for name, x in zip(("dq", "dk", "dv"), totals, strict=True)
        )
        return dq, dk, dv, dsink

    def gradient_buffers(self, work: np.dtype) -> list[np.ndarray]:
        """Fresh dq, dk, dv, all 0."""
        return [np.zeros(x.shape, work) for x in (self.q, self.k, self.v)]

    def add_keys(self, total: np.ndarray, keys: tuple[Any, ...], part: np.ndarray) -> None:
        """dk or dv with the share of a sequence, which may have pages of another."""
        np.add.at(total, keys, part)

    def add_dsink(self, dsink: np.ndarray, part: np.ndarray) -> np.ndarray:
        """dsink with the share of a sequence."""
        return dsink + part


def make_attention(call: type[Call]) -> Callable[..., Any]:
    """A back end as `fa4.testing` takes it: dense, with `varlen`, `backward` and fa4's dropout."""

    def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            out, lse = call(q, k, v, Options(**options)).forward()
        return (out, lse) if return_lse else out

    def varlen(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        return attention(q, k, v, return_lse=return_lse, **options)

    def backward(
        *arrays: Any, dlse: Any = None, out_residual: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        dout, q, k, v, out, lse = arrays
        if out_residual is not None:
            out = out.astype(np.float32) + out_residual.astype(np.float32)
        with np.errstate(all="ignore"):
            return call(q, k, v, Options(**options)).backward(dout, out, lse, dlse)

    every = tuple(field.name for field in fields(Options))
    dense = tuple(name for name in every if name not in LAYOUT_KEYWORDS)
    name_keywords(attention, ("q", "k", "v"), (*dense, "return_lse"))
    name_keywords(varlen, ("q", "k", "v"), (*every, "return_lse"))
    name_keywords(backward, ("dout", "q", "k", "v", "out", "lse"), (*every, "dlse", "out_residual"))
    attention.varlen, attention.backward = varlen, backward  # type: ignore[attr-defined]
    attention.fa4_dropout = True  # type: ignore[attr-defined]
    return attention


def name_keywords(
    function: Callable[..., Any], arrays: tuple[str, ...], keywords: tuple[str, ...]
) -> None:
    """Give a function of **options the signature that says which it takes."""
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in arrays]
    named = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in keywords]
    function.__signature__ = inspect.Signature([*positional, *named])  # type: ignore[attr-defined]
