"""Properties that compare with the float64 oracle: features, extreme values, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from fa4.testing import strategies as draw
from fa4.testing.backends import DTYPES, FP8, Backend
from fa4.testing.budget import assert_within_budget
from fa4.testing.case import SCORE_MODS, Case
from fa4.testing.layouts import build_inputs
from fa4.testing.property import Property, Strategy, dense, varlen


def equals_oracle(backend: Backend, case: Case) -> float:
    """Forward: out, and LSE if there is one, within their budgets."""
    inputs = build_inputs(case)
    return assert_within_budget(inputs, backend.forward(inputs))


def gradients_equal_oracle(backend: Backend, case: Case, *, with_dlse: bool = False) -> float:
    """Forward and backward: every gradient within its budget."""
    inputs = build_inputs(case)
    saved = backend.forward(inputs)
    if case.score_mod is not None:
        derivative = {"score_mod_bwd": SCORE_MODS[case.score_mod][1]}
        inputs = replace(inputs, options=inputs.options | derivative)
    grads = backend.gradients(inputs, saved, with_dlse=with_dlse)
    return assert_within_budget(inputs, grads, with_dlse=with_dlse)


def _oracle(
    name: str,
    description: str,
    strategy: Strategy,
    needs: Iterable[str] = (),
    dtypes: tuple[str, ...] = DTYPES,
) -> Property:
    return Property(name, description, strategy, equals_oracle, frozenset(needs), dtypes)


_SHORT: dict[str, Any] = {"lengths_q": draw.SHORT_LENGTHS, "lengths_k": draw.SHORT_LENGTHS}
_ABSOLUTE = draw.ORDINARY_VALUES

FEATURES = (
    _oracle("plain", "softmax(scale Q K^T) V for any lengths and head dims", dense()),
    _oracle("causal", "the causal mask is bottom-right aligned", dense(causal=True), ["causal"]),
    _oracle(
        "window",
        "sliding windows: both sides, None and -1 unbounded, offsets, off-by-one edges",
        dense(window_size=True),
        ["window_size"],
    ),
    _oracle(
        "causal_window",
        "causal together with a window",
        dense(window_size=True, causal=True),
        ["causal", "window_size"],
    ),
    _oracle(
        "gqa",
        "query head h reads KV head h // group",
        dense(groups=draw.GROUPS[1:], **_SHORT),
    ),
    _oracle(
        "softmax_scale",
        "any factor of the scores, 0 and negative included",
        dense(softmax_scale=draw.softmax_scales()),
        ["softmax_scale"],
    ),
    _oracle(
        "softcap",
        "softcap * tanh(s / softcap)",
        dense(softcap=draw.softcaps(), causal=st.booleans(), values=("normal", "scale_100")),
        ["softcap"],
    ),
    _oracle(
        "sink",
        "a learnable sink is an unscaled logit without a value, counted once",
        dense(
            sink=draw.sinks(),
            groups=(1, 2),
            causal=st.booleans(),
            softmax_scale=draw.softmax_scales(),
        ),
        ["learnable_sink"],
    ),
    _oracle(
        "splits",
        "split KV, more splits than tiles included",
        dense(
            num_splits=draw.split_counts(),
            lengths_k=(1, 64, *draw.LONG_LENGTHS),
            lengths_q=draw.SHORT_LENGTHS,
            causal=st.booleans(),
        ),
        ["num_splits"],
    ),
    _oracle(
        "splits_sink",
        "split KV counts a sink once",
        dense(
            num_splits=draw.split_counts(),
            sink=draw.sinks(),
            lengths_k=draw.LONG_LENGTHS,
            lengths_q=draw.SHORT_LENGTHS,
        ),
        ["num_splits", "learnable_sink"],
    ),
    _oracle(
        "score_mod",
        "score_mod on scaled scores, -inf included",
        dense(score_mod=draw.score_mods(), groups=(1, 2)),
        ["score_mod"],
    ),
    _oracle(
        "mask_mod",
        "mask_mod by position, head and batch entry; rows and tiles without keys",
        dense(mask_mod=draw.mask_mods(), groups=(1, 2)),
        ["mask_mod"],
    ),
    _oracle(
        "block_sparse",
        "full, partial and skipped blocks; row blocks that visit nothing",
        draw.sparse_cases,
        ["block_sparse_tensors", "mask_mod"],
    ),
    _oracle(
        "dropout",
        "dropout with fa4's counter-based generator",
        dense(dropout_p=st.sampled_from((0.5, 0.1, 0.9)), causal=st.booleans()),
        ["dropout"],
    ),
    _oracle(
        "fp8_descale",
        "FP8 inputs with factors per batch entry and KV head",
        lambda dtypes: draw.dense_cases(
            dtypes, descale=True, groups=(1, 2), causal=st.booleans(), values=("normal",)
        ),
        ["q_descale", "k_descale", "v_descale"],
        FP8,
    ),
    _oracle(
        "varlen",
        "packed sequences (cu_seqlens), empty ones among them",
        varlen("packed", causal=st.booleans(), window_size=True),
        ["varlen", "causal", "window_size"],
    ),
    _oracle(
        "seqused",
        "padded sequences (seqused) whose unused rows hold NaN",
        varlen("padded", causal=st.booleans()),
        ["seqused"],
    ),
    _oracle(
        "paged",
        "paged K and V: shuffled table, unused slots NaN, unused entries out of range",
        varlen("paged", causal=st.booleans()),
        ["paged"],
    ),
    _oracle(
        "paged_splits_sink",
        "paged, split and with a sink at once",
        varlen("paged", causal=True, num_splits=draw.split_counts(), sink=draw.sinks()),
        ["paged", "causal", "num_splits", "learnable_sink"],
    ),
    _oracle(
        "strided",
        "q, k, v as views of fused or padded buffers",
        dense(strided=True, groups=(1, 2), **_SHORT),
    ),
)

# One property per regime: (regime, what must hold, lengths of K).
_REGIMES = (
    ("scale_100", "q 100 times larger: no overflow, one winner per row", draw.LENGTHS),
    ("equal", "equal logits: the mean of V", draw.LENGTHS),
    ("peaks", "one-hot queries and keys", draw.LENGTHS),
    ("ramp_up", "logits that rise with every key", draw.LONG_LENGTHS),
    ("ramp_down", "logits that fall with every key", draw.LONG_LENGTHS),
    ("jumps_under", "the maximum rises by just under 2^8 per tile", draw.LONG_LENGTHS),
    ("jumps_over", "the maximum rises by just over 2^8 per tile", draw.LONG_LENGTHS),
    ("low", "every logit far below zero: not an empty row", draw.LENGTHS),
    ("denormals", "subnormal inputs", draw.LENGTHS),
    ("largest", "values near the largest finite one", draw.LENGTHS),
)
EXTREMES = (
    *(
        _oracle(
            f"values_{name}",
            text,
            dense(values=(name,), lengths_q=(1, 3, 17, 64, 130), lengths_k=keys),
        )
        for name, text, keys in _REGIMES
    ),
    _oracle(
        "masked_nan",
        "NaN and infinities in keys that no row sees change nothing",
        dense(
            values=("masked_nan",),
            window_size=st.sampled_from(((1, None), (0, 0), (64, 0))),
            lengths_q=draw.SHORT_LENGTHS,
            lengths_k=(129, 257),
        ),
        ["window_size", "masked_nan"],
    ),
    _oracle(
        "masked_nan_heads",
        "NaN and infinities in keys that one KV head does not see stay out of its rows",
        lambda d: draw.sparse_cases(d, values=("masked_nan",)),
        ["block_sparse_tensors", "mask_mod", "masked_nan"],
    ),
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

_GRADIENT_VALUES = ("normal", "activations", "peaks", "ramp_up", "equal")


def _gradients(
    name: str,
    description: str,
    strategy: Strategy,
    needs: Iterable[str] = (),
    *,
    with_dlse: bool = False,
) -> Property:
    check = partial(gradients_equal_oracle, with_dlse=with_dlse)
    return Property(name, description, strategy, check, frozenset({"gradients", *needs}))


_MODERATE: dict[str, Any] = {
    "values": _GRADIENT_VALUES,
    "lengths_q": (*draw.SHORT_LENGTHS, 129, 130),
    "lengths_k": (*draw.SHORT_LENGTHS, 129, 257),
}
GRADIENTS = (
    _gradients(
        "gradients", "dQ, dK, dV, grouped heads included", dense(groups=(1, 2, 3, 7), **_MODERATE)
    ),
    _gradients(
        "gradients_masked",
        "gradients under causal masks and windows, rows without keys included",
        dense(causal=st.booleans(), window_size=True, groups=(1, 2), **_MODERATE),
        ["causal", "window_size"],
    ),
    _gradients(
        "gradients_softcap",
        "gradients through softcap",
        dense(softcap=draw.softcaps(), **_MODERATE),
        ["softcap"],
    ),
    _gradients(
        "gradients_sink",
        "gradients with a sink, its own included",
        dense(sink=draw.sinks(), causal=st.booleans(), groups=(1, 2), **_MODERATE),
        ["learnable_sink", "causal"],
    ),
    _gradients(
        "gradients_score_mod",
        "gradients through score_mod_bwd",
        dense(score_mod=draw.score_mods(), **_MODERATE),
        ["score_mod"],
    ),
    _gradients(
        "gradients_lse",
        "gradients with an incoming gradient of the LSE",
        dense(causal=st.booleans(), **_MODERATE),
        ["dlse", "lse"],
        with_dlse=True,
    ),
    _gradients(
        "gradients_varlen",
        "gradients of packed sequences, empty ones among them",
        varlen("packed", causal=st.booleans()),
        ["varlen", "causal"],
    ),
)
