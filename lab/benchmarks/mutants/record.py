"""Runs tests once and writes which of them passed, for how long, and which lines each ran.

To be started in the root of the copy that is to be changed:
    python record.py RESULT.json TESTS...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest


class Recorder:
    """A pytest plugin: one coverage context per test, and the CPU seconds of those that pass."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        """Time a test, under its own name."""
        self.measured.switch_context(item.nodeid)
        start = _cpu_seconds()
        result = yield
        self.seconds[item.nodeid] = _cpu_seconds() - start
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tests that fail or are skipped cannot notice anything."""
        if not report.passed:
            self.failed.add(report.nodeid)


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Run the tests and write the record; exits with 1 if most fail."""
    result, *tests = sys.argv[1:]
    measured = coverage.Coverage(data_file=f"{result}.coverage", source=["fa4"], config_file=False)
    recorder = Recorder(measured)
    measured.start()
    pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests], plugins=[recorder])
    measured.stop()
    measured.save()
    passed = {name: s for name, s in recorder.seconds.items() if name not in recorder.failed}
    numbers = {name: number for number, name in enumerate(passed)}
    lines: dict[str, dict[int, list[int]]] = {}
    recorded = measured.get_data()
    for file in recorded.measured_files():
        contexts = recorded.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(Path.cwd()))] = {
            line: [numbers[name] for name in names if name in numbers]
            for line, names in contexts.items()
        }
    report = {"seconds": passed, "failed": sorted(recorder.failed), "lines": lines}
    Path(result).write_text(json.dumps(report))
    sys.exit(len(passed) < len(recorder.failed))


if __name__ == "__main__":
    main()
