"""Properties of features where they meet: pairs, {mask, layout, modification}, and mixtures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from fa4.testing.case import Case
from fa4.testing.checks import equals_oracle, gradients_equal_oracle
from fa4.testing.design import FORWARD, GRADIENTS, Kind, combine, list_cases
from fa4.testing.levels import FEATURES, may_meet, needs_of
from fa4.testing.property import Plan, Property

Listed = Callable[[Plan], list[Case]]

_PAIRS = tuple(pair for pair in combinations(FEATURES, 2) if may_meet(*pair))
_WORDS = {
    "softmax_scale": "a given scale",
    "causal": "the causal mask",
    "window": "a window",
    "gqa": "grouped heads",
    "splits": "split KV",
    "varlen": "packed sequences",
    "seqused": "padded sequences",
    "paged": "pages",
    "sink": "a sink",
}


def all_needs(*features: str) -> frozenset[str]:
    """What a back end must offer for all of these."""
    return frozenset(need for feature in features for need in needs_of(feature))


def cases_of(
    label: str,
    levels: Sequence[dict[str, Any]],
    kind: Kind = FORWARD,
    repeats: Callable[[int], int] = int,
) -> Listed:
    """A `Property.listed` of these combinations; `repeats`: from the run's to the design's."""

    def listed(plan: Plan) -> list[Case]:
        dlse = kind.gradients and "dlse" in plan.offered
        return list_cases(
            label, levels, plan.dtypes,
            repeats=repeats(plan.repeats), seed=plan.seed, kind=replace(kind, dlse=dlse),
        )  # fmt: skip

    return listed


def three_of_five(repeats: int) -> int:
    """Cases of a combination with gradients, and of one with many levels."""
    return max(1, -(-3 * repeats // 5))


def _pair(a: str, b: str) -> Property:
    name, levels = f"{a}_with_{b}", combine((a, b))
    return Property(
        name,
        f"{_WORDS.get(a, a)} together with {_WORDS.get(b, b)}",
        equals_oracle,
        listed=cases_of(
            name, levels, replace(FORWARD, clear=True), three_of_five if "gqa" in (a, b) else int
        ),
        needs=all_needs(a, b),
        levels=("lse",),
        first_look=1 if len(levels) == 1 else 2,
    )


def _gradients_with(*features: str) -> Property:
    """Gradients with a feature, thoroughly, or with two, each combination three times."""
    name = f"gradients_with_{'_and_'.join(features)}"
    levels = combine(features)
    kind = replace(GRADIENTS, clear=len(features) > 1)
    thorough = len(features) == 1 and features != ("gqa",)
    return Property(
        name,
        f"dQ, dK, dV (and dsink) with {' and '.join(_WORDS.get(x, x) for x in features)}",
        gradients_equal_oracle,
        listed=cases_of(name, levels, kind, int if thorough else three_of_five),
        needs=all_needs(*features) | {"gradients"},
        levels=("gradients",),
        first_look=max(6, len(levels) + 4) if len(features) == 1 else 1,
    )


_MASKS = ("causal", "window", "mask_mod")
_LAYOUTS: tuple[tuple[str, ...], ...] = ((), ("varlen",), ("seqused",), ("paged",))
_MODIFICATIONS = ("softcap", "score_mod", "sink")


_GROUPED = {"group": (2, 3, 4, 5, 6, 7)}


def _triples(label: str, kind: Kind) -> Listed:
    """Each combination of a mask, a layout, and a modification or (with gradients) grouped heads,
    of those that the back end offers, once."""

    def listed(plan: Plan) -> list[Case]:
        levels: list[dict[str, Any]] = []
        for mask, layout in product(_MASKS, _LAYOUTS):
            if not all_needs(mask, *layout) <= plan.offered:
                continue
            for change in _MODIFICATIONS:
                if all_needs(change) <= plan.offered:
                    levels += combine((mask, *layout, change))
            if kind.gradients:
                levels += [fields | _GROUPED for fields in combine((mask, *layout))]
        repeats = max(1, plan.repeats // 5)
        return cases_of(label, levels, kind, lambda _: repeats)(plan) if levels else []

    return listed


def _list_mixtures(plan: Plan) -> list[Case]:
    """Any features at once, as far as they may meet."""
    rng = random.Random(f"{plan.seed}:mixtures")
    offered = [feature for feature in FEATURES if all_needs(feature) <= plan.offered]
    levels = []
    for _ in range(6 * plan.repeats):
        chosen: list[str] = []
        for feature in rng.sample(offered, len(offered)):
            together = {*chosen, feature}
            fits = _aux_has_a_place(together) and all(may_meet(feature, x) for x in chosen)
            if fits and rng.random() < 0.5:
                chosen.append(feature)
        levels.append(rng.choice(combine(chosen)))
    return list_cases("mixtures", levels, plan.dtypes, repeats=1, seed=plan.seed)


def _aux_has_a_place(features: set[str]) -> bool:
    """Can a mod read aux_tensors? score_mod or softcap take one place, a mask the other."""
    scores_taken = bool(features & {"softcap", "score_mod"})
    masks_taken = bool(features & {"mask_mod", "causal", "window"})
    return "aux_tensors" not in features or not (scores_taken and masks_taken)


PAIRS = tuple(_pair(a, b) for a, b in _PAIRS)
TRIPLES = Property(
    "mask_layout_modification",
    "every mask in every layout with softcap, score_mod and sink",
    equals_oracle,
    listed=_triples("mask_layout_modification", FORWARD),
    levels=("lse",),
)
GRADIENT_TRIPLES = Property(
    "gradients_mask_layout_modification",
    "gradients of every mask in every layout with softcap, score_mod, sink and grouped heads",
    gradients_equal_oracle,
    listed=_triples("gradients_mask_layout_modification", GRADIENTS),
    needs=frozenset({"gradients"}),
    levels=("gradients",),
)
MIXTURES = Property(
    "mixtures",
    "any features at once",
    equals_oracle,
    listed=_list_mixtures,
    levels=("lse",),
)
GRADIENTS_WITH_ONE = tuple(_gradients_with(feature) for feature in FEATURES)
GRADIENTS_WITH_TWO = tuple(_gradients_with(*pair) for pair in _PAIRS)
