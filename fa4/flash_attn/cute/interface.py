"""flash-attn-4's two functions. Both return (out, lse), whatever was asked for.

lse is None unless return_lse is set or a gradient is wanted. score_mod and mask_mod are called by
element, as `fa4.flash_attn_func` does, not with vectors of a thread's elements.

Source of names, order, defaults and returns: flash-attn-4 4.0.0b36, with which a test compares.
"""

from __future__ import annotations

from typing import Any

from fa4.call.arrays import is_torch
from fa4.config import Window
from fa4.dropin.attend import attend


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    impl: str = "auto",
) -> tuple[Any, Any]:
    """(out, lse) of q (B, Sq, Hq, d), k (B, Sk, Hk, d), v (B, Sk, Hk, dv).

    Arguments as in `fa4.flash_attn_func`. block_sparse_tensors_bwd is not needed: the gradients
    follow block_sparse_tensors. Raises NotImplementedError for qv, gather_* and aux_scalars.
    """
    _refuse(qv=qv, gather_kv_indices=gather_kv_indices, aux_scalars=aux_scalars or None,
            gather_bwd_recompute_p=gather_bwd_recompute_p or None,
            gather_bwd_token_chunk=gather_bwd_token_chunk)  # fmt: skip
    options = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "learnable_sink": learnable_sink, "softcap": softcap, "num_splits": max(num_splits, 0),
        "pack_gqa": pack_gqa, "deterministic": deterministic, "score_mod": score_mod,
        "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod, "aux_tensors": aux_tensors,
        "block_sparse_tensors": block_sparse_tensors,
    }  # fmt: skip
    return _run((q, k, v), options, return_lse, varlen=False, impl=impl)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    min_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    impl: str = "auto",
) -> tuple[Any, Any]:
    """(out, lse) of packed, padded or paged sequences, as `fa4.flash_attn_varlen_func` takes them.

    min_seqlen_k, scheduler_metadata and disable_scheduler_metadata change how flash-attn-4 computes
    and no result; nothing here reads them. Raises NotImplementedError for qv, gather_*,
    aux_scalars and seqlen_k_per_split.
    """
    _refuse(qv=qv, gather_kv_indices=gather_kv_indices, aux_scalars=aux_scalars or None,
            seqlen_k_per_split=seqlen_k_per_split,
            gather_bwd_recompute_p=gather_bwd_recompute_p or None,
            gather_bwd_token_chunk=gather_bwd_token_chunk)  # fmt: skip
    options = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "page_table": page_table, "softmax_scale": softmax_scale, "causal": causal,
        "window_size": window_size, "learnable_sink": learnable_sink, "softcap": softcap,
        "num_splits": max(num_splits, 0), "pack_gqa": pack_gqa, "deterministic": deterministic,
        "score_mod": score_mod, "score_mod_bwd": score_mod_bwd, "mask_mod": mask_mod,
        "aux_tensors": aux_tensors, "block_sparse_tensors": block_sparse_tensors,
    }  # fmt: skip
    return _run((q, k, v), options, return_lse, varlen=True, impl=impl)


def _refuse(**given: Any) -> None:
    """NotImplementedError for what has no counterpart here."""
    for name, value in given.items():
        if value is not None:
            what = f"a {type(value).__name__}" if hasattr(value, "shape") else repr(value)
            raise NotImplementedError(
                f"{name} is not in this version and must be unset; got {what}"
            )


def _run(
    tensors: tuple[Any, Any, Any],
    options: dict[str, Any],
    return_lse: bool,
    *,
    varlen: bool,
    impl: str,
) -> tuple[Any, Any]:
    """(out, lse), lse None where nobody asked for it."""
    wanted = return_lse or any(is_torch(x) and x.requires_grad for x in tensors)
    result = attend(tensors, options, varlen=varlen, impl=impl, return_lse=wanted)
    return tuple(result) if wanted else (result, None)
