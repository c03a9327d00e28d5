"""All sets of constants that fit the published figures equally well, and what they agree on.

Published throughput does not determine the constants of the B200's cost table: sets that fit it to
the same error disagree about kernels that nobody has measured. `fa4/measured/b200_constants.csv`
holds a sample of them (`lab/benchmarks/ensemble.py`). A prediction's interval is what they
say; a difference whose sign they do not agree on is undecided.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fa4.sim.cost_table import HopperCosts
from fa4.sim.machine import BLACKWELL_COSTS, Machine

if TYPE_CHECKING:
    from fa4.sim.options import SimulationRequest

CONSTANTS_FILE = Path(__file__).parents[1] / "measured" / "b200_constants.csv"
ERROR_COLUMN = "mean_error"
ALIKE = 0.001  # relative difference of times that are called equal


@dataclass(frozen=True, kw_only=True)
class Interval:
    """From the least to the most that any of `sets` sets of constants says."""

    least: float
    most: float
    sets: int

    @property
    def undecided(self) -> bool:
        """Of a ratio: do some sets say that it gains, others that it loses?"""
        return self.least < 1.0 - ALIKE and self.most > 1.0 + ALIKE


@lru_cache(maxsize=1)
def constant_sets() -> tuple[Mapping[str, float], ...]:
    """The recorded sets: figure of the cost table -> value."""
    with CONSTANTS_FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        {name: float(text) for name, text in row.items() if name != ERROR_COLUMN} for row in rows
    )


def ensemble_of(machine: Machine) -> tuple[Machine, ...]:
    """The machine with each set of constants; none for a machine that they were not fitted for.

    Figures that differ from the package's own were given by the caller and stay.
    """
    costs = machine.costs
    if isinstance(costs, HopperCosts) or not machine.gpu.tmem_cols:
        return ()
    own = [name for name in constant_sets()[0]
           if getattr(costs, name) == getattr(BLACKWELL_COSTS, name)]  # fmt: skip
    if not own:
        return ()
    return tuple(
        replace(machine, costs=replace(costs, **{name: found[name] for name in own}))
        for found in constant_sets()
    )


def seconds_of(request: SimulationRequest) -> tuple[float, ...]:
    """Times of a request with its own constants and with each other set that fits as well."""
    return tuple(_seconds(request, (request.machine, *ensemble_of(request.machine))))


def _seconds(request: SimulationRequest, machines: Sequence[Machine]) -> Iterator[float]:
    from fa4.sim.predict import call_seconds

    for machine in machines:
        yield call_seconds(request.problem, request.pipeline, machine, request.simulation)


def interval_of(values: Sequence[float]) -> Interval | None:
    """Of what the sets say; None where there are none beside the machine's own."""
    if len(values) < 2:
        return None
    return Interval(least=min(values), most=max(values), sets=len(values) - 1)


def speedup_interval(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    """Of times `before` over times `after`, set by set; None where there is nothing to compare."""
    if len(before) != len(after):
        return None
    return interval_of([x / y for x, y in zip(before, after, strict=True)])
