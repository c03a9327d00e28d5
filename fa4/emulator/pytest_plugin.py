"""pytest plugin: GPU tests without a GPU, in the emulator: a suite of them, or single ones.

    pytest --fa4-emulate --fa4-arch=sm_90a tests/

    @pytest.mark.fa4_emulate(arch="sm_90a", schedule="random")
    def test_kernel(): ...

torch says that it has a GPU of that architecture, every CPU tensor counts as one there, and every
kernel that Triton, Gluon or CuTe-DSL launches is executed and checked: a test whose kernel has a
race or hangs fails with the finding. The fixture `fa4_emulation` is the session, whose `reports`
hold what each launch did. Without the option and the marker the plugin does nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

EMULATION = pytest.StashKey["Emulation"]()
_ARCHS = ("sm_100a", "sm_103a", "sm_90a")
_MARKER = "fa4_emulate"
# What the marker takes, with the type of each; a limit may also be None.
_ARGUMENTS: dict[str, type] = {
    "arch": str, "schedule": str, "fail_on": str, "seed": int, "steer": int, "max_steps": int,
    "max_findings": int, "checks": bool, "ordered_sums": bool, "strict_tmem_loads": bool,
    "strict_tmem_lanes": bool,
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("fa4 emulator", "GPU kernels on the CPU, checked (fa4)")
    group.addoption(
        "--fa4-emulate", action="store_true", help="run kernels in the emulator, without a GPU"
    )
    group.addoption("--fa4-arch", default="sm_100a", choices=_ARCHS, help="default: sm_100a")
    group.addoption(
        "--fa4-schedule",
        default="fifo",
        choices=("fifo", "random", "adversarial"),
        help="order of events; default: fifo",
    )
    group.addoption("--fa4-schedule-seed", type=int, default=0, help="of that order; default: 0")
    group.addoption(
        "--fa4-fail-on",
        default="hazard",
        choices=("style", "formal", "hazard", "error"),
        help="least severity of a finding that fails a test; default: hazard",
    )
    group.addoption(
        "--fa4-max-steps",
        type=int,
        default=None,
        help="end a kernel that is not at its end after so many steps of warps",
    )
    group.addoption(
        "--fa4-steer",
        type=int,
        default=0,
        metavar="RUNS",
        help="look for an order that shows hazards, in so many runs of a launch",
    )
    _add_files(group)


def _add_files(group: pytest.OptionGroup) -> None:
    """What is accepted of findings, and where they are written."""
    group.addoption(
        "--fa4-ignore",
        action="append",
        default=[],
        metavar="KIND[:FILE[:LINE]]",
        help="accept such findings; may be repeated",
    )
    for name, what in (
        ("--fa4-suppressions", "accept findings by the rules of a file"),
        ("--fa4-baseline", "accept the findings that a file lists"),
        ("--fa4-sarif", "write findings as SARIF 2.1.0"),
        ("--fa4-coverage", "write what of each source line ran, as .html or text"),
    ):
        group.addoption(name, type=Path, default=None, metavar="FILE", help=what)
    group.addoption(
        "--fa4-write-baseline",
        action="store_true",
        help="write the findings to the file of --fa4-baseline; none fails a test",
    )


class Emulation:
    """What of a run of pytest is emulated: all of it, or the tests with the marker.

    sessions: those so far, the current one last. session: the current one, or None.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.sessions: list[Any] = []
        self.session: Any = None
        self._stack = ExitStack()
        self._options = options
        self._accepted: Any = None

    @property
    def whole(self) -> bool:
        """Whether every test is emulated."""
        return bool(self._options.fa4_emulate)

    def begin(self, chosen: Mapping[str, Any] | None = None) -> None:
        """Emulates from here on. chosen: of a marker, instead of the options of the same names.

        Raises LaunchError.
        """
        from fa4.emulator.host.session import emulate

        given = self._options
        options: dict[str, Any] = {
            "arch": given.fa4_arch,
            "schedule": given.fa4_schedule,
            "seed": given.fa4_schedule_seed,
            "fail_on": given.fa4_fail_on,
            "max_steps": given.fa4_max_steps,
            "steer": given.fa4_steer,
            **(chosen or {}),
        }
        if self._accepted is None:
            self._accepted = _accepted(given)
        self.session = self._stack.enter_context(
            emulate(cuda=True, accepted=self._accepted, collect=given.fa4_write_baseline, **options)
        )
        self.sessions.append(self.session)

    def end(self) -> None:
        """Undoes it."""
        self.session = None
        self._stack.close()


def _accepted(options: argparse.Namespace) -> Any:
    """What the options accept. Raises LaunchError for what is no rule or baseline."""
    from fa4.emulator.accepted import Accepted

    files, baseline = options.fa4_suppressions, options.fa4_baseline
    if options.fa4_write_baseline:
        if baseline is None:
            raise pytest.UsageError("--fa4-write-baseline needs --fa4-baseline FILE to write")
        baseline = None
    return Accepted.of(options.fa4_ignore, [files] if files else [], baseline)


