"""Makes single changes in a copy of the project and counts those that the tests notice.

For each of a seeded sample of changes (`lab.benchmarks.mutants.sample`) it runs the tests that ran
the changed line in one recorded run (`record`), then those in the test file of the module's name,
those of the package's recorded tables, those of the conventions of all packages, then those that
ran anything of its file, then those of its package, up to LIMIT_SECONDS of them: constants, what
tests make when they are loaded, and code that numba compiles are run by no test in particular. It
stops at the first test that fails. A change is noticed if a test fails, the module cannot be
imported any more, or the tests take far longer than before. `survivors.WHY` explains those that
were not noticed: each changes nothing that the package promises. Exit code 1 if fewer than
LEAST_SHARE were noticed or a survivor has no explanation. With --journal a run that was stopped
goes on where it was, and one after new tests, or after edits of other lines, judges the survivors
and what is new in the sample: what was noticed once stays noticed, since tests are only added.
--jobs processes judge at a time, each in a copy of its own.
Usage: python -m lab.benchmarks.mutants.run [--count N] [--seed N] [--minutes N] [--jobs N]
           [--package NAME ...] [--skip FILE ...] [--journal FILE] [--record FILE] [--output FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.benchmarks.mutants.sample import Mutant, describe, draw

RECORDER = Path(__file__).with_name("record.py")
COPIED = ("fa4", "tests", "docs", "lab", "examples", "pyproject.toml",
          "README.md", "CHANGELOG.md", "Makefile", "fa4_lab.py")  # fmt: skip
COMMON_TESTS = ("tests/test_api.py", "tests/test_config.py", "tests/test_dataclasses.py",
                "tests/docs/test_simulator_page.py")  # fmt: skip
# Not changed: figures for people to look at, and what only measures.
LEFT_OUT = ("fa4/sim/figure.py",)
LIMIT_SECONDS = 60  # of tests for one change, CPU time of the recorded run
# Of a package, the tests that hold its tables to what was recorded of them: no line says so.
RECORDED_TABLES = {"testing": "tests/testing/test_suite_record.py::"}
SLOWER, GRACE_SECONDS = 5, 30  # how much longer they may take before that counts as noticed
MOST_ASLEEP = 4  # times that, by the clock: for what waits for ever, on a busy machine
LEAST_SHARE = 0.92
MOST_LOST = 0.02  # of the tests, that fail without a change on the machine that judges
# What tests import, and nothing of fa4: processes are forked with these, which saves seconds each.
PRELOADED = ("numpy", "numba", "ml_dtypes", "pytest", "hypothesis.strategies", "rich.console",
             "simpy", "typer.testing")  # fmt: skip
SURVIVED, STARTED_NOTHING = "survived", "no test runs it"


@dataclass(frozen=True)
class Verdict:
    """how: "survived", "a test fails", "import fails", "takes too long", "crashes" or "no test".
    by: the first test that failed. tests: how many were to run."""

    mutant: Mutant
    before: str
    after: str
    how: str
    by: str
    tests: int


class Record:
    """What `record` wrote: which tests ran which line, and how long they took."""

    def __init__(self, path: Path) -> None:
        loaded = json.loads(path.read_text())
        self.names = list(loaded["seconds"])
        self.seconds: dict[str, float] = loaded["seconds"]
        self.failed: list[str] = loaded["failed"]
        self.lines: dict[str, dict[str, list[int]]] = loaded["lines"]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that ran the changed line, those in the test file of its name (which may run it in
        processes of their own), those of recorded tables, those of conventions, those of its
        file, then the package's; in each group the fastest first, LIMIT_SECONDS of them in all."""
        lines = self.lines.get(mutant.path, {})
        package = mutant.path.split("/")[1]
        namesake = f"tests/{package}/test_{Path(mutant.path).name}::"
        tables = RECORDED_TABLES.get(package, "")
        groups = (
            [self.names[number] for number in lines.get(str(mutant.line), ())],
            [name for name in self.names if name.startswith(namesake)],
            [name for name in self.names if tables and name.startswith(tables)],
            [name for name in self.names if name.startswith(COMMON_TESTS)],
            [self.names[number] for some in lines.values() for number in some],
            [name for name in self.names if name.startswith((f"tests/{package}/", "tests/test_"))],
        )
        found: dict[str, None] = {}
        total = 0.0
        for group in groups:
            known = self.seconds.keys() & set(group)
            for name in sorted(known, key=lambda name: (self.seconds[name], name)):
                if name not in found and total + self.seconds[name] <= LIMIT_SECONDS:
                    total += self.seconds[name]
                    found[name] = None
        return list(found)

    def leave_out(self, names: Iterable[str]) -> None:
        """These notice nothing: they do not pass without a change where changes are judged."""
        self.failed = sorted({*self.failed, *names})
        self.seconds = {name: s for name, s in self.seconds.items() if name not in self.failed}

    def files(self) -> list[tuple[str, float]]:
        """The files of its tests and their seconds, the longest first."""
        seconds: dict[str, float] = defaultdict(float)
        for name, s in self.seconds.items():
            seconds[name.partition("::")[0]] += s
        return sorted(seconds.items(), key=lambda file: -file[1])


