"""The property suite as data: PROPERTIES, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable

from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.features import EXTREMES, FEATURES, GRADIENTS
from fa4.testing.property import Property
from fa4.testing.relations import RELATIONS

__all__ = ["PROPERTIES", "Property", "check_property", "find_properties"]

PROPERTIES: tuple[Property, ...] = (
    *FEATURES,
    *EXTREMES,
    *GRADIENTS,
    *RELATIONS,
)


def find_properties(names: Iterable[str] | None = None) -> tuple[Property, ...]:
    """The properties of these names, all for None; ValueError for a name that is not there."""
    if names is None:
        return PROPERTIES
    by_name = {prop.name: prop for prop in PROPERTIES}
    chosen = []
    for name in names:
        if name not in by_name:
            raise ValueError(f"property must be one of {', '.join(by_name)}; got {name!r}")
        chosen.append(by_name[name])
    return tuple(chosen)


def check_property(name: str, backend: Backend, case: Case) -> float:
    """Check one property on one case, as a pasted test does; returns the share of the budget."""
    return find_properties([name])[0].check(backend, case)
