"""The measured figures of lab/hardware/results/hopper_units.json, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.records import read_record

UNITS = "hopper_units"
STARTS = "hopper_starts"  # lives of CTAs, energy
STEPS = "hopper_steps"  # warpgroups beside each other
PORTS = "hopper_ports"  # shared memory beside products, rows within sectors
SCHEMA = 1


@dataclass(frozen=True)
class Unit:
    """A figure: the median of its repeats, and the least and most of them, in `unit`."""

    program: str
    name: str
    value: float
    interval: tuple[float, float]
    unit: str
    method: str
    repeats: int

    def __post_init__(self) -> None:
        """Raise ValueError unless it is complete and its value lies in its interval."""
        least, most = self.interval
        finite = all(math.isfinite(x) for x in (self.value, least, most))
        if not (finite and least <= self.value <= most):
            raise ValueError(f"{self.name}: {self.value} is not within [{least}, {most}]")
        if not (self.unit and self.method and self.repeats > 0):
            raise ValueError(f"{self.name}: unit, method and repeats must be given")

    @property
    def spread(self) -> float:
        """The interval's width as a share of the value."""
        return (self.interval[1] - self.interval[0]) / abs(self.value) if self.value else 0.0


def parse(report: Mapping[str, Any]) -> dict[str, Unit]:
    """{name: figure}. Raises ValueError for another schema, a failed program or a bad figure."""
    if report.get("schema_version") != SCHEMA:
        raise ValueError(f"schema_version must be {SCHEMA}; got {report.get('schema_version')!r}")
    failed = [state["program"] for state in report["states"] if "failed" in state]
    if failed:
        raise ValueError(f"programs that failed: {', '.join(failed)}")
    found: dict[str, Unit] = {}
    for entry in report["figures"]:
        figure = Unit(**{**entry, "interval": tuple(entry["interval"])})
        if figure.name in found:
            raise ValueError(f"{figure.name} is there twice")
        found[figure.name] = figure
    return found


@cache
def report(record: str = UNITS) -> Mapping[str, Any]:
    """The result file as it is."""
    return read_record(record)


@cache
def figures(record: str = UNITS) -> Mapping[str, Unit]:
    """{name: figure} of the result file."""
    return parse(report(record))
