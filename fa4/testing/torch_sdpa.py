"""torch's scaled_dot_product_attention as a back end, with FlashAttention's conventions.

torch's own `is_causal` is aligned top-left; where the lengths differ, or a window is given, the
mask is passed explicitly instead. Layouts change from (B, S, H, D) to torch's (B, H, S, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fa4.arrays import like, to_numpy
from fa4.config import Window, normalize_window
from fa4.dtypes import dtype_name


def torch_sdpa() -> Callable[..., Any]:
    """The back end function; ValueError with the pip command if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ValueError("torch-sdpa needs torch: pip install 'fa4[test]'") from error
    return attend


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = (None, None),
) -> np.ndarray:
    """out (B, Sq, Hq, dv); torch returns no LSE."""
    tensors = [_to_torch(x) for x in (q, k, v)]
    window = normalize_window(window_size, causal)
    return to_numpy("out", _run(tensors, softmax_scale, window))


def _backward(
    *arrays: Any,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: Window = (None, None),
) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv) from (dout, q, k, v, out, lse) through autograd; out and lse are not needed."""
    import torch

    dout, *inputs = arrays[:4]
    tensors = [_to_torch(x).requires_grad_() for x in inputs]
    result = _run(tensors, softmax_scale, normalize_window(window_size, causal))
    grads = torch.autograd.grad(result, tensors, _to_torch(dout))
    return tuple(to_numpy("gradient", grad) for grad in grads)


def _to_torch(x: np.ndarray) -> Any:
    """A tensor in torch's layout, (B, S, H, D)."""
    import torch

    if dtype_name(x.dtype) in ("e4m3", "e5m2"):
        raise NotImplementedError("torch's SDPA takes no FP8")
    return like(torch.empty(0), np.array(x))  # a copy: torch warns of read-only memory


def _run(tensors: list[Any], softmax_scale: float | None, window: Window) -> Any:
    import torch

    q, k, _ = tensors
    rows, keys = q.shape[1], k.shape[1]
    left, right = window
    mask, is_causal = None, False
    if left is None and right == 0 and rows == keys:
        is_causal = True
    elif (left, right) != (None, None):
        distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        mask = torch.ones(rows, keys, dtype=torch.bool)
        if left is not None:
            mask &= distance >= -left
        if right is not None:
            mask &= distance <= right
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors),
        attn_mask=mask,
        is_causal=is_causal,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


# Read by fa4.testing.backends.
attend.backward = _backward  # type: ignore[attr-defined]
attend.not_covered = {  # type: ignore[attr-defined]
    "masked_nan": "torch adds the mask to the scores, so a NaN under the mask reaches its row"
}
