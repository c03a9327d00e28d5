"""What options of `fa4 emulate` may be, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa4.emulator.kinds import SEVERITIES

ARCHS = ("sm_100a", "sm_103a", "sm_90a")


def choose_schedule(name: str, seeds: int) -> str:
    """The schedule of --schedule and --seeds. Raises ValueError if there is none, or no use."""
    from fa4.emulator.machine.options import SCHEDULES

    if name and name not in SCHEDULES:
        raise ValueError(f"--schedule {name}: allowed are {', '.join(SCHEDULES)}")
    if seeds > 1 and name == "fifo":
        raise ValueError("--seeds changes nothing with --schedule fifo: take random or adversarial")
    return name or ("fifo" if seeds == 1 else "random")


def choose_severity(name: str) -> str:
    """The value of --fail-on. Raises ValueError if there is none of that name."""
    if name not in SEVERITIES:
        raise ValueError(f"--fail-on {name}: allowed are {', '.join(SEVERITIES)}")
    return name


def choose_arch(name: str) -> str:
    """The value of --arch. Raises ValueError if there is none of that name."""
    if name not in ARCHS:
        raise ValueError(f"--arch {name}: allowed are {', '.join(ARCHS)}")
    return name


def refuse_given(file: Path, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that only PTX has, where a script is run."""
    if given := [name for name, value in options.items() if value]:
        raise ValueError(f"{file}: {', '.join(given)} cannot be used with a script")


def is_as_severe(finding: Mapping[str, Any], severity: str) -> bool:
    """Whether a finding fails a run that this severity fails."""
    return SEVERITIES.index(finding["severity"]) >= SEVERITIES.index(severity)
