"""The covering design: a list of cases for each feature and each pair of features.

Every combination of their levels comes `repeats` times; element types, length classes, head-dim
classes and value regimes are dealt out evenly, so that each meets each feature. What else a call
offers is off: a pair that fails is the pair that is wrong. Results, gradients and the gradient of
the LSE are levels of the same design: a `Kind` says which outputs its cases are for. The list
depends on its label, the element types and the seed alone; Hypothesis draws freely beyond it
(`fa4.testing.strategies`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fa4.testing.case import Case
from fa4.testing.levels import FEATURES
from fa4.testing.sizes import (
    GRADIENT_LENGTHS,
    HEAD_DIMS,
    LENGTHS,
    choose_extent,
    choose_sizes,
    choose_window,
)
from fa4.testing.strategies import ORDINARY_VALUES, PAGE_SIZES

LEAST_CASES = 8  # of a design with few levels, so that every class of the rest occurs
MOST_ELEMENTS = 600_000  # of K, repeated for every query head; a third of it with gradients
CLEAR_ROWS = 9  # of a case that a first look may take alone
DLSE_EVERY = 3  # of so many cases with gradients one has a gradient of the LSE
GRADIENT_VALUES = ("normal", "common_mean", "low", "activations", "peaks", "denormals",
                   "near_overflow", "grid", "ramp_up")  # fmt: skip
_DIMS = tuple(name for name in HEAD_DIMS if name != "dim_odd")  # those have properties of their own


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the cases of a design are for. gradients: dQ, dK and dV are judged; dlse: some of them
    with a gradient of the LSE. values: regimes that are dealt. extent: one of `sizes.EXTENTS`.
    clear: the first case has the first regime and several rows, since one row, or values that leave
    all weight to a few keys, hide much: a first look may take no other case."""

    gradients: bool = False
    dlse: bool = False
    values: tuple[str, ...] = ORDINARY_VALUES
    dims: tuple[str, ...] = _DIMS
    extent: str = ""
    clear: bool = False


FORWARD = Kind()
GRADIENTS = Kind(gradients=True, values=GRADIENT_VALUES)


def deal(rng: random.Random, choices: Sequence[Any], count: int) -> list[Any]:
    """`count` choices in random order, each as often as the others, or once more."""
    dealt: list[Any] = []
    while len(dealt) < count:
        dealt += rng.sample(choices, len(choices))
    return dealt[:count]


def deal_pairs(
    rng: random.Random, first: Sequence[str], second: Sequence[str], count: int
) -> list[tuple[str, str]]:
    """`count` pairs: each member as often as the others, and each pair before one comes again.

    `second` keeps its order, so that a prefix is known to hold its first members.
    """
    first = rng.sample(first, len(first))
    turns = [
        (n % len(first), (n + n // math.lcm(len(first), len(second))) % len(second))
        for n in range(count)
    ]
    return [(first[a], second[b]) for a, b in turns]


def combine(features: Iterable[str]) -> list[dict[str, Any]]:
    """Every combination of the levels of some features, as fields of a case."""
    tables = [list(FEATURES[feature].values()) for feature in features]
    combined = []
    for levels in product(*tables):
        fields: dict[str, Any] = {}
        for level in levels:
            fields |= level
        combined.append(fields)
    return combined


def list_cases(
    label: str,
    combinations: Sequence[Mapping[str, Any]],
    dtypes: Sequence[str],
    *,
    repeats: int = 5,
    seed: int = 0,
    kind: Kind = FORWARD,
) -> list[Case]:
    """`repeats` cases of each combination of levels, or more to reach LEAST_CASES / 5 repeats.

    The first ones differ in everything, so that a prefix is a good sample; long ones come first.
    """
    rng = random.Random(f"{seed}:{label}")
    count = max(len(combinations) * repeats, LEAST_CASES * repeats // 5, 1)
    lengths = GRADIENT_LENGTHS if kind.gradients else LENGTHS
    columns = zip(
        deal(rng, combinations, count),
        deal_pairs(rng, dtypes, lengths, count),
        deal(rng, kind.dims, count),
        _in_front(deal(rng, kind.values, count), kind.values[:1] if kind.clear else ()),
        strict=True,
    )
    seen: dict[int, int] = {}
    cases = []
    for n, (fields, (dtype, length), dims, values) in enumerate(columns):
        again = seen[id(fields)] = seen.get(id(fields), -1) + 1  # each combination's own turn
        classes = {"dtype": dtype, "values": values}
        if kind.dlse and again % DLSE_EVERY == 1:
            classes["dlse"] = True
        if kind.clear and n == 0:
            classes["least_rows"] = CLEAR_ROWS
        chosen = _deal_values(fields, n) | classes
        cases.append(_make_case(rng, chosen, length, dims, kind))
    return cases


def _in_front(dealt: list[Any], choices: Sequence[Any]) -> list[Any]:
    """`dealt` with a choice in front: the first of them, or in place of what was there."""
    for choice in choices:
        if choice in dealt:
            dealt[dealt.index(choice)] = dealt[0]
        dealt[0] = choice
    return dealt


def _deal_values(fields: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The fields with one of the values of each level, in turn."""
    return {
        name: value[turn % len(value)] if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


def _make_case(
    rng: random.Random, fields: dict[str, Any], length: str, dims: str, kind: Kind
) -> Case:
    """A case of these levels and classes with everything else drawn."""
    window, aux = fields.pop("window", None), fields.pop("aux", False)
    if aux:
        fields |= _choose_aux(rng, fields, window)
    if kind.extent:
        sizes = choose_extent(rng, fields, kind.extent)
    else:
        sizes = choose_sizes(rng, fields, length, gradients=kind.gradients)
    fields.pop("rows", None)
    fields.pop("least_rows", None)
    head_dim, head_dim_v = _choose_dims(rng, dims, fields, sizes, kind)
    if fields.get("layout") == "paged":
        fields.setdefault("page_size", rng.choice(PAGE_SIZES))
    if window is not None:
        here = sizes.get("lengths", ((sizes.get("seqlen_q"), sizes.get("seqlen_k")),))
        fields["window_size"] = choose_window(rng, window, here)
    fields.setdefault("seed", rng.randrange(2**16))
    return Case(head_dim=head_dim, head_dim_v=head_dim_v, **sizes, **fields)


def _choose_dims(
    rng: random.Random, dims: str, fields: Mapping[str, Any], sizes: Mapping[str, Any], kind: Kind
) -> tuple[int, int]:
    """Head dims of the class with which K of all query heads is not too large; else small ones."""
    keys = max(keys for _, keys in sizes.get("lengths", ((0, sizes.get("seqlen_k", 1)),)))
    per_dim = sizes["batch"] * sizes["heads_k"] * fields.get("group", 1) * max(keys, 1)
    most = MOST_ELEMENTS // (3 if kind.gradients else 1)
    fits = [pair for pair in HEAD_DIMS[dims] if max(pair) * per_dim <= most]
    return rng.choice(fits or [(16, 8) if dims == "dim_unequal" else (8, 8)])


def _choose_aux(rng: random.Random, fields: Mapping[str, Any], window: Any) -> dict[str, str]:
    """A mod that reads aux_tensors, in a place that the other features leave free."""
    free = []
    if not {"softcap", "score_mod"} & set(fields):
        free.append({"score_mod": "table"})
    if not {"mask_mod", "causal"} & set(fields) and window is None:
        free.append({"mask_mod": "listed"})
    return rng.choice(free)
