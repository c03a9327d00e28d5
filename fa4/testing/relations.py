"""Properties that compare calls of a back end with one another; the checks are in `metamorphic`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from fa4.testing import metamorphic as check
from fa4.testing import strategies as draw
from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.property import Property, Strategy, dense
from fa4.testing.shrink import SIZES

_SOME: dict[str, Any] = {
    "lengths_q": (*draw.SHORT_LENGTHS, 130),
    "lengths_k": (*draw.SHORT_LENGTHS, 129, 257),
}
_PLANS: dict[str, Any] = {
    "lengths_q": (1, 7, 64, 130),
    "lengths_k": draw.LONG_LENGTHS,
    "values": (*draw.ORDINARY_VALUES, "ramp_up", "ramp_down", "jumps_over"),
    "causal": st.booleans(),
}


def _relation(
    name: str,
    description: str,
    strategy: Strategy,
    relation: Callable[[Backend, Case], float],
    needs: frozenset[str] = frozenset(),
    first_look: int = 2,
) -> Property:
    """A relation holds for the cases of its strategy only: smaller examples keep its features."""
    return Property(
        name, description, relation, strategy, needs=needs, shrinks=SIZES, first_look=first_look
    )


RELATIONS: tuple[Property, ...] = (
    _relation(
        "kv_permutation", "the order of keys does not matter", dense(**_SOME), check.kv_permutation
    ),
    _relation(
        "query_permutation",
        "rows do not influence one another",
        dense(**_SOME),
        check.query_permutation,
    ),
    _relation(
        "batch_permutation",
        "batch entries do not influence one another",
        dense(batch=st.sampled_from((2, 3)), **_SOME),
        check.batch_permutation,
    ),
    _relation(
        "head_permutation",
        "heads do not influence one another",
        dense(heads_k=st.sampled_from((2, 3)), groups=(1, 2, 3), **_SOME),
        check.head_permutation,
    ),
    _relation(
        "gqa_repeats",
        "grouped heads equal repeated keys and values",
        dense(groups=(2, 3, 5, 8), lengths_q=draw.SHORT_LENGTHS, lengths_k=draw.SHORT_LENGTHS),
        check.gqa_repeats,
    ),
    _relation(
        "v_linearity",
        "the output is linear in V",
        dense(**(_SOME | {"values": ("grid",)})),
        check.v_linearity,
    ),
    _relation(
        "kv_concatenation",
        "parts of the keys merge by their LSE",
        dense(**_SOME),
        check.kv_concatenation,
        frozenset({"lse"}),
    ),
    _relation(
        "padding",
        "unused rows change nothing",
        lambda dtypes: draw.varlen_cases(dtypes, layouts=("padded",), causal=st.booleans()),
        check.padding,
        frozenset({"seqused"}),
    ),
    _relation(
        "causal_prefix",
        "first rows of a causal problem stand alone",
        dense(causal=True, groups=(1, 2), **_SOME),
        check.causal_prefix,
        frozenset({"causal"}),
    ),
    _relation(
        "decode_row",
        "the last row of a causal problem equals decoding it",
        dense(causal=True, groups=(1, 2), **_SOME),
        check.decode_row,
        frozenset({"causal"}),
    ),
    _relation(
        "keys_outside_window",
        "keys before every window change nothing",
        dense(
            lengths_q=(1, 7, 64),
            lengths_k=(64, 129, 257),
            window_size=st.sampled_from(((0, None), (0, 0), (0, 3))),
        ),
        check.keys_outside_window,
        frozenset({"window_size"}),
    ),
    _relation(
        "logit_shift",
        "adding a constant to the logits of a row changes only its LSE",
        dense(**(_SOME | {"values": ("grid",)})),
        check.logit_shift,
    ),
    _relation(
        "q_scale",
        "2 q with softmax_scale / 2 is the same",
        dense(softmax_scale=draw.softmax_scales(), **_SOME),
        check.q_scale,
        frozenset({"softmax_scale"}),
    ),
    _relation(
        "split_invariance",
        "num_splits does not change the result",
        dense(num_splits=draw.split_counts(), **_PLANS),
        check.plan_invariance,
        frozenset({"num_splits"}),
    ),
    _relation(
        "tile_invariance",
        "tile sizes do not change the result",
        dense(tiles=draw.tile_sizes(), **_PLANS),
        check.plan_invariance,
        frozenset({"config"}),
    ),
    _relation(
        "tau_invariance",
        "the rescaling threshold does not change the result",
        dense(tau=st.sampled_from((0.0, 1.0, 4.0)), **_PLANS),
        check.plan_invariance,
        frozenset({"config"}),
    ),
    _relation("constant_v", "equal values give equal rows", dense(**_SOME), check.constant_v),
    _relation(
        "convexity",
        "outputs are weighted means of V",
        dense(**(_SOME | {"values": ("normal", "scale_100", "peaks", "low", "activations")})),
        check.convexity,
    ),
    _relation(
        "window_spellings",
        "all ways to write a causal mask agree",
        dense(causal=True, **_SOME),
        check.window_spellings,
        frozenset({"causal", "window_size"}),
    ),
    _relation(
        "lse_requested",
        "asking for the LSE does not change the output",
        dense(**_SOME),
        check.lse_requested,
        frozenset({"return_lse", "lse"}),
    ),
)
