"""How a pair of CTAs hands over dS: stored into the other's memory, or staged and copied.

    python -m lab.hardware.ds_exchange --output lab/hardware/results/ds_exchange.json

Needs an NVIDIA GPU of compute capability 9.0 and nvcc. The JSON holds the cycles of a whole round
for both ways, alone on the GPU and with 60 pairs side by side; the exit status is 1 if anything
arrived wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cu")


def measure(nvcc: str) -> dict[str, Any]:
    """Compile and run `ds_exchange.cu`; what it printed, with when and by what."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ds_exchange")
        command = [nvcc, "-O3", "-std=c++17", "-arch=sm_90a", str(SOURCE), "-o", program]
        subprocess.run(command, check=True)
        found = subprocess.run([program], check=True, capture_output=True, text=True, timeout=120)
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "nvcc": version.stdout.strip().splitlines()[-1],
        **json.loads(found.stdout),
    }


def main() -> None:
    """Measure, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    result = measure(given.nvcc)
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    for way in result["ways"]:
        print(way)
    sys.exit(any(way["wrong"] for way in result["ways"]))


if __name__ == "__main__":
    main()
