"""Read hardware counters of Hopper kernels with ncu: totals, and by instruction.

    COMMIT=... python3 -m lab.hardware.hopper_counters.measure CONFIGURATIONS.json FOLDER

Needs an NVIDIA GPU of compute capability 9.0, ncu and the right to read its counters, PyTorch, and
what the kernels need. Writes FOLDER/raw.csv (a row per kernel), FOLDER/source.csv (its instructions
with how often each ran and what its warps waited for) and FOLDER/machine.json. Clocks stay as they
are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.hardware.hopper_counters.metrics import METRICS
from lab.hardware.there import query

PROBE = "import torch; torch.ones(1, device='cuda').add_(1); torch.cuda.synchronize()"


class NoCounters(RuntimeError):
    """ncu is not here, or may not read the counters."""


def require_counters() -> None:
    """Raise NoCounters, in one line, unless ncu reads a counter of a small kernel."""
    command = ["ncu", "--clock-control", "none", "--metrics", "smsp__inst_executed.sum"]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise NoCounters("no hardware counters: ncu is not on the path") from None
    if done.returncode or "smsp__inst_executed.sum" not in done.stdout:
        lines = [line for line in done.stdout.splitlines() if "==ERROR==" in line]
        why = (lines or done.stderr.splitlines() or ["no counter in ncu's output"])[0]
        raise NoCounters(f"no hardware counters: {why.strip()} (the driver must let ncu read them)")


def profile(configurations: Path, report: Path) -> str:
    """Run `launch` under ncu; what it printed. CalledProcessError if ncu fails."""
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--force-overwrite",
        "--section", "SourceCounters",
        "--metrics", ",".join(METRICS.values()), "--export", str(report),
        sys.executable, "-m", "lab.hardware.hopper_counters.launch", str(configurations),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


def page(report: Path, name: str) -> str:
    """One page of a report as CSV, in base units."""
    command = ["ncu", "--import", str(report), "--csv", "--page", name, "--print-units", "base"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def machine() -> dict[str, str]:
    """What it was measured on, and when."""
    version = subprocess.run(["ncu", "--version"], check=True, capture_output=True, text=True)
    return {
        **query("name", "driver_version", "clocks.sm", "power.limit"),
        "ncu": version.stdout.strip().splitlines()[-1],
        "commit": os.environ.get("COMMIT", "unknown"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> int:
    """Read, write; one line and exit status 2 where there are no counters."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configurations", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        require_counters()
    except NoCounters as error:
        print(error, file=sys.stderr)
        return 2
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "counters.ncu-rep"
        try:
            said = profile(given.configurations, report)
        except subprocess.CalledProcessError as error:
            print(error.stdout, error.stderr, file=sys.stderr)
            return 1
        for name in ("raw", "source"):
            (given.folder / f"{name}.csv").write_text(page(report, name), encoding="utf-8")
    done = [json.loads(line) for line in said.splitlines() if line.startswith('{"number"')]
    report_text = json.dumps({"machine": machine(), "launches": done}, indent=1)
    (given.folder / "machine.json").write_text(report_text + "\n", encoding="utf-8")
    failed = [item for item in done if item["failed"]]
    print(f"{len(done) - len(failed)} kernels read", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
