"""flash_attn 2's functions of tensors that lie in one, side by side before the heads: qkv and kv.

Arguments and results are those of `fa4.flash_attn.plain`.
"""

from __future__ import annotations

from typing import Any

from fa4.flash_attn.plain import Window, flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(
    qkv: Any,
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
    """`flash_attn_func` of qkv (B, S, 3, H, d)."""
    q, k, v = _unpack("qkv", qkv, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, impl=impl,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
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
    """`flash_attn_func` of q (B, Sq, Hq, d) and kv (B, Sk, 2, Hk, d)."""
    k, v = _unpack("kv", kv, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, impl=impl,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
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
    """`flash_attn_varlen_func` of qkv (total, 3, H, d)."""
    q, k, v = _unpack("qkv", qkv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, impl=impl,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
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
    *,
    impl: str = "auto",
) -> Any:
    """`flash_attn_varlen_func` of q (total_q, Hq, d) and kv (total_k, 2, Hk, d)."""
    k, v = _unpack("kv", kv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, impl=impl,
    )  # fmt: skip


def _unpack(name: str, packed: Any, rank: int) -> tuple[Any, ...]:
    """The tensors that lie side by side in the dimension before the heads."""
    if packed.ndim != rank or packed.shape[-3] != len(name):
        layout = "(B, S, " if rank == 5 else "(total, "
        raise ValueError(
            f"{name} must be {layout}{len(name)}, heads, dim); got shape {tuple(packed.shape)}"
        )
    return tuple(packed[..., part, :, :] for part in range(len(name)))
