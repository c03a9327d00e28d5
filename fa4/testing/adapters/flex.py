"""torch's FlexAttention: masks, windows, softcap and modifiers as code; compiled on a GPU.

On a CPU it runs uncompiled and has no gradients. A sink is added through the LSE. Packed sequences
are one long sequence with a mask between documents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fa4.config import normalize_window
from fa4.reference import SeqlenInfo
from fa4.testing.adapters.common import refuses, takes

_KEYWORDS = (
    "causal", "window_size", "softmax_scale", "softcap", "learnable_sink", "score_mod", "mask_mod",
    "aux_tensors", "return_lse",
)  # fmt: skip
# What its compiler says of head dims below 16, and of those too large for shared memory.
_REFUSED = r"\bNYI\b|no valid triton configs|out of resource"
RECOMPILATIONS = 10_000  # each case has other sizes; torch gives up after eight


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors."""
    import torch

    @takes(*_KEYWORDS)
    def attend(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        if q.element_size() == 1:
            raise NotImplementedError("FlexAttention takes no FP8")
        result = _run(q, k, v, _Dense(q, k), options)
        return result if return_lse else result[0]

    @takes("cu_seqlens_q", "cu_seqlens_k", *_KEYWORDS)
    def varlen(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        where = _Packed(options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k"))
        out, lse = _run(q[None], k[None], v[None], where, options)
        return (out[0], lse[0]) if return_lse else out[0]

    attend.__name__ = name
    attend.device = device or ("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.unsupported = refuses(_REFUSED)  # type: ignore[attr-defined]
    if attend.device == "cpu":  # type: ignore[attr-defined]
        attend.backward = None  # type: ignore[attr-defined]
    return attend


class _Dense:
    """Where row i and key j of batch entry b lie: at i and j of b."""

    def __init__(self, q: Any, k: Any) -> None:
        self.info = SeqlenInfo(q.shape[1], k.shape[1])

    def place(self, b: Any, i: Any, j: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(sequence, row, key, lengths, are they of the same sequence? None for always)."""
        return b, i, j, self.info, None


class _Packed:
    """The same for one long row of sequences."""

    def __init__(self, offsets_q: Any, offsets_k: Any) -> None:
        self.rows, self.keys = _documents(offsets_q), _documents(offsets_k)
        self.lengths = tuple(x.diff() for x in (offsets_q, offsets_k))

    def place(self, b: Any, i: Any, j: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(sequence of the row, row and key inside theirs, lengths, are they the same?)."""
        (document, row), (other, key) = self.rows, self.keys
        sequence = document[i]
        info = SeqlenInfo(*(x[sequence] for x in self.lengths))
        return sequence, row[i], key[j], info, sequence == other[j]


def _documents(offsets: Any) -> tuple[Any, Any]:
    """(number of the sequence, place inside it) of each row."""
    import torch

    lengths = offsets.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    return document, torch.arange(len(document), device=offsets.device) - offsets[document]


def _mask(where: Any, options: dict[str, Any]) -> Any:
    """FlexAttention's mask function: may row i see key j? None if every row sees every key."""
    left, right = normalize_window(
        options.get("window_size", (None, None)), options.get("causal", False)
    )
    modifier, aux = options.get("mask_mod"), options.get("aux_tensors")
    if (left, right, modifier) == (None, None, None) and isinstance(where, _Dense):
        return None

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        sequence, row, key, info, keep = where.place(b, i, j)
        distance = key - row - (info.seqlen_k - info.seqlen_q)
        keep = distance == distance if keep is None else keep
        if left is not None:
            keep = keep & (distance >= -left)
        if right is not None:
            keep = keep & (distance <= right)
        if modifier is not None:
            keep = keep & modifier(sequence, h, row, key, info, aux)
        return keep

    return visible


def _score(where: Any, options: dict[str, Any]) -> Any:
    """FlexAttention's score function: softcap or the modifier; None for neither."""
    import torch

    softcap = options.get("softcap", 0.0)
    modifier: Any = options.get("score_mod")
    aux = options.get("aux_tensors")

    def cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return softcap * (score / softcap).tanh()

    def modify(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        sequence, row, key, info, _ = where.place(b, i, j)
        changed = modifier(score, sequence, h, row, key, info, aux)
        return torch.as_tensor(changed).to(score.dtype)  # torch traces NumPy's functions too

    return cap if softcap else modify if modifier is not None else None


@lru_cache
def _flex(compiled: bool) -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    config: Any = torch._dynamo.config
    for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(config, limit):
            setattr(config, limit, RECOMPILATIONS)
    return torch.compile(flex_attention, dynamic=False)


def _run(q: Any, k: Any, v: Any, where: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """(out (B, S, H, D), lse (B, H, S))."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    if 0 in (*q.shape, *k.shape):
        raise NotImplementedError("FlexAttention takes no empty tensors")
    mask = _mask(where, options)
    if mask is not None:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        mask = create_block_mask(mask, *sizes, device=q.device.type)
    try:
        out, lse = _flex(q.device.type == "cuda")(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=_score(where, options),
            block_mask=mask,
            scale=options.get("softmax_scale"),
            enable_gqa=q.shape[2] != k.shape[2],
            return_lse=True,
        )
    except torch._dynamo.exc.Unsupported as error:
        if not {"score_mod", "mask_mod"} & set(options):
            raise
        why = str(error).partition("\n")[0]
        raise NotImplementedError(f"torch cannot trace the modifier: {why}") from error
    sink = options.get("learnable_sink")
    if sink is not None:  # one more key of that logit and without a value
        total = torch.logaddexp(lse, sink[:, None].to(lse.dtype))
        weight = torch.where(total.isneginf(), 0.0, (lse - total).exp())
        out, lse = (out * weight[..., None]).to(q.dtype), total
    return out.transpose(1, 2), lse
