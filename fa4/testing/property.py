"""What a property is. The suite is in `features` (against the oracle) and `relations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from fa4.testing import strategies as draw
from fa4.testing.backends import DTYPES, Backend
from fa4.testing.case import Case

# From the element types that the back end takes to a strategy of cases.
Strategy = Callable[[tuple[str, ...]], SearchStrategy[Case]]


@dataclass(frozen=True)
class Property:
    """One thing that must hold for every case of `strategy(element types)`.

    check(backend, case) returns the largest share of the error budget that was used; it raises
    AssertionError if the property is broken, NotCovered if the back end does not offer the case.
    needs: features as in `Backend.reason_missing`; dtypes: the element types it is stated for.
    """

    name: str
    description: str
    strategy: Strategy
    check: Callable[[Backend, Case], float]
    needs: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = DTYPES


def dense(**features: Any) -> Strategy:
    """A `Property.strategy` of dense problems."""
    return lambda dtypes: draw.dense_cases(dtypes, **features)


def varlen(*layouts: str, **features: Any) -> Strategy:
    """A `Property.strategy` of packed, padded or paged problems."""
    return lambda dtypes: draw.varlen_cases(dtypes, layouts=layouts, **features)
