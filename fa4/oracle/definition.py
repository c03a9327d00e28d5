"""The formulas, one full score matrix per sequence.

    S = score_mod(scale Q K^T)   or softcap tanh(scale Q K^T / softcap);  masked pairs are left out
    LSE = log(sum_j exp(S_ij) + exp(sink))          natural logarithm
    P = exp(S - LSE),  O = dropout(P) V
    dV = dropout(P)^T dO,  dP = dropout(dO V^T),  dS = P (dP - D),  D = rowsum(dO O) - dLSE
    dQ = scale dS' K,  dK = scale dS'^T Q           dS' = dS through score_mod's derivative
    dsink = -sum_i exp(sink - LSE_i) D_i

No tiles, no running maxima. A row without a visible key has O = 0 and LSE = -inf (= sink if given).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fa4.oracle.dropout import kept
from fa4.oracle.visible import SequenceLengths, visible_keys

Options = Mapping[str, Any]


class OracleGradients(NamedTuple):
    """dq (Sq, Hq, d), dk (Sk, Hk, d), dv (Sk, Hk, dv), dsink (Hq,) or None; float64."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None


class _Softmax:
    """Scores, LSE and probabilities of one sequence: (Hq, Sq, Sk) and (Hq, Sq), float64."""

    def __init__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options, batch: int
    ) -> None:
        self.options, self.batch = options, batch
        self.heads, self.heads_k = q.shape[1], k.shape[1]
        self.lengths = SequenceLengths(q.shape[0], k.shape[0])
        self.q = np.moveaxis(q.astype(np.float64), 1, 0)
        self.k, self.v = self.per_query_head(k), self.per_query_head(v)
        self.visible = visible_keys(options, batch, self.heads, self.lengths)
        given = options.get("softmax_scale")
        self.scale = self.factors("q_descale", "k_descale")
        self.scale = self.scale * (1.0 / np.sqrt(q.shape[2]) if given is None else float(given))
        self.scaled = self.scale * np.einsum("hid,hjd->hij", self.q, self.k, optimize=True)
        scores = np.where(self.visible, self.modified(), -np.inf)
        sink = options.get("learnable_sink")
        self.has_sink = sink is not None
        logits = np.full(self.heads, -np.inf) if sink is None else np.asarray(sink, np.float64)
        self.sink = logits[:, None]
        self.lse = _log_sum_exp(np.concatenate([scores, self.sink_column()], axis=2))
        with_key = np.where(np.isneginf(self.lse), 0.0, self.lse)
        self.p = np.exp(scores - with_key[..., None])
        self.keep = kept(options, batch, self.heads, self.lengths)
        self.weights = self.p * self.keep

    def per_query_head(self, x: np.ndarray) -> np.ndarray:
        """(Sk, Hk, D) -> (Hq, Sk, D): query head h reads KV head h // (Hq / Hk)."""
        reads = np.arange(self.heads) // (self.heads // self.heads_k)
        return np.moveaxis(x.astype(np.float64), 1, 0)[reads]

    def sink_column(self) -> np.ndarray:
        """The sink as one more key of every row, (Hq, Sq, 1)."""
        return np.broadcast_to(self.sink[..., None], (self.heads, self.lengths.seqlen_q, 1))

    def factors(self, *names: str) -> np.ndarray:
        """(Hq, 1, 1) product of the descales of this batch entry; 1 without any."""
        product = np.ones(self.heads_k)
        for name in names:
            table = self.options.get(name)
            if table is not None:
                product = product * np.asarray(table, np.float64)[self.batch]
        reads = np.arange(self.heads) // (self.heads // self.heads_k)
        return product[reads][:, None, None]

    def callback(self, function: Callable[..., Any], *values: np.ndarray) -> np.ndarray:
        """score_mod or its derivative over the whole score matrix."""
        head, row, key = np.ogrid[: self.heads, : self.lengths.seqlen_q, : self.lengths.seqlen_k]
        result = function(
            *values, self.batch, head, row, key, self.lengths, self.options.get("aux_tensors")
        )
        return np.broadcast_to(np.asarray(result, np.float64), self.scaled.shape)

    def modified(self) -> np.ndarray:
        """Scores through softcap or score_mod."""
        cap, function = self.options.get("softcap", 0.0), self.options.get("score_mod")
        if cap:
            return cap * np.tanh(self.scaled / cap)
        return self.scaled if function is None else self.callback(function, self.scaled)

    def unmodified(self, grad: np.ndarray) -> np.ndarray:
        """Gradient to the scaled scores from that to the modified ones; ValueError without bwd."""
        cap, derivative = self.options.get("softcap", 0.0), self.options.get("score_mod_bwd")
        if cap:
            return grad / np.cosh(np.clip(self.scaled / cap, -300.0, 300.0)) ** 2
        if self.options.get("score_mod") is None:
            return grad
        if derivative is None:
            raise ValueError("the backward pass of a score_mod needs score_mod_bwd; got None")
        return self.callback(derivative, grad, self.scaled)

    def out(self) -> np.ndarray:
        """(Hq, Sq, dv), without v_descale."""
        return _combine(self.weights, self.v, self.visible)


