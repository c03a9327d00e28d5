"""What a case exercises: features in their variants, element type, length class, head-dim class.

A *level* is a variant of a feature that a kernel treats in a way of its own ("window_left",
"gqa_4", "paged"). Faults hide where two of them meet, so the suite draws every pair that has a
meaning (`fa4.testing.design`), forward and with gradients. A report counts the pairs of levels of
the cases it judged, for each output apart: `PairCoverage` says what is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, product
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
    "gqa": {f"gqa_{group}": {"group": group} for group in (2, 3, 4, 8, 5, 6, 7, 16)},
    "splits": {"splits": {"num_splits": (16, 2, 3, 7, 40)}},
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
LENGTH_CLASSES = {"keys_1": 1, "keys_edge": 255, "keys_tiles": 1024, "keys_long": math.inf}
HEAD_DIM_CLASSES = ("dim_to_64", "dim_to_128", "dim_beyond_128", "dim_unequal", "dim_odd")
OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dsink")
WARP = 32  # lanes: heads, batch entries and sequences beyond it are levels of their own


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
    if head_dim % 8 or head_dim_v % 8:
        return "dim_odd"
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
    names = (name for name, on in (found | _extents_of(case)).items() if on)
    return (*names, *_memory_of(case), *classes)


def _extents_of(case: Case) -> dict[str, bool]:
    """Sizes beyond a warp or a tile, and signs, that a kernel may treat in a way of their own."""
    rows = [rows for rows, _ in case.sequences]
    later = rows[rows.index(0) :] if 0 in rows else []
    return {
        "many_heads": case.heads_q > WARP,
        "many_batch": case.layout == "dense" and case.batch > WARP,
        "many_sequences": case.is_varlen and len(rows) > WARP,
        "rows_and_keys": any(rows > 128 and keys > 512 for rows, keys in case.sequences),
        "behind_an_empty_one": case.layout == "packed" and any(later),
        "scale_to_0": case.softmax_scale is not None and case.softmax_scale <= 0,
        "seed_of_64_bits": case.dropout_p > 0 and case.seed >= 2**32,
        "dlse": case.dlse,
    }


def _memory_of(case: Case) -> tuple[str, ...]:
    """Values, strides, slack, pages and block lists."""
    strides = case.strides or ("padded_rows" if case.strided else "")
    given = {
        "values": case.values,
        "strides": strides,
        "slack": case.slack,
        "page": str(case.page_size) if case.layout == "paged" else "",
        "pages": "shared" if case.shared_prefix else "",
        "blocks": case.sparse_lists if case.sparse_block else "",
    }
    return tuple(f"{name}_{value}" for name, value in given.items() if value)


def outputs_of(case: Case, judged: Iterable[str]) -> tuple[str, ...]:
    """The outputs that a check judges, from what it judges beyond the case (`Property.levels`)."""
    judged = set(judged)
    gradients = ("dq", "dk", "dv", *(["dsink"] if case.sink is not None else []))
    forward = ("out", *(["lse"] if "lse" in judged else []))
    if "gradients" not in judged:
        return forward
    return (*forward, *gradients) if "lse" in judged else gradients


def meaningful_pairs(output: str = "out") -> tuple[tuple[str, str], ...]:
    """Every pair of levels of two features that may meet, names sorted; dsink needs a sink."""
    pairs = {
        (a, b) if a < b else (b, a)
        for first, second in combinations(FEATURES, 2)
        if may_meet(first, second)
        for a, b in product(FEATURES[first], FEATURES[second])
    }
    return tuple(sorted(pair for pair in pairs if output != "dsink" or "sink" in pair))


@dataclass(frozen=True, kw_only=True)
class PairCoverage:
    """Of one output: how many pairs of levels have a meaning, how many cases judged the rarest,
    and which were judged by fewer than `LEAST_JUDGED`."""

    output: str
    pairs: int
    least: int
    few: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"few": list(self.few)}


LEAST_JUDGED = 3


MASK_LEVELS = ("causal", "window_left", "window_right", "window_both", "mask_mod")
LAYOUT_LEVELS = ("dense", "varlen", "seqused", "paged")
MODIFICATION_LEVELS = ("softcap", "score_mod", "sink")


class LevelCounts:
    """How often pairs of levels, and triples of mask, layout and modification or grouped heads,
    were judged: over all outputs, and pairs and triples of each output apart."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[tuple[str, ...]]] = {
            name: Counter() for name in ("pairs", "triples", *OUTPUTS)
        }

    def add(self, levels: Iterable[str], outputs: Iterable[str] = ()) -> None:
        """Count one judged case."""
        levels = sorted(set(levels))
        pairs, triples = tuple(combinations(levels, 2)), tuple(_triples(levels))
        self.counts["pairs"].update(pairs)
        self.counts["triples"].update(triples)
        for output in outputs:
            self.counts[output].update(pairs)
            self.counts[output].update(triples)

    def merge(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Add counts as `as_dict` gives them."""
        for name, counts in other.items():
            for text, count in counts.items():
                self.counts[name][tuple(text.split(" x "))] += count

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{"pairs": {"a x b": cases}, "triples": {"a x b x c": cases}, "dq": both, ...}, sorted."""
        return {
            name: {" x ".join(levels): n for levels, n in sorted(counts.items())}
            for name, counts in self.counts.items()
        }

    def coverage(self, least: int = LEAST_JUDGED) -> tuple[PairCoverage, ...]:
        """What of each output's meaningful pairs was judged; few: fewer than `least` times."""
        found = []
        for output in OUTPUTS:
            judged = {pair: self.counts[output][pair] for pair in meaningful_pairs(output)}
            few = tuple(" x ".join(pair) for pair, n in judged.items() if n < least)
            found.append(
                PairCoverage(output=output, pairs=len(judged), least=min(judged.values()), few=few)
            )
        return tuple(found)


def _triples(levels: list[str]) -> Iterable[tuple[str, ...]]:
    """Mask, layout, and a modification or grouped heads ("gqa")."""
    grouped = [x for x in levels if x.startswith("gqa_") and x != "gqa_1"]
    groups = (MASK_LEVELS, LAYOUT_LEVELS, MODIFICATION_LEVELS)
    masks, layouts, changes = ([x for x in group if x in levels] for group in groups)
    return product(masks, layouts, [*changes, *["gqa"][: len(grouped)]])
