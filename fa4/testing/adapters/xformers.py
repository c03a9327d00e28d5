"""xFormers: `memory_efficient_attention` with its bias classes, on a GPU.

Heads that share keys are written as a fifth axis. It has no softcap, no sink and no gradient
through the LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.testing.adapters.common import flash_window, need, takes

INSTALL = "pip install xformers"


_KEYWORDS = ("causal", "softmax_scale", "window_size", "return_lse")


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    fmha = need("xformers.ops.fmha", "memory_efficient_attention", name, INSTALL)

    @takes(*_KEYWORDS)
    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        bias = _bias(fmha.attn_bias, _window(options), max(q.shape[1], k.shape[1]))
        return _run(fmha, (q, k, v), bias, options)

    @takes(*_KEYWORDS, "cu_seqlens_q", "cu_seqlens_k")
    def varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
        lengths = [options[f"cu_seqlens_{side}"].diff().tolist() for side in "qk"]
        bias = _packed_bias(fmha.attn_bias, _window(options), lengths)
        result = _run(fmha, (q[None], k[None], v[None]), bias, options)
        return tuple(x[0] for x in result) if options.get("return_lse") else result[0]

    attend.__name__ = name
    attend.device = device or "cuda"  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.lse_gradient = False  # type: ignore[attr-defined]
    return attend


def _window(options: dict[str, Any]) -> tuple[int, int]:
    return flash_window(options.get("window_size", (None, None)), options.get("causal", False))


def _bias(classes: Any, window: tuple[int, int], longest: int) -> Any:
    """The bias of one sequence; a side of its window cannot be unbounded, but as long as it is."""
    left, right = window
    if window == (-1, -1):
        return None
    if window == (-1, 0):
        return classes.LowerTriangularFromBottomRightMask()
    return classes.LocalAttentionFromBottomRightMask(
        window_left=longest if left < 0 else left, window_right=longest if right < 0 else right
    )


def _packed_bias(classes: Any, window: tuple[int, int], lengths: list[list[int]]) -> Any:
    bias = classes.BlockDiagonalMask.from_seqlens(*lengths)
    if window == (-1, -1):
        return bias
    left, right = window
    if right == 0 and left < 0:
        return bias.make_causal_from_bottomright()
    if right == 0:  # its window counts the diagonal
        return bias.make_local_attention_from_bottomright(left + 1)
    raise NotImplementedError("windows that reach beyond the diagonal, of packed sequences")


def _run(fmha: Any, tensors: tuple[Any, Any, Any], bias: Any, options: dict[str, Any]) -> Any:
    """out (B, S, H, D), or with it the LSE (B, H, S)."""
    q, k, v = tensors
    rows, heads, heads_k = q.shape[1], q.shape[2], k.shape[2]
    if heads != heads_k:  # (B, S, H, D) -> (B, S, Hk, group, D)
        q = q.unflatten(2, (heads_k, heads // heads_k))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, q.shape[3], -1) for x in (k, v))
    passed = {"attn_bias": bias, "scale": options.get("softmax_scale")}
    if not options.get("return_lse"):
        out = fmha.memory_efficient_attention(q, k, v, **passed)
        return out.flatten(2, 3) if out.dim() == 5 else out
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, **passed)
    if out.dim() == 5:
        out, lse = out.flatten(2, 3), lse.flatten(1, 2)
    return out, lse[..., :rows]  # some of its kernels pad the rows of the LSE
