"""The covering design: a list of cases for each feature and each pair of features.

Every combination of their levels comes `repeats` times; element types, length classes, head-dim
classes and value regimes are dealt out evenly, so that each meets each feature. What else a call
offers is off: a pair that fails is the pair that is wrong. The list depends on its label, the
element types and the seed alone; Hypothesis draws freely beyond it (`fa4.testing.strategies`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from fa4.testing.case import Case
from fa4.testing.levels import FEATURES, HEAD_DIM_CLASSES
from fa4.testing.strategies import MOST_SCORES, ORDINARY_VALUES, PAGE_SIZES

LEAST_CASES = 8  # of a design with few levels, so that every class of the rest occurs

_KEYS = {  # several tiles first: there, most goes wrong
    "keys_long": (1025, 1153, 1030, 1281),
    "keys_tiles": (257, 300, 385, 256, 513),
    "keys_edge": (127, 128, 129, 64, 63, 65, 17, 130, 113),
    "keys_1": (1,),
}
_ROWS = (1, 3, 17, 33, 64, 65, 128, 130, 200)
_HEAD_DIMS = {
    "dim_to_64": ((64, 64), (8, 8), (32, 32), (40, 40), (16, 16)),
    "dim_to_128": ((128, 128), (96, 96), (72, 72), (80, 80)),
    "dim_beyond_128": ((192, 192), (256, 256)),
    "dim_unequal": ((64, 128), (192, 128), (40, 24), (16, 64)),
}


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
) -> list[Case]:
    """`repeats` cases of each combination of levels, or more to reach LEAST_CASES / 5 repeats.

    The first ones differ in everything, so that a prefix is a good sample; long ones come first.
    """
    rng = random.Random(f"{seed}:{label}")
    count = max(len(combinations) * repeats, LEAST_CASES * repeats // 5, 1)
    columns = zip(
        deal(rng, combinations, count),
        deal_pairs(rng, dtypes, tuple(_KEYS), count),
        deal(rng, HEAD_DIM_CLASSES, count),
        deal(rng, ORDINARY_VALUES, count),
        strict=True,
    )
    return [
        _make_case(rng, _deal_values(fields, n), dtype, length, *classes)
        for n, (fields, (dtype, length), *classes) in enumerate(columns)
    ]


def _deal_values(fields: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The fields with one of the values of each level, in turn."""
    return {
        name: value[turn % len(value)] if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


def _make_case(
    rng: random.Random, fields: dict[str, Any], dtype: str, length: str, dims: str, values: str
) -> Case:
    """A case of these levels and classes with everything else drawn."""
    window, aux = fields.pop("window", None), fields.pop("aux", False)
    if aux:
        fields |= _choose_aux(rng, fields, window)
    group = fields.get("group", 1)
    head_dim, head_dim_v = rng.choice(_HEAD_DIMS[dims])
    keys = rng.choice(_KEYS[length])
    heads_k = rng.choice((1, 2)) if group < 8 else 1
    layout = fields.get("layout", "dense")
    batch = rng.choice((1, 2)) if layout == "dense" else 1
    if layout == "dense" and {"score_mod", "mask_mod"} & set(fields):
        batch = 2  # callbacks are told which
    room = MOST_SCORES // (batch * heads_k * group * keys)
    tall = fields.pop("rows", None)
    rows = min(tall, 8 * room) if tall else _choose_rows(rng, room, length, keys)
    if layout != "dense":
        fields["lengths"] = _choose_lengths(rng, rows, keys)
        fields["page_size"] = rng.choice(PAGE_SIZES) if layout == "paged" else 16
        rows = keys = 1
    if window is not None:
        fields["window_size"] = _choose_window(rng, window, fields.get("lengths", ((rows, keys),)))
    return Case(
        batch=batch, seqlen_q=rows, seqlen_k=keys, heads_k=heads_k, head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, values=values, seed=rng.randrange(2**16), **fields,
    )  # fmt: skip


def _choose_aux(rng: random.Random, fields: Mapping[str, Any], window: Any) -> dict[str, str]:
    """A mod that reads aux_tensors, in a place that the other features leave free."""
    free = []
    if not {"softcap", "score_mod"} & set(fields):
        free.append({"score_mod": "table"})
    if not {"mask_mod", "causal"} & set(fields) and window is None:
        free.append({"mask_mod": "listed"})
    return rng.choice(free)


def _choose_rows(rng: random.Random, most: int, length: str, keys: int) -> int:
    """Rows within the work limit; as many as keys now and then, or a few more."""
    fits = [rows for rows in _ROWS if rows <= most] or [1]
    if length in ("keys_edge", "keys_1") and keys + 3 <= most and rng.random() < 0.3:
        fits = [keys, keys + 3]
    return rng.choice(fits)


def _choose_lengths(rng: random.Random, rows: int, keys: int) -> tuple[tuple[int, int], ...]:
    """The sequence of the class among short ones, empty ones among them."""
    short = [(rng.choice((0, 1, 5, 17)), rng.choice((0, 1, 6, 19))) for _ in range(2)]
    lengths = [(rows, keys), *short[: rng.choice((1, 2))]]
    rng.shuffle(lengths)
    return tuple(lengths)


def _choose_window(
    rng: random.Random, kind: str, lengths: Sequence[tuple[int, int]]
) -> tuple[int | None, int | None]:
    """A window of a kind that hides something of the longest sequence, if anything can be.

    An unbounded side is None or -1: both are in use.
    """
    keys = max(keys for _, keys in lengths)
    sides = [side for side in (0, 1, 2, 7, 31, 64, 127, 128) if side < max(keys, 1)]
    unbounded = rng.choice((None, -1))
    left = rng.choice(sides) if kind in ("left", "both") else unbounded
    right = rng.choice(sides[:5]) if kind in ("right", "both") else unbounded
    return left, right
