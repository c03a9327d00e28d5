"""What is kept of a run, and of all runs together."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

from lab.foreign import ROOT, SITE
from tests.conformance.cases import Foreign
from tests.conformance.program import Verdict

CHANGED = (
    "clc_response is aligned to 16 bytes, as CuTe-DSL 4.8 demands",
    "fmha_backward_*, but for fmha_backward_unmodified: a barrier before the deallocation",
)
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch", "numpy", "numba", "llvmlite")


def run_of(
    case: Foreign, schedule: tuple[str, int], reports: Iterable[Any], verdict: Verdict | None
) -> dict[str, Any]:
    """One run as plain data. schedule: its name and seed; verdict: None if nothing was judged."""
    reports = list(reports)
    instructions = sum(report.instructions.total() for report in reports)
    seconds = sum(report.seconds for report in reports)
    name, seed = schedule
    return {
        "family": case.family,
        "case": case.name,
        "schedule": name,
        "seed": seed,
        "kernels": sum(len(report.kernels) for report in reports),
        "findings": sorted({finding.kind for report in reports for finding in report.findings}),
        "max_error": None if verdict is None else verdict.max_error,
        "budget_share": None if verdict is None else round(verdict.share, 4),
        "seconds": round(seconds, 3),
        "thread_instructions": instructions,
        "thread_instructions_per_second": round(instructions / max(seconds, 1e-9)),
        "opcodes": sorted({opcode for report in reports for opcode in report.instructions}),
    }


def results_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of the results file.

    opcodes: those that were executed in kernels whose outputs are right.
    """
    right = [run for run in runs if run["budget_share"] is not None]
    return {
        "what": "kernels of other authors in fa4.emulator: make conformance RECORD=1",
        "changed": CHANGED,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}, two tests at a time",
        "versions": _versions(),
        "known_findings": _known(runs),
        "runs": [
            {key: value for key, value in run.items() if key != "opcodes"}
            for run in sorted(runs, key=lambda run: (run["family"], run["case"]))
        ],
        "opcodes": sorted({opcode for run in right for opcode in run["opcodes"]}),
    }


def _known(runs: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    from tests.conformance.cases import CASES

    ran = {run["case"] for run in runs}
    return {case.name: dict(case.known) for case in CASES if case.known and case.name in ran}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    for found in importlib.metadata.distributions(path=[str(SITE)]):
        versions[found.name] = found.version
    return versions
