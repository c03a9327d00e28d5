"""What the first launch in a fresh environment costs, and the one after it in another process.

    python -m lab.benchmarks.first_launch

A process of its own for each: it imports the emulator and runs a kernel with all checks. `first`
finds nothing that was compiled before (an empty $NUMBA_CACHE_DIR), `after` finds what `first`
kept; `without_checks` is a first launch with checks off. The kernel reverses 128 numbers through
shared memory, so that loads and stores of both memories and a barrier are compiled. Seconds are
those that CPUs spent for the process, from its start to its end; wall_s is what the clock says,
and others use the machine as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from lab import ROOT
from lab.benchmarks.common import parse_output, write_record

ROUNDS = 3

PROGRAM = r'''
import sys
import time

PTX = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry reverse(.param .u64 x, .param .u64 y)
{ .reg .b32 %t, %a; .reg .f32 %v; .reg .b64 %x, %y, %o; .shared .align 16 .b8 tile[512];
  mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; ld.param.u64 %x, [x]; add.u64 %x, %x, %o;
  ld.global.f32 %v, [%x]; mov.u32 %a, tile; mad.lo.u32 %a, %t, 4, %a; st.shared.f32 [%a], %v;
  bar.sync 0;
  mov.u32 %a, tile; sub.u32 %t, 127, %t; mad.lo.u32 %a, %t, 4, %a; ld.shared.f32 %v, [%a];
  ld.param.u64 %y, [y]; add.u64 %y, %y, %o; st.global.f32 [%y], %v; ret;
}"""

import numpy as np

from fa4.emulator import run_ptx

x = np.arange(128, dtype=np.float32)
y = np.full_like(x, np.nan)
began = time.process_time()
report = run_ptx(PTX, {"x": x, "y": y}, block=(128, 1, 1), checks=sys.argv[1] == "checks")
assert not report.findings and (y == x[::-1]).all()
print(time.process_time() - began)
'''


def measure(folder: str, checks: bool) -> dict[str, float]:
    """CPU and wall seconds of a process that runs one launch; launch_cpu_s: of `run_ptx` alone."""
    before, began = os.times(), time.perf_counter()
    environment = os.environ | {"NUMBA_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, "checks" if checks else "none"],
        env=environment, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    wall, after = time.perf_counter() - began, os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {"cpu_s": used, "wall_s": wall, "launch_cpu_s": float(process.stdout)}


def least(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure the least of several runs, which others disturbed least."""
    return {name: round(min(row[name] for row in rows), 2) for name in rows[0]}


def measure_all(rounds: int) -> Mapping[str, dict[str, float]]:
    """The figures by kind of launch."""
    found: dict[str, list[dict[str, float]]] = {"first": [], "after": [], "without_checks": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found["first"].append(measure(folder, True))
            found["after"].append(measure(folder, True))
        with tempfile.TemporaryDirectory() as folder:
            found["without_checks"].append(measure(folder, False))
    return {name: least(rows) for name, rows in found.items()}


def main() -> None:
    """Prints the figures as JSON and writes the record."""
    options = parse_output(__doc__ or "", "first_launch")
    report = {"rounds": ROUNDS, "launches": measure_all(ROUNDS)}
    print(json.dumps(report, indent=2))
    write_record(options.output, report, ("numpy", "numba", "llvmlite"))


if __name__ == "__main__":
    main()
