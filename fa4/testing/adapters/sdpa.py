"""torch's scaled_dot_product_attention, left to choose its kernel or held to one.

torch's own `is_causal` is aligned top-left; where the lengths differ it is told otherwise, for
masks that it has no name for by an explicit mask. "torch-sdpa" runs on the CPU; the others on a GPU
where there is one, "efficient" and "cudnn" nowhere else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fa4.config import Window, normalize_window

KERNELS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_ONLY_CUDA = ("efficient", "cudnn")
_REFUSED = re.compile(
    r"No available kernel|No viable backend|cuDNN Frontend error|CUDNN_STATUS_NOT_SUPPORTED"
)
_NOT_COVERED = {
    "masked_nan": "torch adds the mask to the scores, so a NaN under the mask reaches its row"
}


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The function of "torch-sdpa" or "torch-sdpa-KERNEL"."""
    import torch

    kernel = name.removeprefix("torch-sdpa").removeprefix("-")
    if device is None:
        wanted = bool(kernel) and (kernel in _ONLY_CUDA or torch.cuda.is_available())
        device = "cuda" if wanted else "cpu"

    def attend(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: Window = (None, None),
    ) -> Any:
        if q.element_size() == 1:
            raise NotImplementedError("torch's SDPA takes no FP8")
        with _only(kernel) as reasons:
            try:
                return _attend((q, k, v), softmax_scale, normalize_window(window_size, causal))
            except RuntimeError as error:
                if not _REFUSED.search(str(error)):
                    raise
                raise NotImplementedError(reasons() or str(error)) from error

    attend.__name__ = name
    attend.device = device  # type: ignore[attr-defined]
    attend.not_covered = _NOT_COVERED  # type: ignore[attr-defined]
    if device == "cpu":  # heads that share K and V are repeated, and their gradients added up in
        attend.numerics = {"group_sum": "element"}  # type: ignore[attr-defined]  # the element type
    return attend


@contextmanager
def _only(kernel: str) -> Iterator[Callable[[], str]]:
    """Allow one kernel; gives what says why torch refused it, which it only warns of."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not kernel:
        yield lambda: ""
        return
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught, sdpa_kernel(
            [getattr(SDPBackend, KERNELS[kernel])]
        ):  # fmt: skip
            warnings.simplefilter("always")
            yield partial(_why, kernel, caught)
    finally:
        torch.set_warn_always(always)


def _why(kernel: str, caught: list[warnings.WarningMessage]) -> str:
    """What torch warned of the kernel, without the place in its own source."""
    texts = [str(warning.message).partition("(Triggered internally")[0] for warning in caught]
    told = [text.strip() for text in texts if "not used because" not in text]
    return " ".join(dict.fromkeys(text for text in told if "disabled" not in text))


def _attend(tensors: tuple[Any, Any, Any], scale: float | None, window: Window) -> Any:
    """out (B, Sq, Hq, dv) of tensors (B, S, H, D)."""
    import torch

    q, k, _ = tensors
    mask, is_causal = choose_mask(q.shape[1], k.shape[1], window, q.device)
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def choose_mask(rows: int, keys: int, window: Window, device: Any) -> tuple[Any, bool]:
    """(attn_mask, is_causal): what says the window to torch and keeps most of its kernels."""
    left, right = window
    if (left, right) == (None, None):
        return None, False
    if left is None and right == 0 and rows == keys:
        return None, True
    if left is None and right == 0 and rows < keys and device.type == "cuda":
        # Flash kernels take no explicit mask, but know this one.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(rows, keys), False
    return band(rows, keys, window, device), False


def band(rows: int, keys: int, window: Window, device: Any) -> Any:
    """(rows, keys) bool: is the key inside the window of the row? Bottom-right aligned."""
    import torch

    left, right = window
    row = torch.arange(rows, device=device)[:, None]
    distance = torch.arange(keys, device=device) - row - (keys - rows)
    mask = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask
