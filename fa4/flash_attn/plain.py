"""flash_attn 2's functions for training, of tensors and of sequences of different lengths.

    q, k, v             (B, S, heads, d), or (total, heads, d) with cu_seqlens (B+1,)
    window_size         (left, right) keys on each side of the diagonal; below 0: unbounded
    alibi_slopes        (Hq,) or (B, Hq): slope |i + Sk - Sq - j| is subtracted from the score
    dropout_p           drawn from torch's generator
    return_attn_probs   gives (out, lse, S_dmask) instead of out

LSE is (B, Hq, Sq) or (Hq, total) and -inf for a row that sees no key, where flash_attn 2 has +inf.
S_dmask (B, Hq, Sq, Sk) holds the probabilities, those that were dropped with a minus sign; it is
empty without dropout, as with flash_attn 2.

Source of names, order and defaults: the README of flash-attention, "How to use FlashAttention", and
its release notes up to 2.8 (softcap, block_table).
"""

from __future__ import annotations

from typing import Any

from fa4.call.arrays import is_torch
from fa4.dropin.attend import Tensors, attend, dropout
from fa4.dropin.mods import Modification, alibi
from fa4.flash_attn.probabilities import dropped_probabilities

Window = tuple[int, int]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    impl: str = "auto",
) -> Any:
    """out (B, Sq, Hq, dv) of q (B, Sq, Hq, d), k (B, Sk, Hk, d), v (B, Sk, Hk, dv).

    Arguments and results as above. Raises as `fa4.flash_attn_func`.
    """
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
    options |= {"window_size": open_window(window_size), "deterministic": deterministic}
    options |= dropout(dropout_p, q)
    capped, bias = cap_and_bias(alibi_slopes, softcap, q.shape[0], q.shape[2])
    return _run((q, k, v), options | capped, bias, return_attn_probs, varlen=False, impl=impl)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    impl: str = "auto",
) -> Any:
    """out (total_q, Hq, dv) of packed q, k and v; see above.

    block_table (B, pages): k and v are then (num_pages, page_size, Hk, dim), of any page size, and
    cu_seqlens_k gives the lengths. Raises as `fa4.flash_attn_varlen_func`.
    """
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
    options |= {"window_size": open_window(window_size), "deterministic": deterministic}
    options |= dropout(dropout_p, q)
    options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if block_table is None:
        options |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    else:
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        options |= {"page_table": block_table, "seqused_k": lengths}
    batch = cu_seqlens_q.shape[0] - 1
    capped, bias = cap_and_bias(alibi_slopes, softcap, batch, q.shape[1])
    return _run((q, k, v), options | capped, bias, return_attn_probs, varlen=True, impl=impl)


def open_window(window_size: Any) -> tuple[Any, Any]:
    """flash_attn 2's window as this package writes it: any side below 0 is unbounded."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return left, right


def cap_and_bias(
    slopes: Any, softcap: float, batch: int, heads: int
) -> tuple[dict[str, Any], Modification | None]:
    """softcap as an option, or within the modification: first the cap, then ALiBi."""
    if slopes is None:
        return {"softcap": softcap}, None
    return {}, alibi(slopes, batch, heads, softcap)


def _run(
    tensors: Tensors,
    options: dict[str, Any],
    bias: Modification | None,
    probabilities: bool,
    *,
    varlen: bool,
    impl: str,
) -> Any:
    """out, or (out, lse, S_dmask)."""
    result = attend(tensors, options, bias, varlen=varlen, impl=impl, return_lse=probabilities)
    if not probabilities:
        return result
    out, lse = result
    if "dropout_p" in options:
        return out, lse, dropped_probabilities(tensors, options, bias, varlen=varlen)
    return out, lse, out.new_empty(0) if is_torch(out) else out[:0].reshape(-1)[:0]
