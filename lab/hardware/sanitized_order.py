"""Does racecheck follow mbarriers and bulk copies? Minimal kernels, ordered and not.

    python3 -m lab.hardware.sanitized_order OUT.json     # GPU, nvcc, compute-sanitizer

Each case of `sanitized_order.cu` is run by itself and under racecheck. A hazard that is told of an
ordered case is none; a case without order shows whether racecheck sees such a fault at all.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lab.hardware.sanitized import SUMMARY, find_sanitizer
from lab.hardware.warpgroup_forward.random_launches import describe_machine

SOURCE = Path(__file__).with_suffix(".cu")
CASES = {  # in the order of the source's; is it ordered?
    "bulk copies, given back by an mbarrier": True,
    "bulk copies, two places": True,
    "bulk copies, given back by bar.sync": True,
    "bulk copies, given back before they are read": False,
    "stores, mbarriers": True,
    "stores, given back by way of a third warp": True,
    "stores, given back before they are read": False,
}
LIMIT_S = 60.0
KIND = re.compile(r"(Error|Warning): (?:Potential )?(.*?) hazard")


def find_nvcc() -> str:
    """The compiler. Raises FileNotFoundError."""
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).exists():
        raise FileNotFoundError(f"nvcc is neither on PATH nor at {found}")
    return found


def run(*command: str) -> str:
    """What a program says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout + done.stderr


def look(program: str, number: int) -> dict[str, Any]:
    """A case: is its result right, and what does racecheck say?"""
    alone = run(program, str(number))
    text = run(find_sanitizer(), "--tool", "racecheck", "--racecheck-report", "all", program,
               str(number))  # fmt: skip
    counts = [int(count) for count in SUMMARY.findall(text)]
    kinds = sorted({f"{level}: {kind}" for level, kind in KIND.findall(text)})
    return {
        "right": alone.startswith("right"),
        "hazards": counts[0] if counts else None,
        "kinds": kinds,
        "said": text.splitlines()[-12:],
    }


def main() -> int:
    """Compiles, runs, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "order")
        said = run(find_nvcc(), "-O2", "-lineinfo", "-arch=sm_90a", "-o", program, str(SOURCE))
        if not Path(program).exists():
            raise RuntimeError(f"{SOURCE.name} does not compile: {said[-500:]}")
        rows = [
            {"case": case, "ordered": ordered} | look(program, number)
            for number, (case, ordered) in enumerate(CASES.items())
        ]
    for row in rows:
        print(row, flush=True)
    version = run(find_sanitizer(), "--version").strip().splitlines()[-1:]
    report = describe_machine() | {"sanitizer": version, "cases": rows}
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
