"""A softmax step of one warpgroup for a Q tile beside one of two that share its keys.

    python -m lab.hardware.halves_step --output lab/hardware/results/halves_step.json

Needs an NVIDIA GPU of compute capability 9.0 and nvcc. The JSON has the cycles of a step for one Q
tile alone and for two side by side, in one CTA and in one on every SM, compiled with the registers
that nvcc takes and with fewer: what the compiler then moves to local memory is `local_bytes`. A
row without figures says under `failed` which call of CUDA refused, and the program exits with 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cu")
LIMITS = (0, 104, 96, 88)  # registers of a thread; 0: none
WAYS = ("whole", "halves", "apart")
ON_EACH_SM = 0  # CTAs
LIMIT_S = 20  # of a process


def measure(nvcc: str) -> dict[str, Any]:
    """Compile `halves_step.cu` with each limit and run every way: figures, when, by what."""
    found: dict[str, Any] = {"ways": []}
    with tempfile.TemporaryDirectory() as folder:
        for limit in LIMITS:
            program = str(Path(folder) / f"halves_step{limit}")
            command = [nvcc, "-O3", "-std=c++17", "-arch=sm_90a", str(SOURCE), "-o", program]
            command += [f"-DLIMIT={limit}"] if limit else []
            subprocess.run(command, check=True, timeout=120)
            found |= run(program)
            if "failed" in found:
                raise SystemExit(f"no GPU to measure: {found['failed']}")
            for way, q_tiles, ctas in product(WAYS, (1, 2), (1, ON_EACH_SM)):
                row = {"limit": limit or None, "way": way, "q_tiles": q_tiles, "ctas": ctas}
                found["ways"].append(row | run(program, way, str(q_tiles), str(ctas)))
                print(found["ways"][-1], flush=True)
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "nvcc": version.stdout.strip().splitlines()[-1],
        **found,
    }


def run(program: str, *arguments: str) -> dict[str, Any]:
    """What it prints, or why it has nothing to say: an error leaves a process without a GPU, so
    that each way has its own."""
    try:
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True,
                              timeout=LIMIT_S)  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nvcc", default="nvcc")
    given = parser.parse_args()
    result = measure(given.nvcc)
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    failed = [way for way in result["ways"] if "failed" in way]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(result['ways'])} ways have no figures")


if __name__ == "__main__":
    main()
