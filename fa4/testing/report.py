"""What a run of the suite found: results by property, failures by cause, pairs of levels judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from fa4.testing.causes import Evidence, FailureGroup, Symptom, group_failures
from fa4.testing.levels import LevelCounts, PairCoverage

SCHEMA_VERSION = 3
PASSED, FAILED, NOT_COVERED, NOT_ROBUST = "passed", "failed", "not covered", "not robust"
STATUSES = (PASSED, FAILED, NOT_COVERED, NOT_ROBUST)


@dataclass(frozen=True)
class PropertyResult:
    """What happened to one property.

    cases: calls that were judged; worst_share: largest error as a fraction of its budget. reason:
    why it is not covered, or which cases were not. error, example, test: for a failure; needs: what
    the smallest failing case needs to fail. status "not robust": a failure of a property that a
    back end may leave open. symptoms: what is wrong, output by output; the first of them gives
    error, example, needs and test. levels: counts as `LevelCounts.as_dict` gives them.
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
    symptoms: tuple[Symptom, ...] = ()
    seconds: float = 0.0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data without the level counts, which a report adds up, and the symptoms, which it
        groups."""
        left_out = ("levels", "symptoms")
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name not in left_out}


def evidence_of(results: Iterable[PropertyResult]) -> tuple[Evidence, ...]:
    """Every symptom of every failing property."""
    return tuple(
        Evidence(name=result.name, status=result.status, symptom=symptom)
        for result in results
        for symptom in result.symptoms
    )


@dataclass(frozen=True)
class VerifyReport:
    """Results in the order of the suite; `not_covered`: feature to reason, over all of them.

    skipped: what did not run, as the run ended at the first failure. words: the options of the
    command that draws the same.
    """

    backend: str
    max_examples: int
    seed: int
    results: tuple[PropertyResult, ...]
    seconds: float
    not_covered: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Did nothing fail, and something run?"""
        return not self.with_status(FAILED) and bool(self.with_status(PASSED))

    @property
    def failures(self) -> tuple[FailureGroup, ...]:
        """Failures, and properties that are not robust, by cause."""
        return group_failures(evidence_of(self.results))

    @property
    def levels(self) -> dict[str, dict[str, int]]:
        """How many judged cases had each pair of levels, and each triple of mask, layout and
        modification, and so for each output; see `fa4.testing.levels`."""
        return self._counts().as_dict()

    @property
    def coverage(self) -> tuple[PairCoverage, ...]:
        """Of each output, how often its pairs of levels were judged, and which hardly were."""
        return self._counts().coverage()

    def _counts(self) -> LevelCounts:
        counts = LevelCounts()
        for result in self.results:
            counts.merge(result.levels)
        return counts

    def with_status(self, status: str) -> tuple[PropertyResult, ...]:
        """The results of one of STATUSES."""
        return tuple(result for result in self.results if result.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with `schema_version`."""
        counts = {name.replace(" ", "_"): len(self.with_status(name)) for name in STATUSES}
        levels = self.levels
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "max_examples": self.max_examples,
            "seed": self.seed,
            "words": list(self.words),
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "counts": counts,
            "cases": sum(result.cases for result in self.results),
            "properties": [result.as_dict() for result in self.results],
            "failures": [group.as_dict() for group in self.failures],
            "skipped": list(self.skipped),
            "not_covered": dict(self.not_covered),
            "levels": {name: levels[name] for name in ("pairs", "triples")},
            "coverage": {row.output: row.as_dict() for row in self.coverage},
        }
