"""Hugging Face transformers: `attn_implementation="fa4"`.

    import fa4
    fa4.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4")

A causal mask without padding stays a causal mask, for which a kernel skips what it hides. Whatever
else a model or a batch asks for (padding, windows that hide something, packed sequences, images)
becomes a boolean mask, as with "sdpa".
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fa4.dropin.attend import attend, dropout

INSTALL = "pip install 'fa4-lab[transformers]'"


def register(name: str = "fa4", impl: str = "auto") -> None:
    """Let models be built with attn_implementation=`name`, computed by `impl`.

    Any model that transformers runs with "sdpa" or "flash_attention_2"; softcaps and sinks too.
    Raises ImportError with the command that installs transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"fa4.transformers needs transformers 4.56 to 5: {INSTALL}") from error
    AttentionInterface.register(name, partial(attention, impl=impl))
    AttentionMaskInterface.register(name, mask)


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    impl: str = "auto",
    **options: Any,
) -> tuple[Any, None]:
    """transformers' attention function: query (B, Hq, Sq, d) -> (out (B, Sq, Hq, dv), None).

    attention_mask: what `mask` made, or a boolean or additive mask of the caller's. options:
    scaling, dropout, sliding_window, softcap, s_aux (the sink's logits (Hq,)), is_causal,
    position_bias, and cu_seq_lens_q, cu_seq_lens_k of sequences packed into one row. Raises
    NotImplementedError for output_attentions and paged caches.
    """
    if options.get("output_attentions"):
        raise NotImplementedError('attention weights are never formed; use "eager" to get them')
    if options.get("cache") is not None:
        raise NotImplementedError("paged caches (continuous batching) are not in this version")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    tensors = tuple(x.transpose(1, 2) for x in (query, key, value))
    chosen: dict[str, Any] = {
        "softmax_scale": options.get("scaling"),
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": options.get("s_aux"),
        **dropout(options.get("dropout", 0.0), query),
    }
    bias = options.get("position_bias")
    if attention_mask is None and causal:
        window = options.get("sliding_window")
        chosen |= {"causal": True, "window_size": (None if window is None else window - 1, None)}
    if attention_mask is None and options.get("cu_seq_lens_q") is not None:
        return _packed(tensors, chosen, options, bias, impl), None
    modification = _modify(attention_mask, bias, tensors)
    out = attend(tensors, chosen, modification, impl=impl)
    return out.to(query.dtype), None  # the oracle's is float64


def _packed(tensors: Any, chosen: Any, options: Any, bias: Any, impl: str) -> Any:
    """Sequences one after the other in a batch of one row."""
    if bias is not None or tensors[0].shape[0] != 1:
        raise NotImplementedError(
            "cu_seq_lens_q needs one row and no position_bias; "
            f"got {tensors[0].shape[0]} rows{'' if bias is None else ' and a bias'}"
        )
    offsets = {f"cu_seqlens_{x}": options[f"cu_seq_lens_{x}"] for x in "qk"}
    rows = tuple(x[0] for x in tensors)
    return attend(rows, chosen | offsets, varlen=True, impl=impl)[None].to(rows[0].dtype)


def _modify(mask: Any, bias: Any, tensors: Any) -> Any:
    """What of mask and bias the window does not say, as a modification; None for nothing."""
    from fa4.dropin.mods import dense_bias, dense_mask

    q, k, _ = tensors
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask is not None:
        mask = mask[..., : shape[3]]  # a static cache's mask may be longer
    if bias is None:
        if mask is None:
            return None
        return (dense_bias if mask.dtype.is_floating_point else dense_mask)(mask, shape)
    if mask is not None and mask.dtype.is_floating_point:
        bias = bias + mask
    elif mask is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    return dense_bias(bias, shape)


def mask(*given: Any, **options: Any) -> Any:
    """transformers' mask function: (B, 1, Sq, Sk) bool, or None for a plain causal mask.

    None means that nothing is padding, that no window hides anything, and that the last query is
    at the last key; and no mask at all where a model allows that (allow_is_bidirectional_skip).
    """
    from transformers.masking_utils import sdpa_mask

    if options.pop("allow_is_causal_skip", True) and _is_plain(options):
        return None
    return sdpa_mask(*given, **options, allow_is_causal_skip=False)


def _is_plain(options: dict[str, Any]) -> bool:
    """Is the mask that is asked for the causal one, aligned to the bottom right?"""
    from transformers.masking_utils import causal_mask_function

    keys, skipped = options.get("kv_length", 0), options.get("kv_offset", 0)
    where = options.get("cache_position")  # of the queries; up to transformers 4.57
    first = options.get("q_offset", 0) if where is None else int(where[0])
    rows = options.get("q_length", 0) if where is None else len(where)
    if not all(isinstance(n, int) for n in (keys, skipped, first, rows)):
        return False  # known on the device only
    window = options.get("local_size")
    if window is None and options.get("mask_function") is not causal_mask_function:
        return False
    padding = options.get("attention_mask")
    full = padding is None or (padding.shape[-1] >= keys + skipped and bool(padding.all()))
    return full and first + rows == keys + skipped and (window is None or keys < window)
