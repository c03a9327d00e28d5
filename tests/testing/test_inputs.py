"""Arrays hold what their sequences say, for every case that there may be, listed or not.

Smaller examples and groups of causes leave out one feature after another, so that they come to
cases that no property lists: an array that says something else than its sequences would accuse
whoever is right.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fa4.testing import Case, assert_within_budget, build_inputs, load_backend
from fa4.testing.backends import DTYPES
from fa4.testing.case import BLOCK_LISTS, LAYOUTS, MASK_MODS, SCORE_MODS, STRIDES
from fa4.testing.checks import gradient_inputs
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import shared_prefix
from fa4.testing.refusals import NotCovered
from fa4.testing.values import REGIMES

LENGTH = st.integers(0, 9)


@st.composite
def any_case(draw: st.DrawFn, **fixed: Any) -> Case:
    """Every field, in any combination that is valid; those of `fixed` as they are given."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    layout = one_of(*LAYOUTS)
    head_dim = one_of(8, 12, 16)
    found: dict[str, Any] = {
        "layout": layout,
        "batch": draw(st.integers(0, 2)),
        "seqlen_q": draw(LENGTH),
        "seqlen_k": draw(LENGTH),
        "heads_k": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "head_dim": head_dim,
        "head_dim_v": min(head_dim, one_of(4, 8, 12)),
        "dtype": one_of(*DTYPES),
        "values": one_of(*sorted(REGIMES)),
        "seed": draw(st.integers(0, 9)),
        "causal": draw(st.booleans()),
        "window_size": one_of((None, None), (2, None), (None, 1), (1, 3)),
        "softmax_scale": one_of(None, 0.7, -0.5),
        "softcap": one_of(0.0, 3.0),
        "sink": one_of(None, 0.5),
        "score_mod": one_of(None, *sorted(SCORE_MODS)),
        "mask_mod": one_of(None, *sorted(MASK_MODS)),
        "sparse_block": one_of(None, (4, 4)),
        "sparse_lists": one_of(*BLOCK_LISTS),
        "dropout_p": one_of(0.0, 0.3),
        "num_splits": one_of(1, 3),
        "strided": one_of(0, 3, 8),
        "strides": one_of(*STRIDES),
        "page_size": one_of(1, 2, 4),
    }
    if found["score_mod"]:  # it has the last word of the score
        found["softcap"] = 0.0
    if found["mask_mod"]:  # and it of the mask
        found |= {"causal": False, "window_size": (None, None)}
    if layout != "dense":
        lengths = draw(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=3))
        found |= {"lengths": tuple(lengths), "sparse_block": None}
    if layout in ("packed", "paged"):
        found["slack"] = one_of("", "buffer", "max_seqlen")
    if layout == "paged":
        found["shared_prefix"] = draw(st.booleans())
    return Case(**found | fixed)


def assert_whole(case: Case) -> Inputs:
    """The rows and keys of every sequence lie where the call finds them, NaN included."""
    inputs = build_inputs(case)
    assert len(inputs.sequences) == len(case.sequences)
    for name, split in (("q", inputs.split_rows), ("dout", inputs.split_rows),
                        ("k", inputs.split_keys), ("v", inputs.split_keys)):  # fmt: skip
        for b, rows in enumerate(split(getattr(inputs, name))):
            stated = getattr(inputs.sequences[b], name)
            assert np.array_equal(
                rows.astype(np.float64), stated.astype(np.float64), equal_nan=True
            ), (name, b)
    return inputs


@example(Case(strides="latent", seqlen_k=3))
@example(Case(values="tail", seqlen_k=0))
@example(Case(sparse_block=(4, 4), seqlen_q=0, seqlen_k=0))
@example(Case(layout="paged", lengths=((0, 2), (1, 2)), page_size=1, shared_prefix=True,
              values="masked_nan"))  # fmt: skip
@example(Case(strides="expanded_kv", heads_k=2, seqlen_k=9, mask_mod="stripes",
              values="masked_nan"))  # fmt: skip
@given(any_case())
def test_arrays_hold_their_sequences(case: Case) -> None:
    """In any layout, with any strides, values and masks."""
    assert_whole(case)


@pytest.mark.parametrize("name", ["oracle", "reference"])
@given(case=any_case())
def test_who_is_right_is_not_accused(name: str, case: Case) -> None:
    """Of arrays as the call has them, forward and gradients; a combination may be refused."""
    inputs, backend = gradient_inputs(case), load_backend(name)
    with suppress(NotCovered):
        outputs = backend.forward(inputs)
        assert assert_within_budget(inputs, outputs) <= 1.0
        if case.values != "largest":  # of which products of gradients overflow
            grads = backend.gradients(inputs, outputs)
            assert assert_within_budget(inputs, grads) <= 1.0


def test_block_lists_are_of_dense_problems() -> None:
    """Sequences have none in the kit."""
    with pytest.raises(ValueError, match="need the layout \"dense\"; got 'packed'"):
        Case(sparse_block=(4, 4), layout="packed", lengths=((1, 1),))


@pytest.mark.parametrize(
    ("keys", "members", "count"),
    [
        ((9, 40, 30), (1, 2), 24),
        ((40, 9, 30, 33), (0, 3), 32),
        ((5, 7), (), 0),
        ((8, 9), (0, 1), 8),
    ],
)
def test_a_prefix_is_shared_by_the_second_longest(
    keys: tuple[int, ...], members: tuple[int, ...], count: int
) -> None:
    """Its whole pages, by the sequences that have as many keys."""
    lengths = tuple((1, n) for n in keys)
    case = Case(layout="paged", lengths=lengths, page_size=8, shared_prefix=True)
    assert shared_prefix(case) == (members, count)
