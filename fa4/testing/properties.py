"""The property suite as data: PROPERTIES, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from fa4.testing.axes import AXES, GRADIENT_AXES, GRADIENT_REGIMES
from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.combinations import (
    GRADIENT_TRIPLES,
    GRADIENTS_WITH_ONE,
    GRADIENTS_WITH_TWO,
    MIXTURES,
    PAIRS,
    TRIPLES,
)
from fa4.testing.features import (
    EXTREMES,
    FEATURES,
    GRADIENTS,
    GRADIENTS_MASKED,
    REGIMES,
    ROBUSTNESS,
)
from fa4.testing.fp8 import FP8_PROPERTIES
from fa4.testing.mla import GRADIENT_MLA, MLA, PLAIN_MLA
from fa4.testing.property import Property
from fa4.testing.relations import RELATIONS
from fa4.testing.saved_out import SAVED_OUT
from fa4.testing.sessions.properties import SESSION_PROPERTIES
from fa4.testing.state import MEMORY, PLAIN_STATE, STATE
from fa4.testing.statistics import GRADIENT_STATISTICS, STATISTICS

__all__ = ["PROPERTIES", "Property", "check_property", "find_properties"]

# What is simple first, so that the first failure is the one that says most: what a call does to
# memory, which can look like anything else; no feature, then one, its gradients, then two; what
# joins several (latent heads, a cache) behind the pairs that would name the one; at last what
# compares calls.
PROPERTIES: tuple[Property, ...] = (
    *MEMORY,
    *FEATURES[:1],
    *PLAIN_STATE,
    PLAIN_MLA,
    *STATISTICS,
    *REGIMES,
    *FEATURES[1:],
    *EXTREMES,
    *AXES,
    *FP8_PROPERTIES,
    *GRADIENTS,
    *GRADIENT_REGIMES,
    *GRADIENTS_WITH_ONE,
    *GRADIENT_AXES,
    GRADIENT_MLA,
    *STATE,
    *GRADIENT_STATISTICS,
    *PAIRS,
    *MLA,
    *SESSION_PROPERTIES,
    *ROBUSTNESS,
    SAVED_OUT,
    GRADIENTS_MASKED,
    *GRADIENTS_WITH_TWO,
    TRIPLES,
    GRADIENT_TRIPLES,
    MIXTURES,
    *RELATIONS,
)


def find_properties(patterns: Iterable[str] | None = None) -> tuple[Property, ...]:
    """The properties whose names match one of the patterns (`*`, `?`), all for None.

    ValueError for a pattern that matches none.
    """
    if patterns is None:
        return PROPERTIES
    chosen: list[Property] = []
    for pattern in patterns:
        found = [prop for prop in PROPERTIES if fnmatchcase(prop.name, pattern)]
        if not found:
            raise ValueError(
                f"no property matches {pattern!r}; `fa4 verify --list` names them, "
                "and a pattern may hold * and ?"
            )
        chosen += [prop for prop in found if prop not in chosen]
    return tuple(chosen)


def check_property(name: str, backend: Backend, case: Case) -> float:
    """Check one property on one case, as a pasted test does; returns the share of the budget."""
    return find_properties([name])[0].check(backend, case)
