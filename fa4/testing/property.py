"""What a property is. The suite is in `features`, `combinations`, `statistics` and `relations`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis.strategies import SearchStrategy

from fa4.testing import strategies as draw
from fa4.testing.backends import DTYPES, Backend
from fa4.testing.case import Case
from fa4.testing.shrink import EVERYTHING

# From the element types that the back end takes to a strategy of cases.
Strategy = Callable[[tuple[str, ...]], SearchStrategy[Case]]


# From a back end and the element types that it takes to a RuleBasedStateMachine.
Machine = Callable[[Backend, tuple[str, ...]], Any]


@dataclass(frozen=True)
class Plan:
    """What a run asks of a property: element types, cases per combination, seed, and the features
    that the back end offers."""

    dtypes: tuple[str, ...]
    repeats: int
    seed: int
    offered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Property:
    """One thing that must hold: for every case of `listed`, and for those that Hypothesis draws.

    check(backend, case) returns the largest share of the error budget that was used; it raises
    AssertionError if the property is broken, NotCovered if the back end does not offer the case.
    listed: the cases of a covering design; strategy: from element types to a search strategy; one
    of them at least. needs: features as in `Backend.reason_missing`; dtypes: the element types it
    is stated for. group: "core", or "robustness" for what a back end may leave open. levels: what
    the check judges beyond the case ("lse", "gradients"). shrinks: fields that a smaller example
    may change without leaving the property. variants: fields of the calls that the check compares,
    where those are not the case's own. first_look: cases listed, and as many drawn, before the
    rest of the suite when a run ends at the first failure. machine: draws steps in place of cases;
    then what is listed and checked are walks (`fa4.testing.walk`).
    """

    name: str
    description: str
    check: Callable[[Backend, Case], float]
    strategy: Strategy | None = None
    listed: Callable[[Plan], list[Case]] | None = None
    needs: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = DTYPES
    group: str = "core"
    levels: tuple[str, ...] = ()
    shrinks: frozenset[str] = field(default=EVERYTHING)
    variants: tuple[Mapping[str, Any], ...] = ()
    first_look: int = 2
    machine: Machine | None = None


def dense(**features: Any) -> Strategy:
    """A `Property.strategy` of dense problems."""
    return lambda dtypes: draw.dense_cases(dtypes, **features)


def varlen(*layouts: str, **features: Any) -> Strategy:
    """A `Property.strategy` of packed, padded or paged problems."""
    return lambda dtypes: draw.varlen_cases(dtypes, layouts=layouts, **features)
