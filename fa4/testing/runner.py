"""Run the property suite on a back end, without pytest, and report what happened.

Each property runs the cases of its covering design and then those that Hypothesis draws, with a
fixed seed and no database, so that a run can be repeated. A property passes only if cases were
really run; what a back end does not offer is reported as not covered, with the reason.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as set_seed
from hypothesis.stateful import run_state_machine_as_test
from threadpoolctl import threadpool_limits

from fa4.call.checked import DENSE_DEFAULTS
from fa4.config import require, require_int
from fa4.testing.backends import DTYPES, FP8, Backend, NotCovered, load_backend
from fa4.testing.case import Case
from fa4.testing.coverage import everything_offered
from fa4.testing.diagnosis import Doctor
from fa4.testing.inputs import build_options
from fa4.testing.isolation import isolate
from fa4.testing.levels import LevelCounts, levels_of, outputs_of
from fa4.testing.properties import find_properties
from fa4.testing.property import Plan, Property
from fa4.testing.refusals import BackendFailed
from fa4.testing.report import FAILED, NOT_COVERED, NOT_ROBUST, PASSED, PropertyResult, VerifyReport
from fa4.testing.symptoms import one_line
from fa4.testing.walk import Walk

OPTIONS = frozenset(DENSE_DEFAULTS)
DEFAULT_EXAMPLES = 20
EXAMPLES_PER_REPEAT = 4  # with the default, the design comes to its 5 cases of each pair
DEFAULT_STEPS = 12

# progress(done, total, name of the property that was run)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How to run the suite.

    max_examples: cases that Hypothesis draws per property; 5 of each combination of the design come
    with 20. only: name patterns of properties, None for all. dtypes: element types to draw, None
    for all. exitfirst: stop at the first failure. quick: a first look at
    everything, drawn only where nothing is listed. strict: the robustness properties must hold.
    steps: of a walk of the stateful properties; there are max_examples / 4 walks of each.
    jobs: processes. isolate: run the back end in a worker process, which is replaced when it dies;
    None: where the back end asks for it, or with a timeout. timeout_s: seconds for a call.
    """

    max_examples: int = DEFAULT_EXAMPLES
    seed: int = 0
    only: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    exitfirst: bool = False
    quick: bool = False
    strict: bool = False
    steps: int = DEFAULT_STEPS
    jobs: int = 1
    isolate: bool | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check numbers and names; ValueError or TypeError with one line."""
        require_int("max_examples", self.max_examples, 1, 100_000)
        require_int("seed", self.seed, 0)
        require_int("jobs", self.jobs, 1, 256)
        require_int("steps", self.steps, 1, 1000)
        for name in self.dtypes or ():
            require(name in DTYPES + FP8, f"dtype must be one of {', '.join(DTYPES + FP8)}", name)
        if self.timeout_s is not None:
            require(self.timeout_s > 0, "timeout must be above 0 seconds", self.timeout_s)
            require(self.isolate is not False, "a timeout needs isolation", "isolate=False")
        find_properties(self.only)

    @property
    def repeats(self) -> int:
        """Cases of each combination of the covering design."""
        return max(1, self.max_examples // EXAMPLES_PER_REPEAT)

    @property
    def words(self) -> tuple[str, ...]:
        """What decides which cases are drawn and what fails, as the command's options."""
        given: list[str] = ["--seed", str(self.seed), "--max-examples", str(self.max_examples)]
        if self.steps != DEFAULT_STEPS:
            given += ["--steps", str(self.steps)]
        for option, values in (("--only", self.only), ("--dtype", self.dtypes)):
            given += [word for value in values or () for word in (option, value)]
        flags = {"--quick": self.quick, "--strict": self.strict, "--exitfirst": self.exitfirst}
        return (*given, *(flag for flag, on in flags.items() if on))


class _Recorder:
    """Runs a check on cases and remembers what happened."""

    def __init__(self, prop: Property, backend: Backend) -> None:
        self.prop, self.backend = prop, backend
        self.cases, self.worst = 0, 0.0
        self.reasons: dict[str, None] = {}  # an ordered set
        # Options that no judged case has used yet: if some cases were refused, it was these.
        self.unused = set(prop.needs & OPTIONS)
        self.failing: Case | None = None
        self.error: Exception | None = None
        self.levels = LevelCounts()
        self.extra = tuple(level for level in prop.levels if level != "lse" or backend.returns_lse)

    def run(self, case: Case) -> None:
        """One example; nothing is run after a failure."""
        if self.error is not None:
            raise self.error
        try:
            share = self.prop.check(self.backend, case)
        except NotCovered as missing:
            self.reasons[str(missing)] = None
            return
        except Exception as error:
            self.cases += 1
            self.failing, self.error = case, error
            raise
        self.cases += 1
        self.worst = max(self.worst, share)
        if isinstance(case, Walk):  # its case says nothing of what was called
            return
        self.levels.add((*levels_of(case), *self.extra), outputs_of(case, self.extra))
        if self.unused:
            self.unused -= set(build_options(case))

    def note(self, machine: Any) -> None:
        """What a walk that Hypothesis drew came to."""
        if self.error is not None or machine.session is None:
            return
        if isinstance(machine.error, NotCovered):
            self.reasons[str(machine.error)] = None
            return
        self.cases += 1
        if machine.error is not None:
            self.failing, self.error = machine.session.walk, machine.error
        self.worst = max(self.worst, machine.session.worst)


