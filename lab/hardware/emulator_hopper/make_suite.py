"""Writes the suite: programs, cubins, inputs, and what the emulator makes of them.

    python -m lab.hardware.emulator_hopper.make_suite out/emulator_hopper/suite.npz

Needs ptxas of CUDA 12.8 or later (without it, the driver there compiles the PTX).
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lab.hardware.emulator_hopper.emulate import CHECKED, emulate
from lab.hardware.emulator_hopper.programs import Array, Program
from lab.hardware.emulator_hopper.storage import digests_of, save
from lab.hardware.emulator_hopper.suite import FAMILIES


def assemble(program: Program) -> bytes:
    """The cubin. Raises CalledProcessError with what ptxas says."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(program.text)
        command = ["ptxas", "-arch=sm_90a", "-o", str(target), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return target.read_bytes()


def prepare(family: str) -> dict[str, dict[str, Array]]:
    """Program -> its cubin and the emulator's digests, for one family."""
    found = {}
    began = time.perf_counter()
    programs = FAMILIES[family]()
    for program in programs:
        made: dict[str, Array] = {}
        if shutil.which("ptxas"):
            made["cubin"] = np.frombuffer(assemble(program), np.uint8)
        made["expected"] = digests_of(program, emulate(program, checks=family in CHECKED))
        found[program.name] = made
    seconds = time.perf_counter() - began
    print(f"{family}: {len(programs)} programs, {seconds:.1f} s", flush=True)
    return found


def main() -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    extra: dict[str, dict[str, Array]] = {}
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for made in pool.imap_unordered(prepare, FAMILIES, chunksize=1):
            extra |= made
    programs = [program for make in FAMILIES.values() for program in make()]
    save(arguments.output, programs, extra)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
