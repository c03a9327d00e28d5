"""What every benchmark shares: timing against a peer in the same run, and dated result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import fa4

RESULTS = Path(__file__).parent / "results"


def time_against(
    ours: Callable[[], Any], peer: Callable[[], Any], *, repeats: int = 7
) -> dict[str, float]:
    """Seconds of both, run alternately on this noisy machine, and the ratio of their medians."""
    ours(), peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, seconds in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    mine, theirs = (median(seconds) for seconds in times)
    return {"seconds": mine, "peer_seconds": theirs, "ratio": mine / theirs}


def processor() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def describe_run(packages: tuple[str, ...]) -> dict[str, Any]:
    """Date, machine, versions and commit of a run."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
        ).stdout.strip()  # fmt: skip
    except OSError:  # a machine without git
        commit = ""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {"fa4": fa4.__version__} | {x: metadata.version(x) for x in packages},
        "commit": commit,
    }


def parse_output(description: str, name: str) -> argparse.Namespace:
    """Options that every benchmark takes: --output FILE."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return parser.parse_args()


def write_result(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, whole or not at all, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(path)
    print(f"wrote {path}")
