"""What a user can choose about an emulation."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.emulator.accepted import Accepted
from fa4.emulator.errors import LaunchError
from fa4.emulator.kinds import SEVERITIES
from fa4.emulator.machine.events import RunEvents
from fa4.emulator.machine.schedule import Schedule

SCHEDULES = ("fifo", "random", "adversarial")
# As long as starting a warp takes, about (measured, AMD EPYC).
WARP_START_STEPS = 100


@dataclass(frozen=True)
class Options:
    """schedule, seed: the order of events ("fifo", "random", "adversarial"), reproducible; or an
    object that chooses, for one run.

    checks: False turns off races, uninitialised reads, fences and divisions by zero (faster;
    bounds, barriers and deadlocks are always checked). resident_clusters: clusters that run at the
    same time at first; more start when those cannot go on without them. max_findings: stop after
    this many, not counting style.
    collect: return findings in the report instead of raising EmulationFailed. fail_on: the least
    severity ("style", "formal", "hazard", "error") that fails; findings below it are in the report.
    accepted: findings that fail nothing and stand in `Report.accepted`. events: who hears what
    happens, such as `fa4.emulator.Recorder`. clusters_limit: how many clusters fit on the chip.
    strict_tmem_loads: report registers used before tcgen05.wait::ld, as the manual
    asks; the hardware waits by itself, and kernels that are known to be right rely on it.
    strict_tmem_lanes: report addresses of tcgen05.ld and .st that name lanes of another warp, which
    the manual forbids; the hardware takes the warp's own, and kernels rely on that, too. max_steps:
    a finding ends a run that is not over after so many steps of warps, of which the start of a warp
    counts as WARP_START_STEPS (None: no limit). ordered_sums: report two additions of floats to the
    same memory that nothing orders, in whose order the bits of the sum differ: what a kernel must
    not have whose results are the same every time.
    """

    schedule: str | Schedule = "fifo"
    seed: int = 0
    checks: bool = True
    resident_clusters: int = 2
    max_findings: int = 20
    collect: bool = False
    fail_on: str = "hazard"
    accepted: Accepted | None = None
    events: RunEvents | None = None
    clusters_limit: int = 148
    strict_tmem_loads: bool = False
    strict_tmem_lanes: bool = False
    max_steps: int | None = None
    ordered_sums: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise LaunchError(f"schedule {self.schedule!r}: allowed are {', '.join(SCHEDULES)}")
        if self.fail_on not in SEVERITIES:
            raise LaunchError(f"fail_on {self.fail_on!r}: allowed are {', '.join(SEVERITIES)}")
        for name in ("resident_clusters", "max_findings", "clusters_limit", "max_steps"):
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if not isinstance(value, int) or value < 1:
                raise LaunchError(f"{name} {value!r}: a positive integer is needed")
