"""Run the cases of the atlas on a back end, and say which of the bugs it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from fa4.config import require
from fa4.testing.atlas.bug import Bug
from fa4.testing.atlas.entries import find_bugs
from fa4.testing.atlas.probes import PROBE_NEEDS, check_bug
from fa4.testing.backends import DTYPES, FP8, Backend, NotCovered, is_loadable, load_backend
from fa4.testing.isolation import isolate as isolate_backend
from fa4.testing.report import FAILED, NOT_COVERED, NOT_ROBUST, PASSED, STATUSES

SCHEMA_VERSION = 1

# progress(done, total, name of the bug that was looked for)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class BugResult:
    """What became of one bug's cases.

    status: one of `fa4.testing.report.STATUSES`; "failed" says that the back end has a bug like it,
    "not robust" that it has one which it may have. worst_share: largest error as a fraction of its
    budget. reason: why it is not covered. error, test: for a bug that was found.
    """

    name: str
    summary: str
    status: str
    worst_share: float | None = None
    reason: str = ""
    error: str = ""
    test: str = ""


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """Results in the order of the atlas. `skipped`: bugs that were not looked for after -x."""

    backend: str
    results: tuple[BugResult, ...]
    skipped: tuple[str, ...]
    seconds: float

    @property
    def found(self) -> tuple[BugResult, ...]:
        """The bugs that the back end has; those first that it must not have."""
        return self.with_status(FAILED) + self.with_status(NOT_ROBUST)

    @property
    def passed(self) -> bool:
        """Was no bug found that it must not have, and something judged?"""
        judged = self.with_status(PASSED) + self.with_status(NOT_ROBUST)
        return not self.with_status(FAILED) and bool(judged)

    def with_status(self, status: str) -> tuple[BugResult, ...]:
        """The results of one of STATUSES."""
        return tuple(result for result in self.results if result.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with `schema_version`."""
        counts = {name.replace(" ", "_"): len(self.with_status(name)) for name in STATUSES}
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "counts": counts,
            "bugs": [asdict(result) for result in self.results],
            "skipped": list(self.skipped),
        }


def needs_of_bug(bug: Bug) -> tuple[str, ...]:
    """Features that a back end must offer, as in `Backend.reason_missing`, without those of which
    a call speaks for itself."""
    needs = [*PROBE_NEEDS[bug.probe], *bug.needs]
    for case in bug.cases:
        needs.append(case.dtype)
        if case.dropout_p:
            needs.append("dropout")
    return tuple(dict.fromkeys(needs))


def judge_bug(bug: Bug, backend: Backend, *, strict: bool = False) -> BugResult:
    """Look for one bug."""

    def result(status: str, **fields: Any) -> BugResult:
        return BugResult(name=bug.name, summary=bug.summary, status=status, **fields)

    missing = {need: backend.reason_missing(need) for need in needs_of_bug(bug)}
    reasons = [f"{need}: {why}" for need, why in missing.items() if why is not None]
    if reasons:
        return result(NOT_COVERED, reason="; ".join(reasons))
    try:
        share = check_bug(bug, backend)
    except NotCovered as refused:
        return result(NOT_COVERED, reason=str(refused))
    except Exception as error:
        must = strict or bug.group == "core" or bug.group in backend.claims
        text = " ".join(str(error).split())
        message = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
        test = pasted_test(bug, backend, message)
        return result(FAILED if must else NOT_ROBUST, error=message, test=test)
    return result(PASSED, worst_share=share)


def pasted_test(bug: Bug, backend: Backend, error: str) -> str:
    """Source of a pytest test that fails as long as the back end has the bug."""
    loaded = f'"{backend.name}"' if is_loadable(backend.name) else "your_function"
    words = "".join(letter if letter.isalnum() else "_" for letter in bug.name)
    reason = error if len(error) <= 94 else f"{error[:90]} ..."
    back_end = f"isolate({loaded})" if backend.isolated else f"load_backend({loaded})"
    imported = "isolate" if backend.isolated else "load_backend"
    return (
        f"def test_unlike_{words}():\n"
        f"    # {reason}\n"
        f"    from fa4.testing import {imported}\n"
        "    from fa4.testing.atlas import BUGS, check_bug\n"
        "\n"
        f'    check_bug(BUGS["{bug.name}"], {back_end})\n'
    )


def _choose(only: Iterable[str] | None, dtypes: Iterable[str] | None) -> tuple[Bug, ...]:
    """The bugs asked for by name and by element type."""
    chosen = find_bugs(only)
    if dtypes is None:
        return chosen
    wanted = set(dtypes)
    for name in sorted(wanted):
        require(name in DTYPES + FP8, f"dtype must be one of {', '.join(DTYPES + FP8)}", name)
    kept = tuple(bug for bug in chosen if {case.dtype for case in bug.cases} <= wanted)
    if not kept:
        raise ValueError(f"no bug of the atlas that was asked for has a case in {sorted(wanted)}")
    return kept


@contextmanager
def _prepared(backend: Backend, isolate: bool | None, timeout_s: float | None) -> Iterator[Backend]:
    """The back end, in a worker process where that is asked for, or where it asks for it."""
    if timeout_s is not None:
        require(timeout_s > 0, "timeout must be above 0 seconds", timeout_s)
        require(isolate is not False, "a timeout needs isolation", "isolate=False")
    wanted = backend.isolate_by_default or timeout_s is not None if isolate is None else isolate
    loaded = isolate_backend(backend, timeout_s=timeout_s) if wanted else backend
    try:
        yield loaded
    finally:
        if loaded is not backend:
            loaded.close()


def run_corpus(
    backend: str | Callable[..., Any] | Backend,
    *,
    only: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    strict: bool = False,
    exitfirst: bool = False,
    isolate: bool | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> CorpusReport:
    """Run the minimal cases of the atlas alone.

    backend: a name as for `load_backend`, or a callable. only: patterns of names; dtypes: element
    types; None for all. strict: what a back end may leave open must hold, too. exitfirst: stop at
    the first bug. isolate, timeout_s: as in `fa4.testing.VerifyOptions`. Raises ValueError for
    unknown names; faults of the back end are results, not exceptions.
    """
    chosen = _choose(only, dtypes)
    start = time.monotonic()
    results: list[BugResult] = []
    given = load_backend(backend)
    with _prepared(given, isolate, timeout_s) as loaded:
        for bug in chosen:
            results.append(judge_bug(bug, loaded, strict=strict))
            if progress is not None:
                progress(len(results), len(chosen), bug.name)
            if exitfirst and results[-1].status == FAILED:
                break
    skipped = tuple(bug.name for bug in chosen[len(results) :])
    return CorpusReport(
        backend=given.name,
        results=tuple(results),
        skipped=skipped,
        seconds=time.monotonic() - start,
    )
