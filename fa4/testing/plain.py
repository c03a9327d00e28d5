"""Attention written straight from its definition, rounding what matrix units take and give.

This is the yardstick of the error budget: what an honest implementation without tiles and fused
steps loses. Products accumulate in float32 (float64 for fp64) and scores stay there, as in every
attention kernel on matrix units; P is rounded to the element type before the product with V, dP and
dS before theirs, and every result once. With `rounding=None` nothing is rounded and everything is
float64: the terms from which `fa4.testing.bounds` derives the rounding band.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fa4.dtypes import largest_finite, numpy_dtype
from fa4.reference import Dropout, SeqlenInfo
from fa4.reference.dropout import keep_scale
from fa4.reference.spec import Region
from fa4.testing.inputs import Inputs, SequenceInputs, of_rows
from fa4.testing.numerics import (
    FP8_TYPES,
    LIMITED_BITS,
    LIMITED_STEP,
    USUAL_NUMERICS,
    Numerics,
)

_CACHED_ELEMENTS = 1 << 15  # of terms at a time: they stay in a core's L2 cache
_LEAST_SLICES = 4  # for fewer, adding each alone is faster
_LEAST_EXPONENT = -100  # of a product of FP8 numbers, factors of blocks among them; far below


class PlainOutput(NamedTuple):
    """out (Sq, Hq, dv) and lse (Hq, Sq), natural logarithm, of one sequence."""

    out: np.ndarray
    lse: np.ndarray


class PlainGradients(NamedTuple):
    """dq (Sq, Hq, d), dk (Sk, Hk, d), dv (Sk, Hk, dv), dsink (Hq,) or None, of one sequence."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None


def output_type(dtype: str) -> str:
    """Element type of O: that of the inputs, but bf16 for FP8."""
    return "bf16" if dtype in FP8_TYPES else dtype


def work_type(dtype: str) -> str:
    """Type of sums and of the LSE: fp64 for fp64 inputs, else fp32."""
    return "fp64" if dtype == "fp64" else "fp32"


def truncated(x: np.ndarray) -> np.ndarray:
    """float32 cut off to LIMITED_BITS significant bits."""
    kept = np.uint32(2**32 - 2 ** (24 - LIMITED_BITS))
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & kept).view(np.float32)


def limited_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (..., M, N) @ b (..., N, D) as Hopper's tensor cores add products of 8-bit types.

    LIMITED_STEP products and the sum so far are cut off toward zero, LIMITED_BITS - 1 bits below
    the largest exponent among them, and added exactly; of that sum LIMITED_BITS are kept. The
    exponent of a product is the sum of its factors'. Measured, to the bit but for subnormal
    factors: lab/hardware/wgmma_sums.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    rows = max(1, _CACHED_ELEMENTS // max(1, LIMITED_STEP * total[..., :1, :].size))
    for start in range(0, a.shape[-1], LIMITED_STEP):
        part = slice(start, start + LIMITED_STEP)
        for row in range(0, a.shape[-2], rows):
            at = (..., slice(row, row + rows), slice(None))
            total[at] = _limited_step(total[at], a[at][..., part], b[..., part, :])
    return total


def _limited_step(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum so far, (..., M, D), and the products of a (..., M, n) and b (..., n, D)."""
    terms = a[..., None] * b[..., None, :, :]
    exponents = _exponents(a)[..., None] + _exponents(b)[..., None, :, :]
    largest = np.maximum(exponents.max(axis=-2), _exponents(total))
    unit = np.ldexp(np.float32(1.0), np.maximum(largest, _LEAST_EXPONENT) - (LIMITED_BITS - 1))
    kept = np.trunc(terms / unit[..., None, :]).sum(axis=-2) + np.trunc(total / unit)
    return truncated(kept * unit)


def _exponents(x: np.ndarray) -> np.ndarray:
    """Of 2^e <= |x| < 2^(e + 1); of 0 one below all others, in a sum with another one, too."""
    return np.where(x == 0.0, 4 * _LEAST_EXPONENT, np.frexp(x)[1] - 1)


def ordered_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (..., M, N) @ b (..., N, D), the N terms of each sum added one after another, from 0.

    A reduction over the first axis adds whole slices in their order; slices of one number it would
    add in pairs.
    """
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0))[..., None]
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0))[..., None, :]
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    step = _CACHED_ELEMENTS // max(total.size, 1) if total.size > 1 else 1
    if step < _LEAST_SLICES:
        term = np.empty_like(total)
        for column, row in zip(columns, rows, strict=True):
            np.multiply(column, row, out=term)
            total += term
        return total
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        terms = np.concatenate([total[None], columns[part] * rows[part]])
        np.add.reduce(terms, axis=0, out=total)
    return total


