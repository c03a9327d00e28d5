"""What a run of the suite found: results by property, failures by cause, pairs of levels judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from fa4.testing.levels import LevelCounts

SCHEMA_VERSION = 2
PASSED, FAILED, NOT_COVERED, NOT_ROBUST = "passed", "failed", "not covered", "not robust"
STATUSES = (PASSED, FAILED, NOT_COVERED, NOT_ROBUST)


@dataclass(frozen=True)
class PropertyResult:
    """What happened to one property.

    cases: calls that were judged; worst_share: largest error as a fraction of its budget. reason:
    why it is not covered, or which cases were not. error, example, test: for a failure; needs: what
    the smallest failing case needs to fail. status "not robust": a failure of a property that a
    back end may leave open. levels: counts as `LevelCounts.as_dict` gives them.
    """

    name: str
    description: str
    status: str
    cases: int = 0
    worst_share: float | None = None
    reason: str = ""
    error: str = ""
    example: str = ""
    needs: tuple[str, ...] = ()
    test: str = ""
    seconds: float = 0.0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data without the level counts, which a report adds up."""
        return {name: value for name, value in asdict(self).items() if name != "levels"}


@dataclass(frozen=True)
class FailureGroup:
    """Failures that one cause explains: all of them need `needs` to fail."""

    needs: tuple[str, ...]
    properties: tuple[str, ...]
    smallest: PropertyResult

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: `smallest` is the property with the simplest example."""
        first = self.smallest
        return {
            "needs": list(self.needs),
            "properties": list(self.properties),
            "status": first.status,
            "smallest": first.name,
            "error": first.error,
            "example": first.example,
            "test": first.test,
        }


def group_failures(results: Iterable[PropertyResult]) -> tuple[FailureGroup, ...]:
    """Failures by cause: the fewest needs first, each with all failures that need as much."""
    left = sorted(
        (result for result in results if result.status in (FAILED, NOT_ROBUST)),
        key=lambda result: (result.status != FAILED, len(result.needs), len(result.example)),
    )
    groups = []
    while left:
        first = left[0]
        same = [
            result
            for result in left
            if set(first.needs) <= set(result.needs) and result.status == first.status
        ]
        groups.append(FailureGroup(first.needs, tuple(r.name for r in same), first))
        left = [result for result in left if result not in same]
    return tuple(groups)


@dataclass(frozen=True)
class VerifyReport:
    """Results in the order of the suite; `not_covered`: feature to reason, over all of them.

    stopped: the run ended at the first failure (exitfirst), and `skipped` names what did not run.
    """

    backend: str
    max_examples: int
    seed: int
    results: tuple[PropertyResult, ...]
    seconds: float
    not_covered: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Did nothing fail, and something run?"""
        return not self.with_status(FAILED) and bool(self.with_status(PASSED))

    @property
    def failures(self) -> tuple[FailureGroup, ...]:
        """Failures, and properties that are not robust, grouped by what they need."""
        return group_failures(self.results)

    @property
    def levels(self) -> dict[str, dict[str, int]]:
        """How many judged cases had each pair of levels, and each triple of mask, layout and
        modification; see `fa4.testing.levels`."""
        counts = LevelCounts()
        for result in self.results:
            if result.levels:
                counts.merge(result.levels)
        return counts.as_dict()

    def with_status(self, status: str) -> tuple[PropertyResult, ...]:
        """The results of one of STATUSES."""
        return tuple(result for result in self.results if result.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with `schema_version`."""
        counts = {name.replace(" ", "_"): len(self.with_status(name)) for name in STATUSES}
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "max_examples": self.max_examples,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "counts": counts,
            "cases": sum(result.cases for result in self.results),
            "properties": [result.as_dict() for result in self.results],
            "failures": [group.as_dict() for group in self.failures],
            "skipped": list(self.skipped),
            "not_covered": dict(self.not_covered),
            "levels": self.levels,
        }
