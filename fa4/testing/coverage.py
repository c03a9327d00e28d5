"""What the lists of a run would judge, counted without a call: pairs of levels of each output."""

from __future__ import annotations

from fa4.testing.case import Case
from fa4.testing.levels import FEATURES, LevelCounts, levels_of, needs_of, outputs_of
from fa4.testing.properties import PROPERTIES
from fa4.testing.property import Plan, Property

DEFAULT_REPEATS = 5
# Needs that are met by declaring them alone: a back end without gaps need not.
DECLARED = frozenset({"scales_block", "batch_invariant", "chunk_invariant"})


def everything_offered() -> frozenset[str]:
    """What a back end without gaps offers."""
    needs = {need for feature in FEATURES for need in needs_of(feature)}
    scales = {"scales_tensor", "scales_head"}
    return frozenset(needs | scales | {"dlse", "gradients", "block_sparse_tensors"})


def listed_cases(prop: Property, *, seed: int = 0, repeats: int = DEFAULT_REPEATS) -> list[Case]:
    """The cases that a property lists for a back end without gaps; none if it only draws."""
    if prop.listed is None:
        return []
    found = prop.listed(Plan(prop.dtypes, repeats, seed, everything_offered()))
    return [case for case in found if isinstance(case, Case)]


def listed_counts(*, seed: int = 0, repeats: int = DEFAULT_REPEATS) -> LevelCounts:
    """Pairs and triples of levels of all lists, for each output."""
    counts = LevelCounts()
    for prop in PROPERTIES:
        for case in listed_cases(prop, seed=seed, repeats=repeats):
            counts.add((*levels_of(case), *prop.levels), outputs_of(case, prop.levels))
    return counts
