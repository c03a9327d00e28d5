"""pytest plugin: `pytest --fa4-emulate` runs a GPU test suite without a GPU, in the emulator.

    pytest --fa4-emulate --fa4-arch=sm_90a tests/

torch says that it has a GPU of that architecture, every CPU tensor counts as one there, and every
kernel that Triton, Gluon or CuTe-DSL launches is executed and checked: a test whose kernel has a
race or hangs fails with the finding. The fixture `fa4_emulation` is the session, whose `reports`
hold what each launch did. Without the option the plugin does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

_STACK = pytest.StashKey[ExitStack]()
_SESSION = pytest.StashKey[Any]()
_ARCHS = ("sm_100a", "sm_103a", "sm_90a")


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


def pytest_configure(config: pytest.Config) -> None:
    """Emulates from here on, so that tests that ask for a GPU are collected."""
    if not config.getoption("--fa4-emulate"):
        return
    from fa4.emulator.errors import LaunchError
    from fa4.emulator.host.session import emulate

    try:
        accepted = _accepted(config)
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from None
    stack = config.stash[_STACK] = ExitStack()
    config.stash[_SESSION] = stack.enter_context(
        emulate(
            arch=config.getoption("--fa4-arch"),
            cuda=True,
            schedule=config.getoption("--fa4-schedule"),
            seed=config.getoption("--fa4-schedule-seed"),
            fail_on=config.getoption("--fa4-fail-on"),
            accepted=accepted,
            collect=config.getoption("--fa4-write-baseline"),
            max_steps=config.getoption("--fa4-max-steps"),
            steer=config.getoption("--fa4-steer"),
        )
    )


def _accepted(config: pytest.Config) -> Any:
    """What the options accept. Raises LaunchError for what is no rule or baseline."""
    from fa4.emulator.accepted import Accepted

    rules, files = config.getoption("--fa4-ignore"), config.getoption("--fa4-suppressions")
    baseline = config.getoption("--fa4-baseline")
    if config.getoption("--fa4-write-baseline"):
        if baseline is None:
            raise pytest.UsageError("--fa4-write-baseline needs --fa4-baseline FILE to write")
        baseline = None
    return Accepted.of(rules, [files] if files else [], baseline)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Undoes it."""
    if _STACK in config.stash:
        config.stash[_STACK].close()


@pytest.fixture
def fa4_emulation(pytestconfig: pytest.Config) -> Any:
    """The `fa4.emulator.Session`; skips without --fa4-emulate."""
    if _SESSION not in pytestconfig.stash:
        pytest.skip("needs --fa4-emulate")
    return pytestconfig.stash[_SESSION]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Findings that do not fail a test stand in its report."""
    session = item.config.stash.get(_SESSION, None)
    first = len(session.reports) if session is not None else 0
    yield
    if session is None:
        return
    texts = [str(finding) for report in session.reports[first:] for finding in report.findings]
    if texts:
        item.add_report_section("call", "fa4 emulator", "\n".join(texts))


def _write_files(config: pytest.Config, session: Any) -> list[Path]:
    """The files that were asked for; which."""
    from fa4.emulator.tools.finding_files import FindingTexts

    written = FindingTexts(
        findings=session.findings(),
        accepted=session.accepted(),
        coverage=session.coverage(),
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
    session = config.stash.get(_SESSION, None)
    if session is None:
        return
    for path in _write_files(config, session):
        terminalreporter.write_line(f"fa4 emulator: wrote {path}")
    kernels = {name for report in session.reports for name in report.kernels}
    severities = Counter(f.severity for report in session.reports for f in report.findings)
    found = ", ".join(f"{count} {name}" for name, count in sorted(severities.items())) or "none"
    if accepted := session.accepted():
        found += f"; {len(accepted)} accepted"
    terminalreporter.write_sep("-", "fa4 emulator")
    terminalreporter.write_line(
        f"{len(session.reports)} launches of {len(kernels)} kernels on an emulated "
        f"{config.getoption('--fa4-arch')}; findings: {found}"
    )
    for one in session.coverage():
        waits = sum(missed.synchronises for missed in one.missed)
        terminalreporter.write_line(
            f"{one.kernel}: {one.reached} of {one.instructions} instructions ran"
            + (f"; {waits} of the others synchronise" if waits else "")
        )