def _begin(config: pytest.Config, options: argparse.Namespace) -> None:
    """Emulates the whole run, if that is asked for."""
    emulation = config.stash[EMULATION] = Emulation(options)
    config.add_cleanup(emulation.end)
    if emulation.whole:
        from fa4.emulator.errors import LaunchError

        try:
            emulation.begin()
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py, so that one that asks for a GPU finds it."""
    _begin(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """The marker; and the emulation where the plugin is loaded late."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(arch='sm_100a', schedule='fifo', seed=0, ...): run this test's kernels in "
        "fa4's emulator, as --fa4-emulate does for all",
    )
    if EMULATION not in config.stash:
        _begin(config, config.option)


def _marked(item: pytest.Item) -> dict[str, Any] | None:
    """The arguments of the item's markers, the nearest first; None without one.

    Raises ValueError for those that the marker does not take, in one line.
    """
    marks = list(item.iter_markers(_MARKER))
    if not marks:
        return None
    chosen: dict[str, Any] = {}
    for mark in marks:
        if mark.args:
            raise ValueError(f"{_MARKER}({mark.args[0]!r}): takes keyword arguments only")
        for name, value in mark.kwargs.items():
            wanted = _ARGUMENTS.get(name)
            if wanted is None:
                allowed = ", ".join(_ARGUMENTS)
                raise ValueError(f"{_MARKER}({name}=...): unknown argument; there are {allowed}")
            text = f"{_MARKER}({name}={value!r})"
            if name == "arch" and value not in _ARCHS:
                raise ValueError(f"{text}: allowed are {', '.join(_ARCHS)}")
            if type(value) is not wanted and not (name == "max_steps" and value is None):
                raise ValueError(f"{text}: expected {wanted.__name__}")
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{text}: 0 or more is needed")
            chosen.setdefault(name, value)
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begins what the marker asks for, before the test's fixtures are made."""
    from fa4.emulator.errors import LaunchError

    emulation = item.config.stash[EMULATION]
    try:
        chosen = _marked(item)
        if chosen is None or (emulation.whole and not chosen):
            return
        emulation.end()
        emulation.begin(chosen)
    except (ValueError, LaunchError) as error:
        reason = str(error)
        if isinstance(error, LaunchError):
            reason = f"{_MARKER}: {reason}"
    else:
        return
    pytest.fail(reason, pytrace=False)  # outside, so that the line stands alone


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """After a marked test, whatever became of it, all is as it was before."""
    emulation = item.config.stash[EMULATION]
    before = emulation.session
    try:
        yield
    finally:
        if emulation.session is not before:
            emulation.end()
            if emulation.whole:
                emulation.begin()


@pytest.fixture
def fa4_emulation(pytestconfig: pytest.Config) -> Any:
    """The `fa4.emulator.Session`; skips without --fa4-emulate and the marker."""
    session = pytestconfig.stash[EMULATION].session
    if session is None:
        pytest.skip(f"needs --fa4-emulate, or the marker {_MARKER}")
    return session


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Findings that do not fail a test stand in its report."""
    session = item.config.stash[EMULATION].session
    first = len(session.reports) if session is not None else 0
    yield
    if session is None:
        return
    texts = [str(finding) for report in session.reports[first:] for finding in report.findings]
    if texts:
        item.add_report_section("call", "fa4 emulator", "\n".join(texts))


def _write_files(config: pytest.Config, sessions: list[Any]) -> list[Path]:
    """The files that were asked for; which."""
    from fa4.emulator.machine.coverage import merge_coverages
    from fa4.emulator.tools.finding_files import FindingTexts

    written = FindingTexts(
        findings=[finding for session in sessions for finding in session.findings()],
        accepted=[pair for session in sessions for pair in session.accepted()],
        coverage=merge_coverages(one for session in sessions for one in session.coverage()),
        root=config.rootpath,
    )
    option = config.getoption
    baseline = option("--fa4-baseline") if option("--fa4-write-baseline") else None
    texts = written.of(baseline, option("--fa4-sarif"), option("--fa4-coverage"))
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was launched, and what was found by severity."""
    sessions = config.stash[EMULATION].sessions
    if not sessions:
        return
    from fa4.emulator.machine.coverage import merge_coverages

    for path in _write_files(config, sessions):
        terminalreporter.write_line(f"fa4 emulator: wrote {path}")
    reports = [report for session in sessions for report in session.reports]
    kernels = {name for report in reports for name in report.kernels}
    severities = Counter(finding.severity for report in reports for finding in report.findings)
    found = ", ".join(f"{count} {name}" for name, count in sorted(severities.items())) or "none"
    if accepted := sum(len(session.accepted()) for session in sessions):
        found += f"; {accepted} accepted"
    archs = ", ".join(sorted({session.arch for session in sessions}))
    terminalreporter.write_sep("-", "fa4 emulator")
    terminalreporter.write_line(
        f"{len(reports)} launches of {len(kernels)} kernels on an emulated {archs}; "
        f"findings: {found}"
    )
    for one in merge_coverages(one for session in sessions for one in session.coverage()):
        waits = sum(missed.synchronises for missed in one.missed)
        terminalreporter.write_line(
            f"{one.kernel}: {one.reached} of {one.instructions} instructions ran"
            + (f"; {waits} of the others synchronise" if waits else "")
        )