def run_property(
    prop: Property,
    backend: Backend,
    options: VerifyOptions | None = None,
    most: int | None = None,
    doctor: Doctor | None = None,
) -> PropertyResult:
    """Check one property; the same options draw the same cases, `most` limits their number.

    doctor: knows the causes that were found before.
    """
    start = time.monotonic()
    options = options or VerifyOptions()

    def result(status: str, **fields: Any) -> PropertyResult:
        seconds = time.monotonic() - start
        return PropertyResult(prop.name, prop.description, status, seconds=seconds, **fields)

    reasons = _missing_needs(prop, backend)
    wanted = [name for name in prop.dtypes if options.dtypes is None or name in options.dtypes]
    refusals = {name: backend.reason_missing(name) for name in wanted}
    for name, why in refusals.items():
        if why is not None:
            backend.notes.setdefault(name, why)
    dtypes = tuple(name for name, why in refusals.items() if why is None)
    if not dtypes:
        reasons.append(f"none of the element types {', '.join(wanted or prop.dtypes)}")
    if reasons:
        return result(NOT_COVERED, reason="; ".join(reasons))
    recorder = _Recorder(prop, backend)
    _search(recorder, dtypes, options, most)
    reason = "; ".join(recorder.reasons)
    if recorder.error is not None and recorder.failing is not None:
        found = _explain(recorder, doctor or Doctor(backend))
        return result(_failed(prop, backend, options), reason=reason, **found)
    if recorder.cases == 0 or (reason and recorder.unused):
        return result(NOT_COVERED, reason=reason or "no case was drawn")
    return result(
        PASSED,
        cases=recorder.cases,
        worst_share=recorder.worst,
        reason=reason,
        levels=recorder.levels.as_dict(),
    )


def _failed(prop: Property, backend: Backend, options: VerifyOptions) -> str:
    """ "failed", or "not robust" for what the back end does not claim and nobody insists on."""
    must = prop.group == "core" or options.strict or prop.group in backend.claims
    return FAILED if must else NOT_ROBUST


def _explain(recorder: _Recorder, doctor: Doctor) -> dict[str, Any]:
    """What is wrong with the failing case; its first symptom is that of the result."""
    assert recorder.failing is not None and recorder.error is not None
    symptoms = doctor.diagnose(recorder.prop, recorder.failing, recorder.error)
    first = symptoms[0]
    # What takes many values together says more of them than its worst element does.
    alone = not recorder.prop.shrinks and not isinstance(recorder.error, BackendFailed)
    return {
        "cases": recorder.cases,
        "error": one_line(recorder.error) if alone else first.error,
        "example": first.example,
        "needs": first.needs,
        "test": first.test,
        "symptoms": symptoms,
    }


def _missing_needs(prop: Property, backend: Backend) -> list[str]:
    reasons = []
    for feature in sorted(prop.needs):
        reason = backend.reason_missing(feature)
        if reason is not None:
            backend.notes.setdefault(feature, reason)
            reasons.append(f"{feature}: {reason}")
    return reasons


def _offered(backend: Backend) -> frozenset[str]:
    """Which needs of the features, of gradients and of block lists the back end meets."""
    needs = everything_offered()
    return frozenset(need for need in needs if backend.reason_missing(need) is None)


def _search(
    recorder: _Recorder, dtypes: tuple[str, ...], options: VerifyOptions, most: int | None
) -> None:
    """Run the listed cases, then what Hypothesis draws; a failure is left in the recorder."""
    prop = recorder.prop
    repeats = options.repeats
    if most is not None:
        options = replace(options, max_examples=min(most, options.max_examples))
    try:
        if prop.listed is not None:
            plan = Plan(dtypes, repeats, options.seed, _offered(recorder.backend))
            for case in prop.listed(plan)[:most]:
                recorder.run(case)
        if prop.strategy is not None and not (options.quick and prop.listed):
            _draw(recorder, dtypes, options)
        if prop.machine is not None and not options.quick and (most is None or most > 1):
            _walk(recorder, dtypes, options)
    except Exception:
        if recorder.error is None:  # the fault is ours
            raise


