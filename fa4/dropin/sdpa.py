"""`fa4.sdpa`: torch.nn.functional.scaled_dot_product_attention, by this package."""

from __future__ import annotations

from typing import Any

from fa4.dropin.attend import attend, dropout
from fa4.dropin.mods import Modification, dense_bias, dense_mask

try:
    import torch
except ImportError as error:
    raise ImportError("fa4.sdpa needs torch: pip install 'torch>=2.9,<2.14'") from error


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """softmax(scale query key^T + mask) value, with torch's arguments and layout.

    Args:
        query: (..., Hq, Sq, d); key (..., Hk, Sk, d), value (..., Hk, Sk, dv).
        attn_mask: broadcasts to (..., Hq, Sq, Sk): bool, True is visible, or floating, added to
            the scores (and given its gradient).
        dropout_p: drawn from torch's generator.
        is_causal: query i sees keys up to i, aligned to the TOP left, as torch has it;
            `fa4.flash_attn_func` aligns to the bottom right. Not with attn_mask.
        scale: None means 1/sqrt(d).
        enable_gqa: Hk may divide Hq.
        impl: as in `fa4.flash_attn_func`.

    Returns:
        (..., Hq, Sq, dv); 0 for a query that sees no key.

    Raises:
        ValueError, TypeError: one line, what is wrong. NotImplementedError for nested tensors.
    """
    if any(x.is_nested for x in (query, key, value)):
        raise NotImplementedError("nested tensors: use fa4.flash_attn_varlen_func")
    q, k, v, lead = _as_four(query, key, value, enable_gqa)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal and attn_mask exclude each other; got both")
    modification = None if attn_mask is None else _read_mask(attn_mask, lead, shape)
    options = {"softmax_scale": scale, **dropout(dropout_p, q)}
    if is_causal:
        k, v, options["window_size"] = _top_left(k, v, shape[2])
    tensors = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out = attend(tensors, options, modification, impl=impl).to(query.dtype)
    return out.transpose(1, 2).reshape(*_result_shape(query, lead, out))


def _as_four(query: Any, key: Any, value: Any, grouped: bool) -> tuple[Any, Any, Any, Any]:
    """q, k and v of rank 4, and the dimensions before the heads that were made one."""
    ranks = {x.dim() for x in (query, key, value)}
    if min(ranks) < 2:
        raise ValueError(f"query, key and value must have rank 2 or more; got {min(ranks)}")
    wide = [x[(None,) * (3 - x.dim())] if x.dim() < 3 else x for x in (query, key, value)]
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in wide))
    heads, *others = (x.shape[-3] for x in wide)
    most = max(heads, *others)
    if grouped:
        fits = all(heads % n == 0 for n in others)
    else:
        fits = all(n in (1, most) for n in (heads, *others))
    if not fits:
        rule = "must divide those of query" if grouped else "must be those of query (enable_gqa)"
        raise ValueError(f"heads of key and value {rule}; got {heads}, {others[0]}, {others[1]}")
    # One KV head for all queries needs no copy.
    keep = max(others) if grouped or others == [1, 1] else most
    counts = (heads if grouped else most, keep, keep)
    same = [
        x if x.shape[-3] == n else x.repeat_interleave(n // x.shape[-3], dim=-3)
        for x, n in zip(wide, counts, strict=True)
    ]
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in same)
    return q, k, v, lead


def _read_mask(mask: Any, lead: Any, shape: tuple[int, int, int, int]) -> Modification:
    """The mask as a modification; errors name its shape and what it must broadcast to."""
    whole = (*lead, *shape[1:])
    fits = mask.dim() <= max(len(whole), 4) and all(
        have in (1, want) for have, want in zip(mask.shape[::-1], whole[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {whole}; got shape {tuple(mask.shape)}")
    if mask.dim() > 3 and len(lead) != 1:
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return dense_mask(mask, shape)
    if not mask.dtype.is_floating_point:
        raise TypeError(f"attn_mask must be bool or floating; got {mask.dtype}")
    return dense_bias(mask, shape)


def _top_left(k: Any, v: Any, rows: int) -> tuple[Any, Any, tuple[int | None, int | None]]:
    """Keys, values and the window by which query i sees keys 0 ... i."""
    keys = k.shape[2]
    if keys > rows:  # nobody sees the rest; without it both alignments are one
        k, v, keys = k[:, :, :rows], v[:, :, :rows], rows
    return k, v, (None, rows - keys)


def _result_shape(query: Any, lead: Any, out: Any) -> tuple[int, ...]:
    """Of the result: query's rank, the heads that were computed."""
    heads = (out.shape[2],) if query.dim() > 2 else ()
    return (*lead, *heads, out.shape[1], out.shape[3])