def _log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """log(sum(exp(scores))) over the last axis; -inf for none, NaN stays NaN."""
    top = scores.max(axis=-1)
    shift = np.where(np.isneginf(top), 0.0, top)
    return np.log(np.exp(scores - shift[..., None]).sum(axis=-1)) + shift


def _combine(weights: np.ndarray, rows: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """sum_j weights[h, i, j] rows[h, j] over visible pairs: what nobody sees is no 0 * inf."""
    finite = np.isfinite(rows).all(axis=-1)
    total = weights @ np.where(finite[..., None], rows, 0.0)
    for head, key in zip(*np.nonzero(~finite), strict=True):
        seen = visible[head, :, key]
        total[head, seen] += weights[head, seen, key, None] * rows[head, key]
    return total


@np.errstate(all="ignore")
def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options | None = None, batch: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """out (Sq, Hq, dv) and lse (Hq, Sq) of q (Sq, Hq, d), k (Sk, Hk, d), v (Sk, Hk, dv), float64.

    options: keywords of `fa4.flash_attn_func`, taken as valid. batch: the number of this sequence,
    which callbacks, dropout, descales and block lists are told.
    """
    softmax = _Softmax(q, k, v, options or {}, batch)
    out = softmax.factors("v_descale") * softmax.out()
    return np.moveaxis(out, 0, 1), softmax.lse


@np.errstate(all="ignore")
def differentiate(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    dout: np.ndarray,
    options: Options | None = None,
    *,
    dlse: np.ndarray | None = None,
    batch: int = 0,
) -> OracleGradients:
    """Gradients of one sequence, inputs (q, k, v) as in `attend`, dout (Sq, Hq, dv), dlse (Hq, Sq).

    With descales, gradients are those with respect to the stored (quantised) values. ValueError for
    a score_mod without score_mod_bwd.
    """
    q, k, v = inputs
    softmax = _Softmax(q, k, v, options or {}, batch)
    visible, seen_by = softmax.visible, softmax.visible.swapaxes(1, 2)
    upstream = np.moveaxis(dout.astype(np.float64), 1, 0) * softmax.factors("v_descale")
    row_dot = (upstream * softmax.out()).sum(axis=-1)
    if dlse is not None:
        row_dot = row_dot - dlse.astype(np.float64)
    dp = softmax.keep * np.einsum("hic,hjc->hij", upstream, softmax.v, optimize=True)
    ds = np.where(visible, softmax.p * (dp - row_dot[..., None]), 0.0)
    ds = np.where(visible, softmax.unmodified(ds), 0.0) * softmax.scale
    dq = np.moveaxis(_combine(ds, softmax.k, visible), 0, 1)
    dk = _sum_groups(_combine(ds.swapaxes(1, 2), softmax.q, seen_by), softmax.heads_k)
    dv = _sum_groups(_combine(softmax.weights.swapaxes(1, 2), upstream, seen_by), softmax.heads_k)
    dsink = None
    if softmax.has_sink:
        share = np.where(np.isneginf(softmax.lse), 1.0, np.exp(softmax.sink - softmax.lse))
        dsink = -(share * row_dot).sum(axis=-1)
    return OracleGradients(dq, dk, dv, dsink)


def _sum_groups(x: np.ndarray, heads_k: int) -> np.ndarray:
    """(Hq, Sk, D) -> (Sk, Hk, D): each KV head gets the sum over the query heads that read it."""
    heads, keys, dim = x.shape
    total = np.zeros((keys, heads_k, dim))
    for head in range(heads):
        total[:, head * heads_k // heads] += x[head]
    return total