def make_copy(folder: Path) -> Path:
    """A copy of the project, that changes leave no trace in the project itself."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """For processes that must import from the copy, and write no bytecode: a change may leave the
    size and the second of a file as they were."""
    paths = [str(copy), *(path for path in sys.path if path and path != str(ROOT))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip


def record_tests(copy: Path, packages: Sequence[str]) -> Record:
    """Run the tests of the packages once."""
    folders = dict.fromkeys(f"tests/{name}" for name in packages)
    if {"plan", "sim"} & set(packages):  # plans are tested by simulating them
        folders |= dict.fromkeys(("tests/plan", "tests/sim"))
    command = [sys.executable, RECORDER, copy / "record.json", *folders, *COMMON_TESTS]
    subprocess.run([str(word) for word in command], cwd=copy, env=environment(copy), check=True)
    return Record(copy / "record.json")


class _Watcher:
    """A pytest plugin that keeps the name of the first failure and of all that passed, and wants no
    smaller example."""

    by = ""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or report.nodeid
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or f"collecting {report.nodeid}"


def _run_tests(copy: Path, tests: Sequence[str], answer: Any, to_the_end: bool = False) -> None:
    """In a process of its own: run the tests up to the first failure, or all of them; send (exit
    code, first failure, those that passed)."""
    import pytest
    from threadpoolctl import threadpool_limits

    os.chdir(copy)
    threadpool_limits(1)  # NumPy was loaded before, with a thread for every core
    os.environ.update(environment(copy))
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    watcher = _Watcher()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", *([] if to_the_end else ["-x"])]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
    code = int(pytest.main([*options, *tests], plugins=[watcher]))
    if code == pytest.ExitCode.USAGE_ERROR:  # names of tests that are made of what was changed
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        code = int(pytest.main([*options, *files], plugins=[watcher]))
    answer.send((code, watcher.by, [name for name, passed in watcher.passed.items() if passed]))


def judge(copy: Path, mutant: Mutant, record: Record) -> Verdict:
    """Make a change, run its tests, and undo it."""
    file, tests = copy / mutant.path, record.tests_of(mutant)
    source, written = file.read_text(encoding="utf-8"), file.stat()
    before, after, started = *describe(mutant, source), time.time()
    if not tests:
        return Verdict(mutant, before, after, STARTED_NOTHING, "", 0)
    limit = SLOWER * sum(record.seconds[name] for name in tests) + GRACE_SECONDS
    try:
        file.write_text(mutant.text(source), encoding="utf-8")
        how, by = try_tests(copy, tests, limit)
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
        for compiled in (copy / "fa4").rglob("*.nb[ic]"):  # with the change in it
            if compiled.stat().st_mtime >= started:
                compiled.unlink()
    return Verdict(mutant, before, after, how, by, len(tests))


def try_tests(copy: Path, tests: Sequence[str], limit_seconds: float) -> tuple[str, str]:
    """(how, by) of a `Verdict`, from a process that may use so many seconds of CPU time."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def start() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_seconds), int(limit_seconds) + 5))
        _run_tests(copy, tests, sender)

    process = fork.Process(target=start)
    process.start()
    sender.close()
    answer = None
    if receiver.poll(MOST_ASLEEP * limit_seconds):
        with suppress(EOFError):  # the process ended without a word
            answer = receiver.recv()  # before it is waited for: it waits for this with a long one
    else:
        process.kill()
    process.join()
    if answer is None:
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        return "takes too long" if late else f"crashes with exit code {process.exitcode}", ""
    code, by, _ = answer
    if code == 0:
        return SURVIVED, ""
    return ("import fails" if by.startswith("collecting") or not by else "a test fails"), by


