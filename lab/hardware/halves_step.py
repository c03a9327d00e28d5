"""A softmax step of one warpgroup for a Q tile beside one of two that share its keys.

    python -m lab.hardware.halves_step --output lab/hardware/results/halves_step.json

Needs an NVIDIA GPU of compute capability 9.0 and nvcc. The JSON has the cycles of a step for one Q
tile alone and for two side by side, in one CTA and in one on every SM, compiled with the registers
that nvcc takes and with fewer: what the compiler then moves to local memory is `local_bytes`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cu")
LIMITS = (0, 104, 96, 88)  # registers of a thread; 0: none


def measure(nvcc: str) -> dict[str, Any]:
    """Compile and run `halves_step.cu` with each limit; what it printed, with when and by what."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for limit in LIMITS:
            program = str(Path(folder) / f"halves_step{limit}")
            command = [nvcc, "-O3", "-std=c++17", "-arch=sm_90a", str(SOURCE), "-o", program]
            command += [f"-DLIMIT={limit}"] if limit else []
            subprocess.run(command, check=True, timeout=120)
            done = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
            report = json.loads(done.stdout)
            found["device"], found["steps"] = report["device"], report["steps"]
            for way in report["ways"]:
                found.setdefault("ways", []).append({"limit": limit or None, **way})
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "nvcc": version.stdout.strip().splitlines()[-1],
        **found,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    result = measure(given.nvcc)
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    for way in result["ways"]:
        print(way)


if __name__ == "__main__":
    main()
