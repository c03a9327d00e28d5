"""FlashAttention-4 and its Hopper kernels in CuTe-DSL: `flash_attn.cute.interface`, on a GPU.

Its modifiers are CuTe-DSL code compiled into the kernel, the kit's are Python on arrays, so that
they are not covered. Each head dim and mask kind is compiled at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.config import Window, normalize_window
from fa4.testing.adapters.common import SIXTEEN_BITS, need, only_dtypes, refuses, takes

INSTALL = "pip install flash-attn-4"
_COMPILED = "its modifiers are CuTe-DSL code, the kit's are Python on arrays"
_REASONS = {
    "score_mod": _COMPILED,
    "mask_mod": _COMPILED,
    "aux_tensors": _COMPILED,
    "block_sparse_tensors": _COMPILED,
}
_REFUSED = r"not (yet )?support|only support|unsupported|requires|must be|no longer fits"


_KEYWORDS = (
    "causal", "softmax_scale", "window_size", "softcap", "learnable_sink", "num_splits",
    "deterministic", "return_lse",
)  # fmt: skip
_LAYOUT = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k",
    "page_table",
)  # fmt: skip


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    library = need("flash_attn.cute.interface", "flash_attn_func", name, INSTALL)

    def run(function: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        only_dtypes(q, *SIXTEEN_BITS)
        causal = options.pop("causal", False)
        window = _window(options.pop("window_size", (None, None)), causal)
        out, lse = function(q, k, v, causal=causal, window_size=window, **options)
        return (out, lse) if options.get("return_lse") else out

    @takes(*_KEYWORDS)
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return run(library.flash_attn_func, q, k, v, options)

    @takes(*_KEYWORDS, *_LAYOUT)
    def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return run(library.flash_attn_varlen_func, q, k, v, options)

    attend.__name__ = name
    attend.device = device or "cuda"  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.not_covered = _REASONS  # type: ignore[attr-defined]
    attend.unsupported = refuses(_REFUSED)  # type: ignore[attr-defined]
    return attend


def _window(window_size: Window, causal: bool) -> Window:
    """None for "unbounded"; below 0 an offset, as with us."""
    left, right = normalize_window(window_size, causal)
    return (left, None if causal and right == 0 else right)
