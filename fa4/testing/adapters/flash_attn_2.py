"""FlashAttention-2: `flash_attn.flash_attn_func` and `flash_attn_varlen_func`, on a GPU.

It marks rows that see no key with an LSE of +inf, which becomes -inf here. It has no gradient
through the LSE, no sink, and pages only of 256 keys and their multiples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.testing.adapters.common import (
    SIXTEEN_BITS,
    flash_window,
    need,
    one_head_dim,
    only_dtypes,
    takes,
)

INSTALL = "pip install flash-attn"
_REASONS = {
    "page_table": "pages of 256 keys and their multiples only",
    "paged": "pages of 256 keys and their multiples only",
    "learnable_sink": "FlashAttention-2 has no sink",
    "dlse": "its backward pass ignores the gradient of the LSE",
}


_KEYWORDS = (
    "causal", "softmax_scale", "window_size", "softcap", "deterministic", "return_lse",
)  # fmt: skip


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    library = need("flash_attn", "flash_attn_func", name, INSTALL)

    def run(function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        only_dtypes(arrays[0], *SIXTEEN_BITS)
        one_head_dim(arrays[0], arrays[2])
        causal = options.get("causal", False)
        options["window_size"] = flash_window(options.pop("window_size", (None, None)), causal)
        options["return_attn_probs"] = options.pop("return_lse", False)
        return _finish(function(*arrays, **options))

    @takes(*_KEYWORDS)
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return run(library.flash_attn_func, (q, k, v), options)

    @takes("cu_seqlens_q", "cu_seqlens_k", *_KEYWORDS)
    def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        offsets = [options.pop(f"cu_seqlens_{side}") for side in "qk"]
        longest = [int(x.diff().max()) for x in offsets]
        return run(library.flash_attn_varlen_func, (q, k, v, *offsets, *longest), options)

    attend.__name__ = name
    attend.device = device or "cuda"  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.lse_gradient = False  # type: ignore[attr-defined]
    attend.not_covered = _REASONS  # type: ignore[attr-defined]
    return attend


def _finish(result: Any) -> Any:
    """out, or (out, lse) of (out, lse, probabilities)."""
    if not isinstance(result, tuple):
        return result
    out, lse = result[:2]
    return out, lse.masked_fill(lse == float("inf"), -float("inf"))
