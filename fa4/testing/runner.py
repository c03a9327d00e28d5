"""Run the property suite on a back end, without pytest, and report what happened.

Each property runs under Hypothesis with a fixed seed and no database, so that a run can be
repeated. A property passes only if cases were really run; what a back end does not offer is
reported as not covered, with the reason.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as set_seed
from hypothesis.errors import Flaky, HypothesisException

from fa4.config import require_int
from fa4.request import DENSE_DEFAULTS
from fa4.testing.backends import Backend, NotCovered, load_backend
from fa4.testing.case import Case
from fa4.testing.inputs import build_options
from fa4.testing.properties import find_properties
from fa4.testing.property import Property
from fa4.testing.reproduce import failing_test

SCHEMA_VERSION = 1
OPTIONS = frozenset(DENSE_DEFAULTS)
PASSED, FAILED, NOT_COVERED = "passed", "failed", "not covered"
DEFAULT_EXAMPLES = 50
SHRINK_SECONDS = 15.0  # after that the smallest failure so far is reported

# progress(done, total, name of the property about to run)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PropertyResult:
    """What happened to one property.

    cases: calls that were judged; worst_share: largest error as a fraction of its budget. reason:
    why it is not covered, or which cases were not. error, example, test: for a failure.
    """

    name: str
    description: str
    status: str
    cases: int = 0
    worst_share: float | None = None
    reason: str = ""
    error: str = ""
    example: str = ""
    test: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class VerifyReport:
    """Results in the order of the suite; `not_covered`: feature to reason, over all of them."""

    backend: str
    max_examples: int
    seed: int
    results: tuple[PropertyResult, ...]
    not_covered: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Did nothing fail, and something run?"""
        return not self.with_status(FAILED) and bool(self.with_status(PASSED))

    def with_status(self, status: str) -> tuple[PropertyResult, ...]:
        """The results of one status: "passed", "failed" or "not covered"."""
        return tuple(result for result in self.results if result.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with `schema_version`."""
        counts = {
            status.replace(" ", "_"): len(self.with_status(status))
            for status in (PASSED, FAILED, NOT_COVERED)
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "max_examples": self.max_examples,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "counts": counts,
            "cases": sum(result.cases for result in self.results),
            "properties": [asdict(result) for result in self.results],
            "not_covered": dict(self.not_covered),
        }


class _Recorder:
    """Runs a check on drawn cases and remembers what happened."""

    def __init__(self, prop: Property, backend: Backend) -> None:
        self.prop, self.backend = prop, backend
        self.cases, self.worst = 0, 0.0
        self.reasons: dict[str, None] = {}  # an ordered set
        # Options that no judged case has used yet: if some cases were refused, it was these.
        self.unused = set(prop.needs & OPTIONS)
        self.failing: Case | None = None
        self.error: Exception | None = None
        self.deadline: float | None = None

    def run(self, case: Case) -> None:
        """One example; once time for shrinking is up, only the smallest failure fails."""
        if self.deadline and time.monotonic() > self.deadline and case != self.failing:
            return
        try:
            share = self.prop.check(self.backend, case)
        except NotCovered as missing:
            self.reasons[str(missing)] = None
            return
        except Exception as error:
            self.cases += self.error is None
            self.failing, self.error = case, error
            self.deadline = self.deadline or time.monotonic() + SHRINK_SECONDS
            raise
        if self.error is None:
            self.cases += 1
            self.worst = max(self.worst, share)
            if self.unused:
                self.unused -= set(build_options(case))


def run_property(
    prop: Property, backend: Backend, *, max_examples: int = DEFAULT_EXAMPLES, seed: int = 0
) -> PropertyResult:
    """Check one property on up to `max_examples` cases; the same seed draws the same cases."""
    start = time.monotonic()

    def result(status: str, **fields: Any) -> PropertyResult:
        seconds = time.monotonic() - start
        return PropertyResult(prop.name, prop.description, status, seconds=seconds, **fields)

    reasons = _missing_needs(prop, backend)
    dtypes = tuple(name for name in prop.dtypes if backend.reason_missing(name) is None)
    if not dtypes:
        reasons.append(f"none of the element types {', '.join(prop.dtypes)}")
    if reasons:
        return result(NOT_COVERED, reason="; ".join(reasons))
    recorder = _Recorder(prop, backend)
    note = ""
    try:
        _search(recorder, dtypes, max_examples, seed)
    except Flaky:
        note = " (only sometimes: the back end is not deterministic)"
    except HypothesisException as error:
        if recorder.error is None:
            raise
        note = f" ({type(error).__name__})"
    except Exception as error:
        if recorder.error is None:  # the fault is ours
            raise
        recorder.error = error
    reason = "; ".join(recorder.reasons)
    if recorder.error is not None and recorder.failing is not None:
        message = _one_line(recorder.error) + note
        return result(
            FAILED,
            cases=recorder.cases,
            reason=reason,
            error=message,
            example=repr(recorder.failing),
            test=failing_test(prop.name, backend, recorder.failing, message),
        )
    if recorder.cases == 0 or (reason and recorder.unused):
        return result(NOT_COVERED, reason=reason or "no case was drawn")
    return result(PASSED, cases=recorder.cases, worst_share=recorder.worst, reason=reason)


def _missing_needs(prop: Property, backend: Backend) -> list[str]:
    reasons = []
    for feature in sorted(prop.needs):
        reason = backend.reason_missing(feature)
        if reason is not None:
            backend.notes.setdefault(feature, reason)
            reasons.append(f"{feature}: {reason}")
    return reasons


def _search(recorder: _Recorder, dtypes: tuple[str, ...], max_examples: int, seed: int) -> None:
    """Let Hypothesis draw and shrink; raises the error of the smallest failing case."""
    prop = recorder.prop
    # A seed of its own for each property, so that choosing some of them draws the same cases.
    own_seed = zlib.crc32(f"{seed}:{prop.name}".encode())
    configure = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

    @set_seed(own_seed)
    @configure
    @given(prop.strategy(dtypes))
    def search(case: Case) -> None:
        recorder.run(case)

    search()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def verify(
    backend: str | Callable[..., Any] | Backend,
    *,
    max_examples: int = DEFAULT_EXAMPLES,
    seed: int = 0,
    properties: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run the suite, or the named properties, on a back end.

    backend: a name as for `load_backend`, or a callable. max_examples: cases per property.
    progress: called as progress(done, total, name) before each property and once at the end.
    Raises ValueError for unknown names; faults of the back end are results, not exceptions.
    """
    require_int("max_examples", max_examples, 1)
    require_int("seed", seed, 0)
    chosen = find_properties(properties)
    loaded = load_backend(backend)
    start = time.monotonic()
    results = []
    for done, prop in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), prop.name)
        results.append(run_property(prop, loaded, max_examples=max_examples, seed=seed))
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    for name in sorted({name for prop in chosen for name in prop.dtypes}):
        reason = loaded.reason_missing(name)
        if reason is not None:
            loaded.notes.setdefault(name, reason)
    return VerifyReport(
        backend=loaded.name,
        max_examples=max_examples,
        seed=seed,
        results=tuple(results),
        not_covered=dict(loaded.notes),
        seconds=time.monotonic() - start,
    )
