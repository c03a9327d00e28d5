"""Runs a stored suite on the GPU of this machine; needs NumPy and the CUDA driver.

    python3 -m lab.hardware.emulator_hopper.run_there SUITE.npz RESULTS_FOLDER

The results: digests of all values, the blocks of values whose digest is not the emulator's, and all
values of the approximate functions. Every family runs in a process of its own, which is started
again behind a program that hangs or breaks the context, so that nothing else is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.hardware.driver import CudaError, Gpu
from lab.hardware.emulator_hopper.programs import Array, Program, run_program
from lab.hardware.emulator_hopper.storage import BLOCK, Suite, block_digests
from lab.hardware.there import describe_driver

LIMIT_S = 10.0  # of one kernel
FAMILY_LIMIT_S = 120.0
MOST_BLOCKS = 12  # of one result that come back
MOST_BYTES = 900 << 10  # of such blocks, for one family


def measured(program: Program, arrays: Sequence[Array], expected: Array | None) -> dict[str, Array]:
    """What is kept of one program: digests/NAME, and values/NAME/RESULT/BLOCK."""
    kept, digests, first = {}, [], 0
    for number, result in enumerate(program.results):
        values = result.of(arrays)
        own = block_digests(values)
        digests.append(own)
        wanted = expected[first : first + len(own)] if expected is not None else own
        first += len(own)
        if result.closeness is not None:
            kept[f"values/{program.name}/{number}/all"] = values
            continue
        for block in np.flatnonzero(own != wanted)[:MOST_BLOCKS].tolist():
            part = values[block * BLOCK : (block + 1) * BLOCK]
            kept[f"values/{program.name}/{number}/{block}"] = part
    return kept | {f"digests/{program.name}": np.concatenate(digests)}


def run_family(suite: Suite, names: Sequence[str], folder: Path, family: str) -> None:
    """Runs programs, writing after each what came of it: FAMILY.log and one file for each."""
    gpu = Gpu()
    log = folder / f"{family}.log"
    for name in names:
        program = suite.program(name)
        with log.open("a") as stream:
            stream.write(f"start {name}\n")
        cubin, text = suite.extra("cubin", name), program.text.encode() + b"\0"
        image = cubin.tobytes() if cubin is not None else text
        began = time.perf_counter()
        try:
            arrays = run_program(gpu, program, image, LIMIT_S)
        except (CudaError, TimeoutError) as error:
            with log.open("a") as stream:
                stream.write(f"failed {name} {error}\n")
            # The context is broken, or a kernel still runs: only another process can go on.
            os._exit(3)
        kept = measured(program, arrays, suite.extra("expected", name))
        temporary = folder / f"{family}-{name}.part"
        with temporary.open("wb") as stream:
            np.savez(stream, **kept)  # type: ignore[arg-type]
        temporary.rename(folder / f"{family}-{name}.npz")
        with log.open("a") as stream:
            stream.write(f"done {name} {time.perf_counter() - began:.3f}\n")


def supervise(suite: Suite, path: Path, folder: Path, family: str) -> dict[str, str]:
    """Runs a family in processes until each program is done or has failed: name -> outcome."""
    names = [name for name in suite.names if suite.family(name) == family]
    log, deadline = folder / f"{family}.log", time.monotonic() + FAMILY_LIMIT_S
    outcomes: dict[str, str] = {}
    while len(outcomes) < len(names) and time.monotonic() < deadline:
        command = [sys.executable, "-m", "lab.hardware.emulator_hopper.run_there", str(path)]
        command += [str(folder), "--family", family, "--skip", str(len(outcomes))]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=deadline - time.monotonic())
        before = len(outcomes)
        for line in log.read_text().splitlines() if log.exists() else []:
            kind, name, *rest = line.split(" ", 2)
            if kind != "start":
                outcomes[name] = "ok" if kind == "done" else " ".join(rest)
        if len(outcomes) == before:
            outcomes[names[before]] = "the process ended without a word"
    return {name: outcomes.get(name, "not run") for name in names}


def gather(folder: Path, family: str) -> tuple[dict[str, Array], int]:
    """The kept arrays of a family, and the bytes of those that disagree with the emulator."""
    gathered: dict[str, Array] = {}
    size = 0
    for path in sorted(folder.glob(f"{family}-*.npz")):
        with np.load(path) as stored:
            for key in stored.files:
                array = stored[key]
                if key.startswith("values/") and not key.endswith("/all"):
                    size += array.nbytes
                    if size > MOST_BYTES:
                        continue
                gathered[key] = array
    return gathered, size


def main() -> int:
    """Runs all families, or, as the process of one, the programs that are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family")
    parser.add_argument("--skip", type=int, default=0, help="programs already done")
    arguments = parser.parse_args()
    suite = Suite(arguments.suite)
    if arguments.family:
        names = [n for n in suite.names if suite.family(n) == arguments.family]
        run_family(suite, names[arguments.skip :], arguments.folder, arguments.family)
        return 0
    began = time.perf_counter()
    out, work = arguments.folder, arguments.folder.parent / "work"
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, str] = {}
    kept: dict[str, Array] = {}
    for family in dict.fromkeys(suite.family(name) for name in suite.names):
        start = time.perf_counter()
        here = supervise(suite, arguments.suite, work, family)
        outcomes |= here
        bad = {name: text for name, text in here.items() if text != "ok"}
        gathered, size = gather(work, family)
        kept |= gathered
        seconds = time.perf_counter() - start
        print(
            f"{family}: {len(here)} programs, {seconds:.1f} s, {size} bytes differ, {bad}",
            flush=True,
        )
    np.savez_compressed(out / "results.npz", **kept)  # type: ignore[arg-type]
    report = describe_driver() | {
        "seconds": round(time.perf_counter() - began, 1),
        "identities": {name: suite.identity(name) for name in suite.names},
        "outcomes": outcomes,
    }
    (out / "run.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
