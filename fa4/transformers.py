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

INSTALL = "pip install 'transformers>=4.56,<6' 'torch>=2.9,<2.14'"
TAKEN = (
    "eager",
    "sdpa",
    "flash",
    "flex_attention",
    "|",
    "/",
)  # what transformers looks for in names


def register(name: str = "fa4", impl: str = "auto") -> None:
    """Let models be built with attn_implementation=`name`, computed by `impl`.

    Any model whose attention goes through transformers' attention interface; softcaps and sinks
    too. A model is checked when it is made and by `set_attn_implementation`: where nothing would
    be computed here, a ValueError of one line names it (`fa4.dropin.guard`).
    Raises ImportError with the command that installs transformers, ValueError for a name that
    means something else to transformers.
    """
    taken = [word for word in TAKEN if word in name]
    if taken or not name:
        raise ValueError(f"name must not be empty or contain any of {TAKEN}; got {name!r}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"fa4.transformers needs transformers 4.56 to 5: {INSTALL}") from error
    from transformers.masking_utils import eager_mask

    from fa4.dropin.guard import ADDITIVE, guard

    AttentionInterface.register(name, partial(attention, impl=impl))
    AttentionMaskInterface.register(name, mask)
    foreign = partial(attention, impl=impl, eager_masks=True)
    AttentionInterface.register(name + ADDITIVE, foreign)
    AttentionMaskInterface.register(name + ADDITIVE, eager_mask)
    guard(name)


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    impl: str = "auto",
    eager_masks: bool = False,
    **options: Any,
) -> tuple[Any, None]:
    """transformers' attention function: query (B, Hq, Sq, d) -> (out (B, Sq, Hq, dv), None).

    attention_mask: what `mask` made, or a boolean or additive mask of the caller's. eager_masks:
    it is that of "eager", of which None hides nothing. options:
    scaling, dropout, sliding_window, softcap, s_aux (the sink's logits (Hq,)), sinks (the same of
    every query, (B, Hq, Sq, 1)), is_causal, position_bias, indices (keys that are attended to,
    (B, Sq, n)), and cu_seq_lens_q, cu_seq_lens_k of sequences packed into one row. Raises
    NotImplementedError for output_attentions, blocks of keys and paged caches.
    """
    if options.get("output_attentions"):
        raise NotImplementedError('attention weights are never formed; use "eager" to get them')
    if options.get("cache") is not None:
        raise NotImplementedError("paged caches (continuous batching) are not in this version")
    if options.get("block_indices") is not None:
        raise NotImplementedError('block_indices (sparse attention) are not here; use "sdpa"')
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = causal and not eager_masks
    tensors = tuple(x.transpose(1, 2) for x in (query, key, value))
    chosen: dict[str, Any] = {
        "softmax_scale": options.get("scaling"),
        "softcap": options.get("softcap") or 0.0,
        "learnable_sink": options.get("s_aux"),
        **dropout(options.get("dropout", 0.0), query),
    }
    bias = options.get("position_bias")
    if options.get("indices") is not None:
        attention_mask = _only(options["indices"], attention_mask, tensors, causal)
    if attention_mask is None and causal:
        window = options.get("sliding_window")
        chosen |= {"causal": True, "window_size": (None if window is None else window - 1, None)}
    if attention_mask is None and options.get("cu_seq_lens_q") is not None:
        return _packed(tensors, chosen, options, bias, impl), None
    dense = _combine(attention_mask, bias, key.shape[2])
    modification = _modification(dense, tensors)
    sinks = options.get("sinks")
    if sinks is None:
        out = attend(tensors, chosen, modification, impl=impl)
    else:
        out, lse = attend(tensors, chosen, modification, impl=impl, return_lse=True)
        out = out * (lse[..., None] - _below_top(sinks, dense)).sigmoid().transpose(1, 2)
    return out.to(query.dtype), None  # the oracle's is float64


def _only(indices: Any, mask: Any, tensors: Any, causal: bool) -> Any:
    """The mask (B, 1, Sq, Sk) without the keys that `indices` (B, Sq, n) does not name."""
    q, k, _ = tensors
    shown = q.new_zeros((q.shape[0], 1, q.shape[1], k.shape[1] + 1), dtype=indices.dtype)
    last = indices.long().masked_fill(indices < 0, k.shape[1])  # -1: no key
    shown = shown.scatter(-1, last[:, None], 1)[..., :-1].bool()
    if mask is None:
        return shown.tril(k.shape[1] - q.shape[1]) if causal else shown
    mask = mask[..., : k.shape[1]]
    if mask.dtype.is_floating_point:
        return mask.masked_fill(~shown, float("-inf"))
    return mask & shown


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


def _combine(mask: Any, bias: Any, keys: int) -> Any:
    """Mask and bias as one tensor, boolean or added; None for neither."""
    if mask is not None:
        mask = mask[..., :keys]  # a static cache's mask may be longer
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias + mask if mask.dtype.is_floating_point else bias.masked_fill(~mask, float("-inf"))


def _modification(dense: Any, tensors: Any) -> Any:
    from fa4.dropin.mods import dense_bias, dense_mask

    if dense is None:
        return None
    q, k, _ = tensors
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return (dense_bias if dense.dtype.is_floating_point else dense_mask)(dense, shape)


def _below_top(sinks: Any, dense: Any) -> Any:
    """Logits of the sinks as the LSE has the others: `dense_bias` takes a row's largest off."""
    if dense is None or not dense.dtype.is_floating_point:
        return sinks
    top = dense.detach().amax(dim=-1, keepdim=True)
    return sinks - top.where(top.isfinite(), 0.0)


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
    if getattr(options.get("config"), "use_bidirectional_attention", None) in (True, "all"):
        return False  # its modules take no mask for one that hides nothing (Gemma in PaliGemma)
    window = options.get("local_size")
    if window is None and options.get("mask_function") is not causal_mask_function:
        return False
    if first + rows != keys + skipped or (window is not None and keys >= window):
        return False
    return _is_full(options.get("attention_mask"), keys + skipped)


def _is_full(padding: Any, keys: int) -> bool:
    """Is nothing padding? Under a trace, where no value can be read, only if nothing is given."""
    if padding is None:
        return True
    if _is_traced(padding):
        return False
    return padding.shape[-1] >= keys and bool(padding.all())


def _is_traced(tensor: Any) -> bool:
    """Is it recorded, by torch.compile, torch.export or a CUDA graph, instead of computed?"""
    import torch

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return torch._is_functional_tensor(tensor) or isinstance(
        tensor, torch._subclasses.fake_tensor.FakeTensor
    )
