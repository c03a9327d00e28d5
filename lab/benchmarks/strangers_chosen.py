"""pytest plugin of `lab.benchmarks.strangers`: a few tests of each file, and what became of each.

    pytest -p lab.benchmarks.strangers_chosen --chosen 3 --outcomes FILE.json

The smallest by the numbers in their names, of as many functions as possible: nobody picks them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fa4.emulator.pytest_plugin import EMULATION
from lab import ROOT


class Outcomes:
    """Counts what was collected, and keeps the last word on each test."""

    def __init__(self, count: int, file: Path) -> None:
        self.count, self.file = count, file
        self.collected: Counter[str] = Counter()
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Counts launches; before a test that ends the process, its name is written."""
        known = self.tests[item.nodeid] = {"outcome": "", "seconds": 0.0, "why": "", "launches": 0}
        self.write()
        session = item.config.stash[EMULATION].session
        before = len(session.reports) if session is not None else 0
        yield
        if session is not None:
            known["launches"] = len(session.reports) - before
        self.write()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Keeps `count` tests of each file; the first of each run first."""
        by_file: dict[str, list[Any]] = {}
        for item in items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        kept: list[tuple[int, Any]] = []
        for name, tests in by_file.items():
            self.collected[name] = len(tests)
            kept += enumerate(_smallest(tests)[: self.count])
        left = [item for _, item in sorted(kept, key=lambda one: one[0])]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is a test that fails."""
        if report.failed:
            self.tests[report.nodeid] = {
                "outcome": "failed", "seconds": 0.0, "why": _why(report), "launches": 0
            }  # fmt: skip
            self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in any phase is one; a test that is skipped says why."""
        known = self.tests[report.nodeid]
        known["seconds"] = round(known["seconds"] + report.duration, 1)
        if report.failed or (report.skipped and not known["outcome"]):
            known["outcome"] = "failed" if report.failed else "skipped"
            known["why"] = known["why"] or _why(report)
        elif report.when == "call" and report.passed:
            known["outcome"] = known["outcome"] or "passed"
        self.write()

    def write(self) -> None:
        """After each test: a run that is ended keeps what it has."""
        text = json.dumps({"collected": self.collected, "tests": self.tests}, indent=1)
        self.file.write_text(text, encoding="utf-8")


def _smallest(tests: list[Any]) -> list[Any]:
    """Of each function the test with the smallest product of numbers in its name first, then of
    each the next one; functions in an order that their names decide."""
    rank: Counter[str] = Counter()
    ordered = []
    for item in sorted(tests, key=lambda item: (_size(item.nodeid), item.nodeid)):
        function = item.nodeid.partition("[")[0]
        ordered.append((rank[function], sha256(function.encode()).hexdigest(), item))
        rank[function] += 1
    return [item for *_, item in sorted(ordered, key=lambda one: one[:2])]


def _size(name: str) -> float:
    """The product of the whole numbers in a test's parameters."""
    numbers = re.findall(r"(?<![\d.e-])\d+(?![\d.e])", re.sub(r"dtype\d+|torch\.\w+", "", name))
    return math.prod(max(int(number), 1) for number in numbers)


def _why(report: Any) -> str:
    """The lines of an error that say what happened."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return text.replace(f"{ROOT}/", "")[:1500]  # paths of this machine say nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many, and where to."""
    parser.addoption("--chosen", type=int, default=3)
    parser.addoption("--outcomes", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Begins to listen."""
    if (file := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(config.getoption("--chosen"), file))