def find_passing(copy: Path, file: str, seconds: float) -> list[str]:
    """The tests of a file that pass without any change, in the way in which they will be run;
    seconds: what they took before. None if they take far longer."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run_tests, args=(copy, [file], sender, True))
    process.start()
    sender.close()
    found: list[str] = []
    with suppress(EOFError):  # the process ended without a word
        if receiver.poll(20 * (SLOWER * seconds + GRACE_SECONDS)):
            found = receiver.recv()[2]
    process.kill()
    process.join()
    return found


def prepare(
    folder: Path, packages: Sequence[str], kept: Path | None, jobs: int = 1
) -> tuple[Path, Record]:
    """The copy and the record of its tests, which `kept` may hold from before, or from elsewhere.

    Tests that do not pass without any change here are left out. Raises SystemExit for too many.
    """
    copy = make_copy(folder)
    if kept is not None and kept.exists():
        record = Record(kept)
    else:
        record = record_tests(copy, packages)
        if kept is not None:
            shutil.copy(copy / "record.json", kept)
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    passing: set[str] = set()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for names in pool.map(partial(find_passing, copy), *zip(*record.files(), strict=True)):
            passing |= set(names)
    lost = record.seconds.keys() - passing
    print(f"{len(lost)} of {len(record.seconds)} tests fail without any change", *sorted(lost)[:9])
    if len(lost) > MOST_LOST * len(record.seconds):
        raise SystemExit("without any change too many tests fail")
    record.leave_out(lost)
    return copy, record


class Journal:
    """Verdicts in a file, one a line; without a file, nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.noticed: dict[tuple[str, str, str, int], Verdict] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                verdict = Verdict(**fields | {"mutant": Mutant(**fields["mutant"])})
                if verdict.how not in (SURVIVED, STARTED_NOTHING):
                    self.noticed[verdict.mutant.identity] = verdict

    def add(self, verdict: Verdict) -> None:
        """Append one."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")


class _Bench:
    """What one process judges with: a copy of its own, the record, and the time that it has."""

    copy: Path
    record: Record
    deadline: float

    @classmethod
    def prepare(cls, folder: Path, template: Path, record: Record, deadline: float) -> None:
        """Called once in each process."""
        cls.copy = folder / f"copy-{os.getpid()}"
        shutil.copytree(template, cls.copy)  # with what numba has compiled for it
        cls.record, cls.deadline = record, deadline

    @classmethod
    def judge(cls, mutant: Mutant) -> Verdict | None:
        """None when the time is over."""
        if time.monotonic() > cls.deadline:
            return None
        return judge(cls.copy, mutant, cls.record)


def judge_all(
    mutants: Sequence[Mutant],
    copy: Path,
    record: Record,
    deadline: float,
    journal: Journal,
    jobs: int = 1,
) -> list[Verdict]:
    """The verdicts in the order of the changes, by `jobs` processes; those that the journal knows,
    and until time.monotonic() is `deadline` the others. Only this process writes the journal."""
    found = {n: journal.noticed[m.identity] for n, m in enumerate(mutants)
             if m.identity in journal.noticed}  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="fa4-mutants-") as folder,
        ProcessPoolExecutor(
            jobs,
            multiprocessing.get_context("fork"),
            _Bench.prepare,
            (Path(folder), copy, record, deadline),
        ) as pool,
    ):
        started = {
            pool.submit(_Bench.judge, mutant): number
            for number, mutant in enumerate(mutants)
            if number not in found
        }
        for future in as_completed(started):
            verdict = future.result()
            if verdict is not None:
                found[started[future]] = verdict
                journal.add(verdict)
                _tell(verdict, f"{len(found)}/{len(mutants)}")
    if len(found) < len(mutants):
        print(f"out of time after {len(found)} of {len(mutants)} changes", flush=True)
    return [found[number] for number in sorted(found)]


def _tell(verdict: Verdict, count: str) -> None:
    mutant = verdict.mutant
    print(f"{count} {mutant.path}:{mutant.line}: {verdict.how} {verdict.by}")
    if verdict.how in (SURVIVED, STARTED_NOTHING):
        print(f"    - {verdict.before}\n    + {verdict.after}")
    sys.stdout.flush()


def summarize(verdicts: Sequence[Verdict], why: Mapping[tuple[str, str, str], str]) -> dict:
    """The result: how many were noticed, by what, and the survivors with their explanations."""
    missed = [v for v in verdicts if v.how in (SURVIVED, STARTED_NOTHING)]

    def package(verdict: Verdict) -> str:
        return str(Path(verdict.mutant.path).parent).removeprefix("fa4/").partition("/")[0]

    return {
        "changes": len(verdicts),
        "noticed": len(verdicts) - len(missed),
        "share": round(1 - len(missed) / max(1, len(verdicts)), 4),
        "how": dict(Counter(v.how for v in verdicts)),
        "packages": {
            name: {"changes": len(some), "noticed": sum(v not in missed for v in some)}
            for name in sorted({package(v) for v in verdicts})
            for some in [[v for v in verdicts if package(v) == name]]
        },
        "noticed_by": {
            f"{v.mutant.path}:{v.mutant.line}:{v.mutant.column} {v.mutant.operator}": v.by or v.how
            for v in verdicts
            if v not in missed
        },
        "survivors": [
            {
                **{key: asdict(v.mutant)[key] for key in ("path", "line", "operator", "number")},
                "before": v.before,
                "after": v.after,
                "tests": v.tests,
                "why": why.get((v.mutant.path, v.before, v.after), ""),
            }
            for v in missed
        ],
    }


def parse() -> argparse.Namespace:
    """The options; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge at a time")
    parser.add_argument("--package", action="append", help="default: reference, plan, sim, testing")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--skip", action="append", default=[], help="a file of fa4 to leave out")
    parser.add_argument(
        "--journal", type=Path, help="keep verdicts in this file, and go on from it"
    )
    parser.add_argument("--record", type=Path, help="keep the record of the tests in this file")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Sample, judge, report."""
    given = parse()
    start = time.monotonic()
    packages = given.package or ["reference", "plan", "sim", "testing"]
    left_out = {ROOT / path for path in (*LEFT_OUT, *given.skip)}
    files = {path for name in packages for path in (ROOT / "fa4" / name).rglob("*.py")} - left_out
    mutants = draw(files, ROOT, given.count, given.seed)
    with tempfile.TemporaryDirectory(prefix="fa4-mutants-") as folder:
        copy, record = prepare(Path(folder), packages, given.record, given.jobs)
        deadline = start + 60 * given.minutes
        verdicts = judge_all(mutants, copy, record, deadline, Journal(given.journal), given.jobs)

    from lab.benchmarks.mutants.survivors import WHY
    from lab.records import record_path, write_record

    result = summarize(verdicts, WHY)
    report = {
        "packages_changed": packages,
        "left_out": sorted(str(path.relative_to(ROOT)) for path in left_out),
        "seed": given.seed,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "tests_left_out": record.failed,
        **result,
    }
    packages = ("numpy", "numba", "pytest", "hypothesis", "coverage", "cosmic-ray")
    write_record(given.output or record_path("mutants"), report, packages)
    print(f"{result['noticed']} of {result['changes']} changes noticed ({result['share']:.1%})")
    unexplained = [row for row in result["survivors"] if not row["why"]]
    for row in unexplained:
        print(f"not explained: {row['path']}:{row['line']}: {row['before']} -> {row['after']}")
    sys.exit(1 if unexplained or result["share"] < LEAST_SHARE else 0)


if __name__ == "__main__":
    main()