def _draw(recorder: _Recorder, dtypes: tuple[str, ...], options: VerifyOptions) -> None:
    """Let Hypothesis draw; raises the error of the first failing case."""
    prop = recorder.prop
    assert prop.strategy is not None

    @set_seed(_own_seed(prop, options))
    @_settings(options.max_examples)
    @given(prop.strategy(dtypes))
    def search(case: Case) -> None:
        recorder.run(case)

    search()


def _walk(recorder: _Recorder, dtypes: tuple[str, ...], options: VerifyOptions) -> None:
    """Let Hypothesis draw walks, a quarter as many as cases; raises as `_draw` does."""
    prop = recorder.prop
    assert prop.machine is not None
    machine = prop.machine(recorder.backend, dtypes)
    machine.finished = staticmethod(recorder.note)
    how = settings(_settings(options.repeats), stateful_step_count=options.steps)
    run_state_machine_as_test(set_seed(_own_seed(prop, options))(machine), settings=how)


def _own_seed(prop: Property, options: VerifyOptions) -> int:
    """Of each property, so that choosing some of them draws the same cases."""
    return zlib.crc32(f"{options.seed}:{prop.name}".encode())


def _settings(examples: int) -> settings:
    """Draw, and leave a failure as it is."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def prepare(backend: Backend, options: VerifyOptions) -> Backend:
    """The back end, in a worker process where that is asked for."""
    wanted = options.isolate
    if wanted is None:
        wanted = backend.isolate_by_default or options.timeout_s is not None
    return isolate(backend, timeout_s=options.timeout_s) if wanted else backend


_worker: Doctor | None = None


def _start_worker(name: str, options: VerifyOptions) -> None:
    global _worker
    threadpool_limits(1)
    _worker = Doctor(prepare(load_backend(name), options))


def _run_in_worker(name: str, options: VerifyOptions) -> tuple[PropertyResult, dict[str, str]]:
    assert _worker is not None
    (prop,) = find_properties([name])
    most, backend = prop.first_look if options.quick else None, _worker.backend
    return run_property(prop, backend, options, most, _worker), dict(backend.notes)


def _results(
    chosen: tuple[Property, ...], backend: Backend, options: VerifyOptions
) -> Generator[PropertyResult, None, None]:
    """Results in order, in this process or in several."""
    if options.jobs == 1:
        loaded = prepare(backend, options)
        backend.notes, doctor = loaded.notes, Doctor(loaded)
        if options.exitfirst:  # a little of everything first: most faults show at once
            for prop in chosen:
                result = run_property(prop, loaded, options, prop.first_look, doctor)
                if result.status == FAILED:
                    yield result
        for prop in chosen:
            most = prop.first_look if options.quick else None
            yield run_property(prop, loaded, options, most, doctor)
        if loaded is not backend:
            loaded.close()
        return
    load_backend(backend.name)  # raises ValueError for a function that no process can import
    with ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn"), _start_worker, (backend.name, options)
    ) as pool:
        futures = [pool.submit(_run_in_worker, prop.name, options) for prop in chosen]
        try:
            for future in futures:
                result, notes = future.result()
                for feature, reason in notes.items():
                    backend.notes.setdefault(feature, reason)
                yield result
        finally:
            for future in futures:
                future.cancel()


def _skipped(chosen: tuple[Property, ...], results: list[PropertyResult]) -> tuple[str, ...]:
    done = {result.name for result in results}
    return tuple(prop.name for prop in chosen if prop.name not in done)


def verify(
    backend: str | Callable[..., Any] | Backend,
    options: VerifyOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> VerifyReport:
    """Run the suite on a back end.

    backend: a name as for `load_backend`, or a callable. options, and single fields of
    `VerifyOptions` as keywords. progress: called as progress(done, total, name) after each
    property. Raises ValueError for unknown names; faults of the back end are results, not
    exceptions.
    """
    options = replace(options or VerifyOptions(), **changes)
    chosen = find_properties(options.only)
    loaded = load_backend(backend)
    start = time.monotonic()
    results: list[PropertyResult] = []
    tell = progress or (lambda done, total, name: None)
    # Products are small: a second thread costs more than it does.
    with threadpool_limits(1):
        found = _results(chosen, loaded, options)
        for result in found:
            results.append(result)
            tell(len(results), len(chosen), result.name)
            if options.exitfirst and result.status == FAILED:
                break
        found.close()
    return VerifyReport(
        backend=loaded.name,
        max_examples=options.max_examples,
        seed=options.seed,
        results=tuple(results),
        not_covered=dict(loaded.notes),
        skipped=_skipped(chosen, results),
        seconds=time.monotonic() - start,
        words=options.words,
    )
