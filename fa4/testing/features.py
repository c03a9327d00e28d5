"""Properties against the float64 oracle: each feature alone, extreme values, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from fa4.testing import strategies as draw
from fa4.testing.backends import DTYPES
from fa4.testing.case import Case
from fa4.testing.checks import (
    equals_oracle,
    gradients_equal_oracle,
    lse_gradients_equal_oracle,
)
from fa4.testing.combinations import all_needs, cases_of
from fa4.testing.design import combine
from fa4.testing.property import Property, Strategy, dense, varlen


def _oracle(
    name: str,
    description: str,
    strategy: Strategy | None = None,
    needs: Iterable[str] = (),
    dtypes: tuple[str, ...] = DTYPES,
    group: str = "core",
) -> Property:
    return Property(
        name, description, equals_oracle, strategy,
        needs=frozenset(needs), dtypes=dtypes, group=group, levels=("lse",),
    )  # fmt: skip


def _feature(
    name: str, description: str, strategy: Strategy | None = None, first_look: int = 4
) -> Property:
    """A feature of `fa4.testing.levels` alone: each of its levels, and what Hypothesis draws."""
    return Property(
        name, description, equals_oracle, strategy,
        listed=cases_of(name, combine((name,))), needs=all_needs(name), levels=("lse",),
        first_look=first_look,
    )  # fmt: skip


def _varlen(layout: str) -> Strategy:
    """A layout and nothing else."""
    return varlen(layout, groups=(1,))


_SHORT: dict[str, Any] = {"lengths_q": draw.SHORT_LENGTHS, "lengths_k": draw.SHORT_LENGTHS}

FEATURES = (
    Property(
        "plain",
        "softmax(scale Q K^T) V for any lengths and head dims",
        equals_oracle,
        dense(),
        listed=cases_of("plain", [{}] * 4),  # each length class in each element type
        levels=("lse",),
        first_look=20,
    ),
    _feature("causal", "the causal mask is bottom-right aligned", dense(causal=True), 8),
    Property(
        "causal_many_queries",
        "masks of more than 256 queries: bottom-right aligned in every query tile",
        equals_oracle,
        listed=cases_of("causal_many_queries", [{"causal": True, "rows": (290, 1030)}]),
        needs=all_needs("causal"),
        levels=("lse",),
        first_look=4,
    ),
    _feature(
        "window",
        "sliding windows: both sides, None and -1 unbounded, offsets, off-by-one edges",
        dense(window_size=True),
        8,
    ),
    _feature(
        "gqa", "query head h reads KV head h // group", dense(groups=draw.GROUPS[1:], **_SHORT)
    ),
    _feature(
        "softmax_scale",
        "any factor of the scores",
        dense(softmax_scale=draw.softmax_scales()),
    ),
    Property(
        "softmax_scale_sign",
        "a factor of 0, and a negative one: the maximum is that of scaled scores",
        equals_oracle,
        listed=cases_of("softmax_scale_sign", [{"softmax_scale": (0.0, -16.0, -0.25)}]),
        needs=all_needs("softmax_scale"),
        levels=("lse",),
        first_look=12,
    ),
    _feature(
        "softcap",
        "softcap * tanh(s / softcap)",
        dense(softcap=draw.softcaps(), values=("normal", "scale_100")),
    ),
    _feature(
        "sink",
        "a learnable sink is an unscaled logit without a value, counted once",
        dense(sink=draw.sinks()),
    ),
    _feature("score_mod", "score_mod on scaled scores, -inf included"),
    _feature(
        "mask_mod",
        "mask_mod by position, head and batch entry; rows and tiles without keys",
        dense(mask_mod=draw.mask_mods()),
    ),
    _feature("aux_tensors", "aux_tensors reach score_mod and mask_mod as they were given"),
    _feature(
        "splits",
        "split KV, more splits than tiles included",
        dense(num_splits=draw.split_counts(), lengths_k=(1, 64, 257), lengths_q=(1, 3, 17)),
    ),
    _feature("dropout", "dropout with fa4's counter-based generator"),
    _oracle(
        "block_sparse",
        "full, partial and skipped blocks; row blocks that visit nothing",
        draw.sparse_cases,
        ["block_sparse_tensors", "mask_mod"],
    ),
    _feature(
        "varlen",
        "packed sequences (cu_seqlens), empty ones among them",
        _varlen("packed"),
        first_look=20,
    ),
    _feature(
        "seqused", "padded sequences (seqused): what is unused is not read", _varlen("padded")
    ),
    _feature(
        "paged",
        "paged K and V: shuffled table, unused entries out of range, slots unused",
        _varlen("paged"),
    ),
    _oracle(
        "strided",
        "q, k, v as views of fused or padded buffers, rows at multiples of 16 bytes",
        dense(strided=8, groups=(1, 2), **_SHORT),
    ),
)

# One property per regime: (regime, what must hold, lengths of K).
_REGIMES = (
    ("scale_100", "q 100 times larger: no overflow, one winner per row", draw.LENGTHS),
    ("equal", "equal logits: the mean of V", draw.LENGTHS),
    ("peaks", "one-hot queries and keys", draw.LENGTHS),
    ("ramp_up", "logits that rise with every key", draw.VERY_LONG_LENGTHS),
    ("ramp_down", "logits that fall with every key", draw.VERY_LONG_LENGTHS),
    ("jumps_under", "the maximum rises by just under 2^8 per tile", draw.LONG_LENGTHS),
    ("jumps_over", "the maximum rises by just over 2^8 per tile", draw.LONG_LENGTHS),
    ("low", "every logit far below zero: not an empty row", draw.LENGTHS),
    ("denormals", "subnormal inputs", draw.LENGTHS),
    ("largest", "values near the largest finite one", draw.LENGTHS),
)


def _regime(name: str, description: str, keys: tuple[int, ...]) -> Property:
    longest = partial(Case, seqlen_q=3, seqlen_k=keys[-1], head_dim=32, head_dim_v=32)
    return Property(
        f"values_{name}",
        description,
        equals_oracle,
        dense(values=(name,), lengths_q=(1, 3, 17, 64, 130), lengths_k=keys),
        listed=lambda plan: [longest(dtype=x, values=name) for x in plan.dtypes],
        levels=("lse",),
        first_look=4,
    )


REGIMES = tuple(_regime(*regime) for regime in _REGIMES)
EXTREMES = (
    _oracle("empty_work", "no batch entry, no query or no key", draw.empty_cases),
    _oracle(
        "rows_without_keys",
        "rows before the first key (seqlen_q > seqlen_k): out 0, LSE -inf",
        dense(causal=True, lengths_q=(64, 129, 130, 257), lengths_k=(1, 3, 31, 127, 128)),
        ["causal"],
    ),
    _oracle(
        "rows_without_keys_sink",
        "rows before the first key take the sink's logit as LSE",
        dense(causal=True, sink=draw.sinks(), lengths_q=(64, 130, 257), lengths_k=(1, 3, 127)),
        ["causal", "learnable_sink"],
    ),
)

_NAN: dict[str, Any] = {"values": ("masked_nan",)}
ROBUSTNESS = (
    _oracle(
        "strided_unaligned",
        "views whose rows start anywhere",
        dense(strided=3, groups=(1, 2), **_SHORT),
        group="robustness",
    ),
    _oracle(
        "masked_nan",
        "NaN and infinities in keys that no row sees change nothing",
        dense(
            window_size=st.sampled_from(((1, None), (0, 0), (64, 0))),
            lengths_q=draw.SHORT_LENGTHS,
            lengths_k=(129, 257),
            **_NAN,
        ),
        ["window_size", "masked_nan"],
        group="robustness",
    ),
    _oracle(
        "masked_nan_heads",
        "NaN and infinities in keys that one KV head does not see stay out of its rows",
        lambda dtypes: draw.sparse_cases(dtypes, **_NAN),
        ["block_sparse_tensors", "mask_mod", "masked_nan"],
        group="robustness",
    ),
    _oracle(
        "unused_nan_seqused",
        "NaN in rows behind the used ones (seqused) changes nothing",
        varlen("padded", **_NAN),
        ["seqused", "masked_nan"],
        group="robustness",
    ),
    _oracle(
        "unused_nan_paged",
        "NaN in slots and pages that no sequence uses changes nothing",
        varlen("paged", **_NAN),
        ["paged", "masked_nan"],
        group="robustness",
    ),
)

_GRADIENT_VALUES = ("normal", "activations", "peaks", "ramp_up", "equal")


def _gradients(
    name: str,
    description: str,
    strategy: Strategy,
    needs: Iterable[str] = (),
    *,
    with_dlse: bool = False,
) -> Property:
    check = lse_gradients_equal_oracle if with_dlse else gradients_equal_oracle
    levels = ("gradients", "lse", "dlse") if with_dlse else ("gradients",)
    return Property(
        name, description, check, strategy, needs=frozenset({"gradients", *needs}), levels=levels
    )


_MODERATE: dict[str, Any] = {
    "values": _GRADIENT_VALUES,
    "lengths_q": (*draw.SHORT_LENGTHS, 129),
    "lengths_k": (*draw.SHORT_LENGTHS, 129, 257),
}
GRADIENTS = (
    _gradients("gradients", "dQ, dK and dV", dense(**_MODERATE)),
    _gradients(
        "gradients_lse",
        "gradients with an incoming gradient of the LSE",
        dense(**_MODERATE),
        ["dlse", "lse"],
        with_dlse=True,
    ),
    _gradients(
        "gradients_lse_sink",
        "the LSE's gradient reaches dQ, dK and the sink",
        dense(sink=draw.sinks(), **_SHORT),
        ["dlse", "lse", "learnable_sink"],
        with_dlse=True,
    ),
)
GRADIENTS_MASKED = _gradients(
    "gradients_masked",
    "gradients under causal masks and windows, rows without keys included",
    dense(causal=st.booleans(), window_size=True, groups=(1, 2), **_MODERATE),
    ["causal", "window_size"],
)
