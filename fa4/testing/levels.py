"""What a case exercises: features in their variants, element type, length class, head-dim class.

A *level* is a variant of a feature that a kernel treats in a way of its own ("window_left",
"gqa_4", "paged"). Faults hide where two of them meet, so the suite draws every pair that has a
meaning (`fa4.testing.design`), and a report counts the pairs of levels of the cases it judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from fa4.config import normalize_window
from fa4.testing.case import SCORE_MODS, Case

# The levels of each feature: level to the fields of a `Case` that switch it on. Windows are drawn
# for the lengths at hand, and "aux" picks a mod that its partner leaves free.
FEATURES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "causal": {"causal": {"causal": True}},
    "window": {
        "window_left": {"window": "left"},
        "window_right": {"window": "right"},
        "window_both": {"window": "both"},
    },
    "mask_mod": {"mask_mod": {"mask_mod": ("stripes", "documents", "odd_rows_empty")}},
    "softmax_scale": {"softmax_scale": {"softmax_scale": (0.3, 1.0, 0.125)}},
    "softcap": {"softcap": {"softcap": (15.0, 1.0, 2.0)}},
    "score_mod": {"score_mod": {"score_mod": ("alibi", "temper", "forbid")}},
    "aux_tensors": {"aux_tensors": {"aux": True}},
    "sink": {"sink": {"sink": (0.0, 1.5, -1.0)}},
    "gqa": {f"gqa_{group}": {"group": group} for group in (2, 3, 4, 8)},
    "splits": {"splits": {"num_splits": (16, 2, 3, 7)}},
    "dropout": {"dropout": {"dropout_p": (0.5, 0.1)}},
    "varlen": {"varlen": {"layout": "packed"}},
    "seqused": {"seqused": {"layout": "padded"}},
    "paged": {"paged": {"layout": "paged"}},
}

# What the back end must offer for a feature, as in `Backend.reason_missing`.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal",),
    "window": ("window_size",),
    "aux_tensors": ("aux_tensors",),
    "sink": ("learnable_sink",),
    "splits": ("num_splits",),
    "gqa": (),
}

# Pairs without a meaning: mask_mod replaces causal and windows, softcap and score_mod exclude each
# other, and a call has one layout.
EXCLUSIVE = frozenset(
    frozenset(pair)
    for pair in (
        ("mask_mod", "causal"),
        ("mask_mod", "window"),
        ("softcap", "score_mod"),
        ("varlen", "seqused"),
        ("varlen", "paged"),
        ("seqused", "paged"),
    )
)

# Classes of the number of keys (the longest sequence's), by their largest member.
LENGTH_CLASSES = {"keys_1": 1, "keys_edge": 255, "keys_tiles": 1024, "keys_long": 1 << 40}
HEAD_DIM_CLASSES = ("dim_to_64", "dim_to_128", "dim_beyond_128", "dim_unequal")


def needs_of(feature: str) -> tuple[str, ...]:
    """What a back end must offer for a feature."""
    return NEEDS.get(feature, (feature,))


def may_meet(a: str, b: str) -> bool:
    """Does the pair of features have a meaning?"""
    return frozenset((a, b)) not in EXCLUSIVE


def length_class(keys: int) -> str:
    """The class of a number of keys; 0 counts as 1."""
    return next(name for name, most in LENGTH_CLASSES.items() if keys <= most)


def head_dim_class(head_dim: int, head_dim_v: int) -> str:
    """The class of a pair of head dims."""
    if head_dim != head_dim_v:
        return "dim_unequal"
    if head_dim > 128:
        return "dim_beyond_128"
    return "dim_to_64" if head_dim <= 64 else "dim_to_128"


def levels_of(case: Case) -> tuple[str, ...]:
    """The levels that a case exercises, in the order of the tables above."""
    # Each side alone: under causal the right one is never read, and may be any number.
    left, right = (normalize_window((side, None))[0] for side in case.window_size)
    aux = case.reads_aux
    found = {
        "causal": case.causal,
        "window_left": left is not None and right is None,
        "window_right": left is None and right is not None,
        "window_both": left is not None and right is not None,
        "mask_mod": case.mask_mod is not None,
        "softmax_scale": case.softmax_scale is not None,
        "softcap": case.softcap > 0,
        "score_mod": case.score_mod in SCORE_MODS,
        "aux_tensors": aux,
        "sink": case.sink is not None,
        f"gqa_{case.group}": True,
        "splits": case.num_splits > 1,
        "dropout": case.dropout_p > 0,
        "block_sparse": case.sparse_block is not None,
        {"dense": "dense", "packed": "varlen", "padded": "seqused", "paged": "paged"}[
            case.layout
        ]: True,
    }
    keys = max((keys for _, keys in case.sequences), default=0)
    classes = (case.dtype, length_class(keys), head_dim_class(case.head_dim, case.head_dim_v))
    return (*(name for name, on in found.items() if on), *classes)


MASK_LEVELS = ("causal", "window_left", "window_right", "window_both", "mask_mod")
LAYOUT_LEVELS = ("dense", "varlen", "seqused", "paged")
MODIFICATION_LEVELS = ("softcap", "score_mod", "sink")


class LevelCounts:
    """How often pairs of levels, and triples of mask, layout and modification, were judged."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.triples: Counter[tuple[str, str, str]] = Counter()

    def add(self, levels: Iterable[str]) -> None:
        """Count one judged case."""
        levels = sorted(set(levels))
        self.pairs.update(combinations(levels, 2))
        groups = (MASK_LEVELS, LAYOUT_LEVELS, MODIFICATION_LEVELS)
        masks, layouts, modifications = ([x for x in group if x in levels] for group in groups)
        for mask in masks:
            for layout in layouts:
                self.triples.update((mask, layout, change) for change in modifications)

    def merge(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Add counts as `as_dict` gives them."""
        for name, count in other["pairs"].items():
            first, second = name.split(" x ")
            self.pairs[first, second] += count
        for name, count in other["triples"].items():
            first, second, third = name.split(" x ")
            self.triples[first, second, third] += count

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{"pairs": {"a x b": cases}, "triples": {"a x b x c": cases}}, names sorted."""
        return {
            "pairs": {" x ".join(pair): n for pair, n in sorted(self.pairs.items())},
            "triples": {" x ".join(three): n for three, n in sorted(self.triples.items())},
        }
