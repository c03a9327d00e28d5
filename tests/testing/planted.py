"""Back ends with one fault each, and honest ones that offer little: what the kit must tell apart.

`attention` is a plain tiled online softmax in float32 (float64 for fp64); `fault` names what it
does wrong. Each fault is one that a real kernel had, or nearly had.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import fa4

TILE = 128


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    learnable_sink: np.ndarray | None = None,
    return_lse: bool = False,
    fault: str = "",
) -> Any:
    """softmax(scale q k^T) v for (B, S, H, D) arrays, tile by tile."""
    work = np.float64 if q.dtype == np.float64 else np.float32
    batch, rows, heads, dim = q.shape
    out = np.zeros((batch, rows, heads, v.shape[-1]), q.dtype)
    lse = np.full((batch, heads, rows), -np.inf, work)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    keep = visible(rows, k.shape[1], causal, window_size, fault)
    seen = keep.any(axis=0)[:, None, None]  # whatever the others hold must not matter
    if fault != "reads_masked_keys":
        k, v = np.where(seen, k, 0), np.where(seen, v, 0)
    group = heads // k.shape[2]
    sinks = np.full(heads, -np.inf) if learnable_sink is None else learnable_sink
    for b in range(batch):
        for h in range(heads):
            kv_head = h % k.shape[2] if fault == "interleaved_heads" else h // group
            scores = q[b, :, h].astype(work) @ k[b, :, kv_head].astype(work).T
            scores = bend(scores * work(1 if fault == "unscaled" else scale), softcap, fault)
            scores = np.where(keep, scores, -np.inf)
            sink = work(sinks[h] * (scale if fault == "sink_scaled" else 1.0))
            values = v[b, :, kv_head].astype(work)
            out[b, :, h], lse[b, h] = online(scores, values, sink, fault)
    if fault == "lse_base_2":
        lse = lse / np.log(2.0)
    return (out, lse) if return_lse else out


def visible(rows: int, keys: int, causal: bool, window: tuple[Any, Any], fault: str) -> np.ndarray:
    """(rows, keys) bool."""
    left, right = (None if side in (None, -1) else side for side in window)
    if causal:
        right = 0 if right is None else min(right, 0)
    offset = 0 if fault == "top_left_causal" else keys - rows
    distance = np.arange(keys) - np.arange(rows)[:, None] - offset
    keep = np.ones((rows, keys), bool)
    if left is not None:
        keep &= distance >= -(left + (fault == "wide_window"))
    if right is not None:
        keep &= distance <= right
    return keep


def bend(scores: np.ndarray, softcap: float, fault: str) -> np.ndarray:
    """Softcap."""
    if not softcap:
        return scores
    return np.tanh(scores / softcap) * (1.0 if fault == "softcap_without_factor" else softcap)


@np.errstate(all="ignore")
def online(
    scores: np.ndarray, values: np.ndarray, sink: np.floating, fault: str
) -> tuple[np.ndarray, np.ndarray]:
    """One head: out (rows, dv) and lse (rows,) from masked scores (rows, keys)."""
    rows, keys = scores.shape
    top = np.full(rows, -np.inf, scores.dtype)
    total, out = np.zeros(rows, scores.dtype), np.zeros((rows, values.shape[1]), scores.dtype)
    tiles = list(range(0, keys, TILE))
    for start in tiles[:-1] if fault == "drops_last_tile" and len(tiles) > 1 else tiles:
        part = scores[:, start : start + TILE]
        new = np.maximum(top, part.max(axis=1))
        safe = np.where(np.isneginf(new) | (fault == "no_maximum"), 0, new)
        alpha = np.exp(np.where(np.isneginf(top), -np.inf, top - safe))
        if fault == "no_maximum":
            alpha = np.ones_like(alpha)
        p = np.exp(part - safe[:, None])
        total = total * alpha + p.sum(axis=1)
        out = (out if fault == "forgets_rescale" else out * alpha[:, None]) + p @ values[
            start : start + TILE
        ]
        top = new
    if fault == "no_maximum":
        top = np.zeros_like(top)
    if sink > -np.inf:
        new = np.maximum(top, sink)
        total, out = total * np.exp(top - new), out * np.exp(top - new)[:, None]
        total = total + np.exp(sink - new) * (2 if fault == "sink_twice" else 1)
        top = new
    safe = np.where(np.isneginf(top), 0, top)
    empty = total == 0
    if fault == "mean_of_empty_rows" and keys:
        out[empty], total = values.mean(axis=0), np.where(empty, 1, total)
    out = out / np.where(empty, 1, total)[:, None]
    return out, np.where(empty, -np.inf, safe + np.log(np.where(empty, 1, total)))


def varlen(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seqused_q: np.ndarray | None = None,
    seqused_k: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    fault: str = "",
    **options: Any,
) -> np.ndarray:
    """Packed sequences, or paged K and V; with a fault, whole pages are read."""
    if cu_seqlens_q is None or seqused_q is not None:
        raise NotImplementedError("packed queries only")
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for b, (start, stop) in enumerate(pairwise(cu_seqlens_q)):
        if page_table is None:
            keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
            mine = k[keys], v[keys]
        else:
            size, used = k.shape[1], int(seqused_k[b])
            index = np.arange(used)
            where = page_table[b][index // size], index % size
            mine = k[where], v[where]
            if fault == "reads_unused_slots" and used % size:
                # P of the unused slots is 0, and 0 * NaN is NaN.
                rest = 0.0 * v[page_table[b][used // size], used % size :].astype(np.float32)
                mine[1][0] += rest.sum(axis=0).astype(v.dtype)
        args = (x[None] for x in (q[start:stop], *mine))
        out[start:stop] = attention(*args, **options)[0]
    return out


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window_size: Any = (None, None),
    fault: str = "",
) -> tuple[np.ndarray, ...]:
    """The oracle's gradients; with a fault, dK lacks the scale of the scores."""
    grads = fa4.flash_attn_backward(
        dout, q, k, v, out, lse, causal=causal, window_size=window_size, impl="oracle"
    )
    dq, dk, dv = (x.astype(q.dtype) for x in grads[:3])
    if fault == "dk_unscaled":
        dk = dk * q.shape[-1] ** 0.5
    return dq, dk, dv


