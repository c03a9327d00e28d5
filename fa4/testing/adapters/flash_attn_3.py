"""FlashAttention-3, `flash_attn_interface` of the folder `hopper`: on an H100 or H200.

Pages go through `flash_attn_with_kvcache`. It has no gradient through the LSE and no sink.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.testing.adapters.common import (
    SIXTEEN_BITS,
    flash_window,
    need,
    only_dtypes,
    refuses,
    takes,
)

INSTALL = "build the folder hopper of the flash-attention repository (python setup.py install)"
_REASONS = {
    "learnable_sink": "FlashAttention-3 has no sink",
    "dlse": "its backward pass ignores the gradient of the LSE",
}
_REFUSED = r"only supports?|not support|must be (divisible|a multiple)|head_size|head dimension"


_KEYWORDS = (
    "causal", "softmax_scale", "window_size", "softcap", "num_splits", "deterministic",
    "return_lse",
)  # fmt: skip
_LAYOUT = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    library = need("flash_attn_interface", "flash_attn_func", name, INSTALL)

    @takes(*_KEYWORDS, "q_descale", "k_descale", "v_descale")
    def attend(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        only_dtypes(q, *SIXTEEN_BITS, "float8_e4m3fn")
        _translate(options)
        return library.flash_attn_func(q, k, v, return_attn_probs=return_lse, **options)

    @takes(*_KEYWORDS, *_LAYOUT)
    def varlen(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        only_dtypes(q, *SIXTEEN_BITS)
        _translate(options)
        cu_seqlens_q, cu_seqlens_k, used_q, used_k, pages = (
            options.pop(name, None) for name in _LAYOUT
        )
        longest_q = _longest(cu_seqlens_q, q)
        if pages is not None:
            return library.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=used_k, page_table=pages, cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=longest_q, return_softmax_lse=return_lse, **options,
            )  # fmt: skip
        return library.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, _longest(cu_seqlens_k, k),
            seqused_q=used_q, seqused_k=used_k, return_attn_probs=return_lse, **options,
        )  # fmt: skip

    attend.__name__ = name
    attend.device = device or "cuda"  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.lse_gradient = False  # type: ignore[attr-defined]
    attend.numerics = {"fp8_sums": "limited"}  # type: ignore[attr-defined]  # it is for Hopper alone
    attend.not_covered = _REASONS  # type: ignore[attr-defined]
    attend.unsupported = refuses(_REFUSED)  # type: ignore[attr-defined]
    return attend


def _translate(options: dict[str, Any]) -> None:
    causal = options.get("causal", False)
    options["window_size"] = flash_window(options.pop("window_size", (None, None)), causal)


def _longest(offsets: Any, x: Any) -> int:
    """Length of the longest sequence; without offsets, that of the padded rows."""
    return x.shape[1] if offsets is None else int(offsets.diff().max())
