"""Properties of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), by its head dims.

Absorbed, as in decoding: q and k have 576 channels, 512 of the latent and 64 that carry the rotary
position; V is the latent itself, a view of the first 512 channels of K; all query heads share one
KV head. Not absorbed, as in prefill and training: head dims 192 and 128, one KV head per query
head, and the last 64 channels of K the same in all heads. The factor is 192^-1/2 in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.checks import equals_oracle, gradients_equal_oracle
from fa4.testing.combinations import all_needs
from fa4.testing.numerics import FP8_TYPES
from fa4.testing.property import Plan, Property
from fa4.testing.shrink import SIZES

LATENT, ROPE, NOPE = 512, 64, 128  # channels
ABSORBED: dict[str, Any] = {
    "head_dim": LATENT + ROPE, "head_dim_v": LATENT, "softmax_scale": (NOPE + ROPE) ** -0.5,
    "group": 16,
}  # fmt: skip
EXPANDED: dict[str, Any] = {"head_dim": NOPE + ROPE, "head_dim_v": NOPE, "heads_k": 2}
_DECODE: dict[str, Any] = ABSORBED | {"seqlen_q": 2, "seqlen_k": 70, "batch": 2}
_LATENT: dict[str, Any] = {"strides": "latent", "values": "latent"}
_SEQUENCES = ((1, 40), (3, 19), (1, 65))
_SHRINKS = (SIZES | {"seqlen_q", "seqlen_k", "lengths"}) - {"head_dim", "head_dim_v"}

# (name, what must hold, features it needs, fields of its cases)
_DENSE: tuple[tuple[str, str, tuple[str, ...], tuple[dict[str, Any], ...]], ...] = (
    ("rope_part", "the 64 channels of the position count, where nothing else differs", (),
     (_DECODE | {"values": "rope_part"},)),
    ("latent_part", "the 512 channels of the latent count, where nothing else differs", (),
     (_DECODE | {"values": "latent_part"},)),
    ("latent_view", "V is a view of the first 512 channels of K", (),
     (_DECODE | _LATENT, _DECODE | _LATENT | {"seqlen_k": 257, "batch": 1})),
    ("many_heads", "128 heads that share the latent", (),
     (_DECODE | _LATENT | {"group": 128, "seqlen_q": 1, "batch": 1},)),
    ("causal", "the causal mask counts positions, not heads that share the latent", ("causal",),
     (_DECODE | _LATENT | {"seqlen_q": 4, "causal": True},)),
    ("splits", "split keys of the latent", ("splits",),
     (_DECODE | _LATENT | {"num_splits": 3, "seqlen_k": 300, "batch": 1},)),
    ("varlen", "packed queries and latents", ("varlen",),
     (ABSORBED | _LATENT | {"layout": "packed", "lengths": _SEQUENCES},)),
    ("paged", "latents in pages, V a view of them", ("paged",),
     (ABSORBED | _LATENT | {"layout": "paged", "lengths": _SEQUENCES, "page_size": 64},)),
)  # fmt: skip
_PREFILL: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("prefill", ("causal",),
     EXPANDED | {"causal": True, "seqlen_q": 65, "seqlen_k": 65, "values": "shared_rope"}),
    ("prefill_chunk", ("causal",),
     EXPANDED | {"causal": True, "seqlen_q": 33, "seqlen_k": 140, "values": "shared_rope"}),
    ("prefill_varlen", ("causal", "varlen"),
     EXPANDED | {"causal": True, "layout": "packed", "lengths": ((33, 33), (0, 5), (17, 60)),
                 "values": "shared_rope"}),
)  # fmt: skip


def _property(
    name: str,
    description: str,
    features: Iterable[str],
    fields: tuple[dict[str, Any], ...],
    check: Callable[[Backend, Case], float] = equals_oracle,
    judged: str = "lse",
) -> Property:
    def listed(plan: Plan) -> list[Case]:
        return [
            Case(dtype=dtype, seed=plan.seed + n, **shape)
            for n, shape in enumerate(fields)
            for dtype in plan.dtypes
        ]

    needs = {"softmax_scale"} if "softmax_scale" in fields[0] else set()
    needs |= {judged} if judged == "gradients" else set()
    return Property(
        name, description, check, listed=listed, dtypes=("bf16", "fp16"),
        needs=all_needs(*features) | needs, levels=(judged,), shrinks=_SHRINKS, first_look=2,
    )  # fmt: skip


# Right behind what is plain: these head dims come in other properties too.
PLAIN_MLA = _property(
    "mla_prefill_rope_part",
    "head dims 192 and 128: the position's 64 channels count, where nothing else differs",
    (),
    (EXPANDED | {"seqlen_q": 5, "seqlen_k": 40, "values": "rope_part"},),
)
MLA: tuple[Property, ...] = (
    *(_property(f"mla_{name}", text, needs, fields) for name, text, needs, fields in _DENSE),
    replace(
        _property("mla_fp8", "an FP8 latent", ("causal",),
                  (_DECODE | _LATENT | {"seqlen_k": 130, "causal": True},)),
        dtypes=FP8_TYPES,
    ),
    *(
        _property(f"mla_{name}", "heads of 192 and 128 channels, the position's 64 shared by all",
                  needs, (fields,))
        for name, needs, fields in _PREFILL
    ),
)  # fmt: skip
GRADIENT_MLA = _property(
    "gradients_mla",
    "dQ, dK and dV of heads of 192 and 128 channels",
    ("causal",),
    tuple(fields for name, _, fields in _PREFILL if name != "prefill_varlen"),
    gradients_equal_oracle,
    "gradients",
)
