"""The machine, versions and commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def processor() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def describe_machine() -> str:
    """Processor, cores and Python."""
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def describe_run(packages: tuple[str, ...]) -> dict[str, Any]:
    """Date, machine, versions and commit ("" where there is no git) of a run."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        ).stdout.strip()  # fmt: skip
    except OSError:
        commit = ""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {x: metadata.version(x) for x in packages},
        "commit": commit,
    }
