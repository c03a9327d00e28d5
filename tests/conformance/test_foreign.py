"""Kernels of other authors, unmodified, compared with NumPy under every schedule.

`make conformance` installs the kernels and runs this. A kernel passes if its outputs are right and
no check fires, except where `Foreign.known` says why one must.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.foreign import missing
from tests.conformance.cases import CASES, REFUSED, Foreign
from tests.conformance.conftest import RUN
from tests.conformance.program import Program, Verdict
from tests.conformance.record import run_of

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore"),  # those of other people's code
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

SCHEDULES = ("fifo", "random", "adversarial")
# A fault that depends on the order of events is looked for under so many seeds.
SEEDS = 6


def execute(
    case: Foreign, program: Program, schedule: str, seed: int
) -> tuple[list[Any], Verdict | None]:
    """Runs a program; its reports, and the verdict on its outputs."""
    from fa4.emulator.host import emulate

    options = {"schedule": schedule, "seed": seed, "collect": True, "max_findings": 1000}
    with emulate(arch=case.arch, **options) as session:
        found = program.run(session)
    return session.reports, program.judge(found) if case.judged else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_foreign_kernel(case: Foreign, record_property: Any) -> None:
    program = case.build()
    seen: set[str] = set()
    later = [("adversarial", seed) for seed in range(1, SEEDS)]
    for schedule, seed in [*((name, 0) for name in SCHEDULES), *later]:
        if seed and seen == case.known.keys():
            break
        reports, verdict = execute(case, program, schedule, seed)
        findings = [finding for report in reports for finding in report.findings]
        # Style is judged by its own sentence, everything else by a reason of this kernel's.
        unknown = [
            str(finding)
            for finding in findings
            if finding.kind not in case.known and finding.severity != "style"
        ]
        assert not unknown, f"{schedule}, seed {seed}: {unknown[:5]}"
        assert verdict is None or verdict.share <= 1, f"{schedule}, seed {seed}: {verdict}"
        seen |= {finding.kind for finding in findings} & case.known.keys()
        record_property(RUN, run_of(case, (schedule, seed), reports, verdict))
    assert seen == case.known.keys(), "a known finding is not found any more"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_kernel(case: Foreign) -> None:
    from fa4.emulator.errors import LaunchError
    from fa4.emulator.host import emulate

    with emulate() as session, pytest.raises(LaunchError, match=case.refused):
        case.build().run(session)