class Terms:
    """The matrices of one sequence's attention, heads first: (Hq, Sq, Sk) and (Hq, S, D).

    `rounding` is an element type, or None for float64 throughout. Keys and values that no row of a
    head sees count as 0, whatever they hold. A row without a key has p 0, lse -inf.
    """

    def __init__(
        self,
        seq: SequenceInputs,
        batch: int,
        options: dict[str, Any],
        rounding: str | None,
        numerics: Numerics = USUAL_NUMERICS,
    ) -> None:
        self.seq, self.batch, self.options = seq, batch, options
        self.numerics = numerics
        self.work = np.dtype(np.float64 if rounding in (None, "fp64") else np.float32)
        self.p_type, self.o_type = rounding, output_type(rounding) if rounding else None
        self.p_factor = self.work.type(1.0)
        self.limited = self.limits(rounding)
        if rounding in FP8_TYPES:
            self.p_type = numerics.p_type(rounding)
            self.p_factor = self.work.type(2.0 ** numerics.p_offset_log2(rounding))
        self.group = seq.q.shape[1] // seq.k.shape[1]
        self.visible = seq.visible
        self.q = self.descaled("q_descale", seq.q.transpose(1, 0, 2).astype(self.work))
        unseen = np.logical_not(self.visible.any(axis=1))
        self.k = self.descaled("k_descale", self.expand(seq.k, unseen))
        self.v = self.descaled("v_descale", self.expand(seq.v, unseen))
        self.info = SeqlenInfo(seq.q.shape[0], seq.k.shape[0])

    def limits(self, dtype: str | None) -> bool:
        """Are sums of products of this type cut off?"""
        return dtype in FP8_TYPES and self.numerics.fp8_sums == "limited"

    def expand(self, x: np.ndarray, unseen: np.ndarray) -> np.ndarray:
        """(Sk, Hk, D) -> (Hq, Sk, D): every KV head once per query head of its group, with 0 where
        no row of a head sees a key; unseen is (Hq, Sk)."""
        wide = np.repeat(x.astype(self.work), self.group, axis=1).transpose(1, 0, 2)
        wide[unseen] = 0
        return wide

    def fold(self, x: np.ndarray) -> np.ndarray:
        """(Hq, Sk, D) -> (Sk, Hk, D): the sum over the query heads of each group."""
        heads, keys, dim = x.shape
        grouped = x.reshape(heads // self.group, self.group, keys, dim)
        return grouped.sum(axis=1).transpose(1, 0, 2)

    def rounded(self, x: np.ndarray, name: str | None) -> np.ndarray:
        """x rounded to a type and back in the work type; as it is for None. Saturates.

        NumPy's and ml_dtypes' own conversion, not fa4's, which is in what is judged.
        """
        if name is None:
            return x
        most = x.dtype.type(largest_finite(name))
        clipped = np.clip(x, -most, most).astype(numpy_dtype(name), copy=False)
        return clipped.astype(self.work, copy=False)

    def factor(self, name: str) -> np.ndarray:
        """(Hq, 1, 1) descale of this batch entry; 1 without one, and for those of blocks."""
        heads = len(self.q)
        table = self.options.get(name)
        if table is None or table.ndim > 2:
            return np.ones((heads, 1, 1), self.work)
        return np.repeat(table[self.batch], self.group).astype(self.work).reshape(heads, 1, 1)

    def descaled(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (Hq, S, D) times the descales of its blocks of rows or keys, where it has those."""
        table = self.options.get(name)
        if table is None or table.ndim < 3:
            return x
        rows = of_rows(table[self.batch], x.shape[1])
        return x * np.repeat(rows, self.group, axis=0)[..., None].astype(self.work)

    def callback(self, function: Callable[..., Any], *first: np.ndarray) -> np.ndarray:
        """score_mod or its derivative over the whole matrix."""
        heads, rows, keys = self.visible.shape
        grid = np.ix_(np.arange(heads), np.arange(rows), np.arange(keys))
        aux = self.options.get("aux_tensors")
        result = np.asarray(function(*first, self.batch, *grid, self.info, aux))
        return np.broadcast_to(result, self.visible.shape).astype(self.work, copy=False)

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a @ b in the work type; for fp32 and fp64 one term after another, as a plain loop sums.

        A library's blocked sum errs less than an honest loop does, and in these types the sum is
        what errs most; in narrower types it is the rounding of P and O.
        """
        if self.limited:
            return limited_product(a, b)
        if self.o_type not in ("fp32", "fp64"):
            return a @ b
        return ordered_product(a, b)

    @cached_property
    def scale(self) -> np.ndarray:
        """(Hq, 1, 1) factor of the raw products."""
        given = self.options.get("softmax_scale")
        scale = self.q.shape[-1] ** -0.5 if given is None else given
        factors = self.factor("q_descale") * self.factor("k_descale")
        return (scale * factors.astype(np.float64)).astype(self.work)

    @cached_property
    def scaled(self) -> np.ndarray:
        """scale Q K^T in the work type, as a matrix unit accumulates it."""
        return self.scale * self.product(self.q, self.k.transpose(0, 2, 1))

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores after softcap or score_mod, -inf where masked."""
        scores = self.scaled
        cap = self.options.get("softcap", 0.0)
        if cap:
            scores = cap * np.tanh(scores / cap)
        if self.options.get("score_mod") is not None:
            scores = self.callback(self.options["score_mod"], scores)
        return np.where(self.visible, scores, -np.inf).astype(self.work, copy=False)

    @cached_property
    def sink(self) -> np.ndarray:
        """(Hq, 1) virtual logit; -inf without one."""
        sink = self.options.get("learnable_sink")
        if sink is None:
            return np.full((len(self.q), 1), -np.inf, self.work)
        return np.asarray(sink)[:, None].astype(self.work)

    @cached_property
    def top(self) -> np.ndarray:
        """(Hq, Sq) maximum of scores and sink; 0 where both are -inf."""
        top = np.maximum(self.scores.max(axis=-1, initial=-np.inf), self.sink)
        return np.where(np.isneginf(top), 0, top).astype(self.work, copy=False)

    @cached_property
    def unnormalised(self) -> np.ndarray:
        """exp(scores - top), not rounded."""
        return np.exp(self.scores - self.top[..., None])

    @cached_property
    def total(self) -> np.ndarray:
        """(Hq, Sq) sum of the unnormalised probabilities and the sink's."""
        return self.unnormalised.sum(axis=-1) + np.exp(self.sink - self.top)

    @cached_property
    def lse(self) -> np.ndarray:
        """(Hq, Sq), natural logarithm."""
        with np.errstate(divide="ignore"):
            return self.top + np.log(self.total)

    @cached_property
    def p(self) -> np.ndarray:
        """Normalised probabilities, rounded, before dropout."""
        total = np.where(self.total > 0, self.total, 1)
        return self.rounded(self.unnormalised / total[..., None], self.p_type)

    @cached_property
    def keep(self) -> np.ndarray:
        """Dropout's factor of each probability: 0 or 1 / (1 - p); broadcasts to (Hq, Sq, Sk)."""
        dropout = Dropout(
            probability=self.options.get("dropout_p", 0.0), seed=self.options.get("dropout_seed", 0)
        )
        heads, rows, keys = (np.arange(n) for n in self.visible.shape)
        region = Region(self.batch, heads, rows, keys, self.info)
        return keep_scale(dropout, region).astype(self.work, copy=False)

    @cached_property
    def wide_out(self) -> np.ndarray:
        """(Hq, Sq, dv) in the work type."""
        # Dropout's factor comes after: with it P in FP8, which reaches 2^8, would saturate.
        weights = self.rounded(self.unnormalised * self.p_factor, self.p_type)
        weights = weights * self.keep / self.p_factor
        total = np.where(self.total > 0, self.total, 1)[..., None]
        return self.factor("v_descale") * (self.product(weights, self.v) / total)

    @cached_property
    def out(self) -> np.ndarray:
        """(Hq, Sq, dv), rounded."""
        return self.rounded(self.wide_out, self.o_type)

    def forward(self) -> PlainOutput:
        """out and lse with rows first."""
        return PlainOutput(self.out.transpose(1, 0, 2), self.lse)


class GradientTerms(Terms):
    """The matrices of the backward pass on top: dP, D and dS.

    D = rowsum(dO O) - dLSE;  dS = P (dP - D) through softcap's or score_mod's derivative.
    """

    def __init__(
        self,
        seq: SequenceInputs,
        batch: int,
        options: dict[str, Any],
        rounding: str | None,
        with_dlse: bool = False,
        numerics: Numerics = USUAL_NUMERICS,
    ) -> None:
        super().__init__(seq, batch, options, rounding, numerics)
        self.dout = seq.dout.transpose(1, 0, 2).astype(self.work)
        self.dlse = seq.dlse.astype(self.work) if with_dlse else np.zeros_like(self.lse)

    @cached_property
    def row_dot(self) -> np.ndarray:
        """D (Hq, Sq)."""
        out = self.wide_out if self.numerics.saved_out == "exact" else self.out
        return (self.dout * out).sum(axis=-1) - self.dlse

    @cached_property
    def dp(self) -> np.ndarray:
        """dO V^T through dropout, rounded."""
        dp = self.product(self.dout, self.v.transpose(0, 2, 1))
        return self.rounded(dp * self.keep, self.p_type)

    def chain(self, grad: np.ndarray) -> np.ndarray:
        """From the gradient of the modified scores to that of the scaled ones."""
        cap = self.options.get("softcap", 0.0)
        if cap:
            grad = grad * (1 - np.tanh(self.scaled / cap) ** 2)
        backward = self.options.get("score_mod_bwd")
        if backward is not None:
            grad = self.callback(backward, grad, self.scaled)
        return np.where(self.visible, grad, 0).astype(self.work, copy=False)

    @cached_property
    def ds(self) -> np.ndarray:
        """dS, rounded."""
        raw = self.p * (self.dp - self.row_dot[..., None])
        return self.rounded(self.chain(raw), self.p_type)

    def fold(self, x: np.ndarray) -> np.ndarray:
        """(Hq, Sk, D) -> (Sk, Hk, D): the sum over each group, in the type that is declared."""
        if self.numerics.group_sum == "work":
            return super().fold(x)
        heads = x.reshape(len(x) // self.group, self.group, *x.shape[1:])
        total = self.rounded(heads[:, 0], self.p_type)
        for n in range(1, self.group):
            total = self.rounded(total + self.rounded(heads[:, n], self.p_type), self.p_type)
        return total.transpose(1, 0, 2)

    def backward(self) -> PlainGradients:
        """All gradients, rows first, rounded."""
        return self.gradients

    @cached_property
    def gradients(self) -> PlainGradients:
        """What `backward` returns."""
        dropped = self.rounded(self.p * self.keep, self.p_type)
        dq = (self.scale * self.product(self.ds, self.k)).transpose(1, 0, 2)
        dk = self.fold(self.scale * self.product(self.ds.transpose(0, 2, 1), self.q))
        dv = self.fold(self.product(dropped.transpose(0, 2, 1), self.dout))
        dsink = None
        if self.options.get("learnable_sink") is not None:
            dsink = -(self.sink_weight * self.row_dot).sum(axis=-1)
        dq, dk, dv = (self.rounded(x, self.p_type) for x in (dq, dk, dv))
        return PlainGradients(dq, dk, dv, dsink)

    @cached_property
    def sink_weight(self) -> np.ndarray:
        """(Hq, Sq) probability that the sink takes; 1 where the LSE is -inf."""
        finite = np.where(np.isneginf(self.lse), 0, self.lse)
        return np.where(np.isneginf(self.lse), 1, np.exp(self.sink - finite))


def plain_attention(inputs: Inputs, numerics: Numerics = USUAL_NUMERICS) -> list[PlainOutput]:
    """out and lse of every sequence, in low precision throughout."""
    with np.errstate(all="ignore"):
        return [
            Terms(seq, b, inputs.options, inputs.dtype, numerics).forward()
            for b, seq in enumerate(inputs.sequences)
        ]


def plain_gradients(
    inputs: Inputs, *, with_dlse: bool = False, numerics: Numerics = USUAL_NUMERICS
) -> list[PlainGradients]:
    """Gradients of every sequence, in low precision throughout."""
    with np.errstate(all="ignore"):
        return [
            GradientTerms(seq, b, inputs.options, inputs.dtype, with_dlse, numerics).backward()
            for b, seq in enumerate(inputs.sequences)
        ]
