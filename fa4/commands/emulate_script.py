"""`fa4 emulate SCRIPT.py`: a program that launches kernels, without a GPU."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4.commands import emulate_witness
from fa4.commands.emulate_findings import FindingFiles
from fa4.commands.emulate_report import render_accepted, render_coverage, render_findings

if TYPE_CHECKING:
    from fa4.emulator.host.session import Session


def run_script(
    script: Path,
    arguments: Sequence[str],
    arch: str,
    options: Mapping[str, Any],
    files: FindingFiles,
    witness: Path | None = None,
) -> dict[str, Any]:
    """Runs a script as `python SCRIPT ARGUMENTS` does, its kernels in the emulator.

    Returns what was launched and found, as plain data. Raises what the script raises, but for
    findings, which end it, and sys.exit. witness: where to write an order that steering found.
    """
    from fa4.emulator.tools.describe import describe_accepted, describe_coverage, describe_findings
    from fa4.emulator.tools.finding_files import FindingTexts

    session, failed, exit_code = execute(script, arguments, arch, options)
    launches = Counter(name for report in session.reports for name in report.kernels)
    findings, accepted, coverage = session.findings(), session.accepted(), session.coverage()
    made = files.write(FindingTexts(findings=findings, accepted=accepted, coverage=coverage))
    kept = emulate_witness.write_shown(witness, session.reports) if witness else None
    return {
        "script": str(script),
        "arch": arch,
        "launches": dict(launches),
        "thread_instructions": sum(r.instructions.total() for r in session.reports),
        "findings": describe_findings(findings, ""),
        "accepted": describe_accepted(accepted),
        "unused_rules": options["accepted"].unused() if options["accepted"] else [],
        "coverage": [describe_coverage(one) for one in coverage],
        "reports": list(map(str, made)),
        "steering": emulate_witness.describe_steering(session.reports)
        if options["steer"]
        else None,
        "witness": kept and witness and emulate_witness.describe(kept, witness),
        "failed": failed,
        "exit_code": exit_code,
    }


def execute(
    script: Path, arguments: Sequence[str], arch: str, options: Mapping[str, Any]
) -> tuple[Session, bool, int]:
    """The session of a script's run, whether findings ended it, and its exit code."""
    from fa4.emulator.errors import EmulationFailed
    from fa4.emulator.host.session import emulate

    failed, exit_code = False, 0
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with emulate(arch=arch, cuda=True, **options) as session:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except EmulationFailed:
                failed = True
            except SystemExit as end:
                exit_code = _code_of(end)
    finally:
        sys.argv, sys.path[:] = before
    return session, failed, exit_code


def _code_of(end: SystemExit) -> int:
    """The exit code that Python would give."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def render_script(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The report for people."""
    findings = report["findings"]
    severities = Counter(finding["severity"] for finding in findings)
    listed = ", ".join(f"{n} {name}" for name, n in sorted(severities.items())) or "none"
    launches = [f"  {count} x {name}" for name, count in report["launches"].items()]
    count = sum(report["launches"].values())
    return (
        *render_findings(findings),
        f"{count} launches on an emulated {report['arch']}, {report['thread_instructions']} "
        "thread-instructions",
        *launches,
        *map(render_coverage, report["coverage"]),
        *render_accepted(report),
        *emulate_witness.render_steering(report["steering"]),
        *(emulate_witness.render(report["witness"]) if report["witness"] else ()),
        *(f"wrote {path}" for path in report["reports"]),
        f"findings: {listed}" + ("; the script was ended by the last" if report["failed"] else ""),
    )
