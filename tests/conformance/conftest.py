"""`--record`: writes what the tests measured to lab/benchmarks/results/emulator_foreign.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.records import ROOT, record_path, write_record
from tests.conformance.record import PACKAGES, results_of

FILE = record_path("emulator_foreign")
RUN = "foreign run"


@pytest.fixture(autouse=True, scope="session")
def triton_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Triton compiled elsewhere names other files; it asks for its next version's default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --record."""
    parser.addoption("--record", action="store_true", help=f"write {FILE.relative_to(ROOT)}")


class Collector:
    """Gathers the runs of passed tests, from this process or from xdist's workers."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: list[dict[str, Any]] = []
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what a test recorded."""
        self.failed |= report.failed
        if report.when == "call" and report.passed:
            self.runs += [value for name, value in report.user_properties if name == RUN]

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        """Writes the file, unless a test failed."""
        yield
        if self.failed or not self.runs:
            terminalreporter.write_line("nothing recorded: tests failed, or none ran")
            return
        write_record(self.file, results_of(self.runs), PACKAGES, render=text_of)


def text_of(report: dict[str, Any]) -> str:
    """A line per run."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    return re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), text) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the collector where the option is given, in the process that hears of all tests."""
    if config.getoption("--record", default=False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(FILE))
