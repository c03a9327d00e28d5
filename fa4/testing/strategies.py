"""Hypothesis strategies for attention problems.

    from hypothesis import given
    from fa4.testing import strategies as attention

    @given(attention.dense_cases(causal=True))
    def test_mine(case): ...

They draw `Case` values: sizes around tile edges, head layouts, masks, features, and the name and
seed of a value regime. Arrays are made from the seed (`fa4.testing.build_inputs`), so drawing is
fast and a failure shrinks to a small problem. Every strategy puts its simplest value first. Work is
bounded: a case has at most MOST_SCORES scores, or one head of one batch entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fa4.config import Window, normalize_window
from fa4.testing.case import MASK_MODS, SCORE_MODS, Case

MOST_SCORES = 30_000  # batch * heads * seqlen_q * seqlen_k of a drawn case

# 128 is FlashAttention-4's tile, 256 its two query tiles; primes divide by no tile.
LENGTHS = (1, 2, 3, 5, 7, 13, 31, 64, 113, 127, 128, 129, 130, 255, 256, 257)
SHORT_LENGTHS = (1, 2, 3, 7, 17, 64)
LONG_LENGTHS = (129, 257, 300, 385, 513)  # several KV tiles
VERY_LONG_LENGTHS = (257, 513, 1025, 1281)  # up to more than eight
GROUPS = (1, 2, 3, 5, 6, 7, 8, 16)
HEAD_DIMS = (*range(8, 129, 8), 192, 256)
FLOAT_DTYPES = ("fp32", "bf16", "fp16", "fp64")
PAGE_SIZES = (16, 48, 1, 4, 8, 64, 128, 256, 512)
ORDINARY_VALUES = ("normal", "grid", "activations")

Lengths = Sequence[int]


def seeds() -> SearchStrategy[int]:
    """Seeds of the values, below 10,000.

    In two digits: of a wide range, Hypothesis also draws constants that it finds in the modules
    that happen to be imported, and a run would not repeat in another process.
    """
    digit = st.integers(0, 99)
    return st.tuples(digit, digit).map(lambda digits: 100 * digits[0] + digits[1])


def dtypes(names: Sequence[str] = FLOAT_DTYPES) -> SearchStrategy[str]:
    """Names of element types."""
    return st.sampled_from(tuple(names))


def seqlens(lengths: Lengths = LENGTHS, *, zero: bool = False) -> SearchStrategy[int]:
    """Sequence lengths around tile edges; 0 only where asked for."""
    return st.sampled_from((*lengths, 0) if zero else tuple(lengths))


def head_dims() -> SearchStrategy[tuple[int, int]]:
    """(head_dim, head_dim_v): often equal, else any two."""
    same = st.sampled_from(HEAD_DIMS).map(lambda d: (d, d))
    return same | st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(HEAD_DIMS))


def softmax_scales() -> SearchStrategy[float | None]:
    """Factors of the scores: default, ordinary and large."""
    return st.sampled_from((None, 1.0, 0.125, 0.3, 4.0))


def softcaps() -> SearchStrategy[float]:
    """Caps that bend all scores, some, or hardly any."""
    return st.sampled_from((15.0, 1.0, 0.25, 50.0))


def sinks() -> SearchStrategy[float]:
    """Sink logits: comparable with the scores, far above, far below, and -inf (no sink at all)."""
    return st.sampled_from((0.0, 1.5, 100.0, -100.0, -1e4, float("-inf")))


@st.composite
def windows(draw: Any, seqlen_q: int, seqlen_k: int, *, causal: bool = False) -> Window:
    """Windows with both spellings of "unbounded", every edge, and offsets on either side."""
    edges = (0, 1, 2, 7, 64, 127, 128, max(seqlen_k - 1, 0), seqlen_k, seqlen_q + seqlen_k, -2, -5)
    side = st.sampled_from((None, -1, *edges))
    left, right = draw(side), draw(side)
    try:
        normalize_window((left, right), causal)
    except ValueError:  # it would hide every key
        left, right = (None if side is None else abs(side) for side in (left, right))
    return left, right


@st.composite
def dense_cases(
    draw: Any,
    dtypes: Sequence[str] = FLOAT_DTYPES,
    *,
    values: Sequence[str] = ORDINARY_VALUES,
    lengths_q: Lengths = LENGTHS,
    lengths_k: Lengths = LENGTHS,
    groups: Sequence[int] = (1,),
    **features: Any,
) -> Case:
    """Dense problems. `features` are fields of `Case`: values, or strategies to draw them from.

    window_size=True draws one that suits the lengths.
    """
    seqlen_q, seqlen_k = draw(seqlens(lengths_q)), draw(seqlens(lengths_k))
    room = max(1, MOST_SCORES // max(1, seqlen_q * seqlen_k))
    group = draw(st.sampled_from([n for n in groups if n <= room] or [min(groups)]))
    heads_k = draw(st.sampled_from([n for n in (1, 2, 3) if n * group <= room] or [1]))
    batch = draw(st.sampled_from([n for n in (1, 2, 3) if n * heads_k * group <= room] or [1]))
    head_dim, head_dim_v = draw(head_dims())
    fields: dict[str, Any] = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads_k": heads_k,
        "group": group,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": draw(st.sampled_from(tuple(dtypes))),
        "values": draw(st.sampled_from(tuple(values))),
        "seed": draw(seeds()),
    }
    for name, value in features.items():
        fields[name] = draw(value) if isinstance(value, SearchStrategy) else value
    if fields.get("window_size") is True:
        lengths = (fields["seqlen_q"], fields["seqlen_k"])
        fields["window_size"] = draw(windows(*lengths, causal=fields.get("causal", False)))
    return Case(**fields)


def empty_cases(dtypes: Sequence[str] = FLOAT_DTYPES, **features: Any) -> SearchStrategy[Case]:
    """Problems with nothing to do: no batch entry, no query, or no key."""
    some = {"lengths_q": SHORT_LENGTHS, "lengths_k": SHORT_LENGTHS}
    return st.one_of(
        dense_cases(dtypes, **some, **(features | {"seqlen_k": 0})),
        dense_cases(dtypes, **some, **(features | {"seqlen_q": 0})),
        dense_cases(dtypes, **some, **(features | {"batch": 0})),
        dense_cases(dtypes, **some, **(features | {"seqlen_q": 0, "seqlen_k": 0})),
    )


@st.composite
def varlen_cases(
    draw: Any,
    dtypes: Sequence[str] = FLOAT_DTYPES,
    *,
    layouts: Sequence[str] = ("packed",),
    groups: Sequence[int] = (1, 2, 4),
    **features: Any,
) -> Case:
    """One to four sequences of different lengths, zeros included; `layouts` as in `Case`."""
    length = seqlens((1, 2, 3, 7, 16, 17, 64, 130), zero=True)
    lengths = draw(st.lists(st.tuples(length, length), min_size=1, max_size=4))
    base = draw(
        dense_cases(dtypes, lengths_q=SHORT_LENGTHS, lengths_k=SHORT_LENGTHS, groups=groups,
                    **(features | {"window_size": (None, None)}))
    )  # fmt: skip
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    fields |= {"batch": 1, "seqlen_q": 1, "seqlen_k": 1, "heads_k": min(base.heads_k, 2)}
    if features.get("window_size") is True:
        fields["window_size"] = draw(windows(*lengths[0], causal=base.causal))
    elif "window_size" in features:
        fields["window_size"] = features["window_size"]
    fields["layout"] = draw(st.sampled_from(tuple(layouts)))
    if fields["layout"] == "paged":
        fields["page_size"] = draw(st.sampled_from(PAGE_SIZES))
    return Case(**(fields | {"lengths": tuple(lengths)}))


def paged_cases(dtypes: Sequence[str] = FLOAT_DTYPES, **features: Any) -> SearchStrategy[Case]:
    """`varlen_cases` with K and V in pages: shuffled, unused entries out of range, slots NaN."""
    return varlen_cases(dtypes, layouts=("paged",), **features)


def sparse_cases(dtypes: Sequence[str] = FLOAT_DTYPES, **features: Any) -> SearchStrategy[Case]:
    """Block-sparse problems of several blocks each way, with a mask_mod for the partial ones."""
    some: dict[str, Any] = {
        "lengths_q": (64, 130, 257, 300),
        "lengths_k": (129, 257),
        "sparse_block": st.sampled_from(((128, 128), (256, 128))),
        "mask_mod": mask_mods(),
    }
    return dense_cases(dtypes, **(some | features))


def score_mods() -> SearchStrategy[str]:
    """Names in `SCORE_MODS`."""
    return st.sampled_from(tuple(SCORE_MODS))


def mask_mods() -> SearchStrategy[str]:
    """Names in `MASK_MODS`."""
    return st.sampled_from(tuple(MASK_MODS))


def split_counts() -> SearchStrategy[int]:
    """Numbers of KV splits, up to far more than there are tiles."""
    return st.sampled_from((2, 3, 7, 32))


def tile_sizes() -> SearchStrategy[tuple[int, int, int]]:
    """(tile_m, tile_n, q_tiles) of `fa4.ForwardConfig`."""
    return st.sampled_from(((128, 128, 1), (64, 64, 2), (32, 96, 1), (16, 32, 1), (7, 13, 2)))
