"""Measure what the simulator assumes of a Hopper SM and its memory, and write one JSON.

    python -m lab.hardware.hopper_units.measure --output FILE.json [--only barriers wgmma]

Needs an NVIDIA GPU of compute capability 9.0 and, unless --built names a folder with the programs,
nvcc. Each program prints a figure per line with its repeats; the JSON holds median and interval
(least and most of the repeats) of each, with the machine and its clock, power and temperature
before and after each program.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.hardware.hopper_units import power
from lab.hardware.hopper_units.products import header
from lab.hardware.there import query

FOLDER = Path(__file__).parent
PROGRAMS = ("barriers", "pipes", "softmax", "wgmma", "memory", "launch", "copies")
# In runs of their own, "starts" with "energy": results/hopper_starts.json, hopper_steps.json,
# hopper_beside.json and hopper_ports.json.
ALONE = ("starts", "steps", "queue", "streams", "beside", "ports", "rows")
POWER = "power"  # the last: it heats the GPU
LOADS = {"power": (), "energy": ("energy",)}  # arguments of that program, by what is measured
OPTIONS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a")
SECONDS = 25  # of a program, at most: one that hangs is ended
STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def build(folder: Path, nvcc: str, programs: tuple[str, ...] = PROGRAMS) -> None:
    """Compile the programs into `folder`, side by side."""
    (folder / "products.cuh").write_text("\n".join(header()), encoding="utf-8")

    def compile_one(name: str) -> None:
        source = str(FOLDER / f"{name}.cu")
        command = [nvcc, *OPTIONS, f"-I{folder}", source, "-o", str(folder / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, programs))


def summary(program: str, line: str) -> dict[str, Any]:
    """A figure as it is kept: its median, and the least and most of its repeats."""
    found = json.loads(line)
    values = found.pop("values")
    return {
        "program": program,
        **found,
        "value": float(f"{statistics.median(values):.5g}"),
        "interval": [float(f"{end:.5g}") for end in (min(values), max(values))],
        "repeats": len(values),
    }


def run(folder: Path, program: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The figures of one program, and the GPU's state around it. RuntimeError if it fails."""
    before, start = query(*STATE), time.perf_counter()
    command = [str(folder / program)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        text, code, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        text, code, errors = (late.stdout or b"").decode(), "timeout", ""
    figures = [summary(program, line) for line in text.splitlines() if line.endswith("}")]
    state = {
        "program": program,
        "seconds": round(time.perf_counter() - start, 2),
        "before": before,
        "after": query(*STATE),
    }
    if code:
        state["failed"] = f"{code}: {errors.strip()}"
    return figures, state


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each entry of its lists."""
    lines = []
    for key, value in report.items():
        if isinstance(value, list):
            inner = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def machine(nvcc: str) -> dict[str, Any]:
    """What it was measured on."""
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    named = query("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    return {
        **named,
        "nvcc": said.stdout.strip().splitlines()[-1],
        "python": platform.python_version(),
    }


def main() -> None:
    """Build, run, write; exit status 1 if a program failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*PROGRAMS, *ALONE, *LOADS],
                        default=[*PROGRAMS, POWER])  # fmt: skip
    parser.add_argument("--built", type=Path, help="a folder with the programs, instead of nvcc")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="of the sources")
    given = parser.parse_args()
    figures: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.built or Path(temporary)
        if not given.built:
            names = (POWER if name in LOADS else name for name in given.only)
            build(folder, given.nvcc, tuple(dict.fromkeys(names)))
        for program in (name for name in given.only if name not in LOADS):
            found, state = run(folder, program)
            figures += found
            states.append(state)
            print(
                program,
                len(found),
                "figures,",
                state["seconds"],
                "s",
                state.get("failed", ""),
                flush=True,
            )
        loads = []
        try:
            for kind in (name for name in LOADS if name in given.only):
                loads += power.measure(folder / POWER, *LOADS[kind])
        except subprocess.CalledProcessError as error:
            states.append({"program": POWER, "failed": error.stderr.strip()})
            print(POWER, error.stderr)
    report = {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": given.commit,
        "machine": machine(given.nvcc),
        "states": states,
        "figures": figures,
        "loads": loads,
    }
    given.output.write_text(text_of(report), encoding="utf-8")
    sys.exit(any("failed" in state for state in states))


if __name__ == "__main__":
    main()
