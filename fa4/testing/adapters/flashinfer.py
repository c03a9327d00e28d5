"""FlashInfer: one sequence at a time, packed, and paged, on a GPU; no gradients.

Its LSE is to base 2 and has the heads last. A window that reaches beyond the diagonal is passed as
an explicit mask where there is one sequence, and not offered elsewhere.
"""

from __future__ import annotations

import math
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
from fa4.testing.adapters.sdpa import band

INSTALL = "pip install flashinfer-python"
WORKSPACE_BYTES = 128 << 20  # what its documentation allocates
_REFUSED = r"unsupported|not support|invalid configuration|only support"


_KEYWORDS = ("causal", "softmax_scale", "window_size", "softcap", "return_lse")


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    library = need("flashinfer", "single_prefill_with_kv_cache", name, INSTALL)
    wrappers: dict[str, Any] = {}

    def wrapper(kind: str, like: Any) -> Any:
        """A planner with its workspace, made once."""
        if kind not in wrappers:
            space = like.new_empty(WORKSPACE_BYTES, dtype=_torch().uint8)
            wrappers[kind] = getattr(library, f"BatchPrefillWith{kind}KVCacheWrapper")(space, "NHD")
        return wrappers[kind]

    @takes(*_KEYWORDS)
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return _dense(library.single_prefill_with_kv_cache, q, k, v, options)

    @takes(*_KEYWORDS, "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")
    def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return _packed(wrapper, q, k, v, options)

    attend.__name__ = name
    attend.device = device or "cuda"  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.backward = None  # type: ignore[attr-defined]
    attend.unsupported = refuses(_REFUSED)  # type: ignore[attr-defined]
    return attend


def _window(q: Any, options: dict[str, Any]) -> tuple[int, int]:
    only_dtypes(q, *SIXTEEN_BITS)
    return flash_window(options.get("window_size", (None, None)), options.get("causal", False))


def _dense(prefill: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Each batch entry by itself."""
    left, right = _window(q, options)
    return_lse = options.get("return_lse", False)
    passed: dict[str, Any] = {
        "causal": right == 0,
        "window_left": left,
        "sm_scale": options.get("softmax_scale"),
        "logits_soft_cap": options.get("softcap"),
        "return_lse": return_lse,
    }
    if right > 0:
        sides = (None if left < 0 else left, right)
        passed["custom_mask"] = band(q.shape[1], k.shape[1], sides, q.device)
        passed["window_left"] = -1
    if not len(q):
        raise NotImplementedError("a batch of no sequence")
    results = [prefill(*each, **passed) for each in zip(q, k, v, strict=True)]
    if not return_lse:
        return _torch().stack(results)
    outs, lses = zip(*results, strict=True)
    return _torch().stack(outs), _torch().stack([_natural(lse) for lse in lses])


def _packed(wrapper: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Packed queries over packed or paged keys."""
    left, right = _window(q, options)
    if right > 0:
        raise NotImplementedError("windows that reach beyond the diagonal, of packed sequences")
    heads = (q.shape[-2], k.shape[-2], q.shape[-1])
    plan = {
        "head_dim_vo": v.shape[-1],
        "causal": right == 0,
        "window_left": left,
        "logits_soft_cap": options.get("softcap"),
        "sm_scale": options.get("softmax_scale"),
        "q_data_type": q.dtype,
    }
    return_lse = options.get("return_lse", False)
    offsets_q, table = options["cu_seqlens_q"], options.get("page_table")
    if table is None:
        chosen = wrapper("Ragged", q)
        chosen.plan(offsets_q, options["cu_seqlens_k"], *heads, **plan)
        result = chosen.run(q, k, v, return_lse=return_lse)
    else:
        chosen = wrapper("Paged", q)
        pages = _pages(table, options["seqused_k"], k.shape[1])
        chosen.plan(offsets_q, *pages, *heads, k.shape[1], **plan)
        result = chosen.run(q, (k, v), return_lse=return_lse)
    return (result[0], _natural(result[1])) if return_lse else result


def _torch() -> Any:
    import torch

    return torch


def _natural(lse: Any) -> Any:
    """(rows, heads) to base 2 -> (heads, rows) to base e."""
    return (lse * math.log(2.0)).T


def _pages(table: Any, used: Any, size: int) -> tuple[Any, Any, Any]:
    """(offsets, page numbers of all sequences, keys on the last page of each), int32."""
    torch = _torch()
    counts = (used + size - 1) // size
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    pages = [row[: int(count)] for row, count in zip(table, counts, strict=True)]
    last = torch.where(used > 0, (used - 1) % size + 1, used)
    return offsets, torch.cat(pages).to(torch.int32), last.to(torch.int32)