def planted(fault: str, **attributes: Any) -> Any:
    """The back end with one fault."""
    function = partial(attention, fault=fault)
    for name, value in attributes.items():
        setattr(function, name, value)
    return function


honest = planted("", varlen=varlen, backward=backward)
lse_base_2 = planted("lse_base_2")
top_left_causal = planted("top_left_causal")
drops_last_tile = planted("drops_last_tile")
no_maximum = planted("no_maximum")
unscaled = planted("unscaled")
interleaved_heads = planted("interleaved_heads")
wide_window = planted("wide_window")
softcap_without_factor = planted("softcap_without_factor")
sink_twice = planted("sink_twice")
sink_scaled = planted("sink_scaled")
forgets_rescale = planted("forgets_rescale")
mean_of_empty_rows = planted("mean_of_empty_rows")
reads_masked_keys = planted("reads_masked_keys")
reads_unused_slots = planted("", varlen=partial(varlen, fault="reads_unused_slots"))
dk_unscaled = planted("", backward=partial(backward, fault="dk_unscaled"))

# fault -> properties of which each must fail
CAUGHT_BY = {
    "lse_base_2": ("plain",),
    "top_left_causal": ("causal", "causal_window", "causal_prefix", "decode_row"),
    "drops_last_tile": ("plain", "kv_permutation"),
    "no_maximum": ("values_scale_100", "values_low", "convexity"),
    "unscaled": ("plain",),
    "interleaved_heads": ("gqa", "gqa_repeats"),
    "wide_window": ("window", "keys_outside_window"),
    "softcap_without_factor": ("softcap",),
    "sink_twice": ("sink", "rows_without_keys_sink"),
    "sink_scaled": ("sink", "rows_without_keys_sink"),
    "forgets_rescale": ("values_ramp_up", "kv_permutation"),
    "mean_of_empty_rows": ("rows_without_keys",),
    "reads_masked_keys": ("masked_nan",),
    "reads_unused_slots": ("paged",),
    "dk_unscaled": ("gradients",),
}


def minimal(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """An honest back end with three parameters."""
    return attention(q, k, v)


def refuses(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """Takes any keyword, offers only causal, and only equal head counts."""
    if set(options) - {"causal"}:
        raise NotImplementedError(f"no {sorted(options)}")
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("no grouped heads")
    return attention(q, k, v, **options)


def only_fp32(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """Refuses other element types."""
    if q.dtype != np.float32:
        raise TypeError(f"float32 only; got {q.dtype}")
    return attention(q, k, v, causal=causal)


def type_error_if_causal(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False
) -> np.ndarray:
    """A fault that looks like a refusal: a TypeError that has nothing to do with the type."""
    if causal:
        raise TypeError("'NoneType' object is not subscriptable")
    return attention(q, k, v)


not_callable = 3
