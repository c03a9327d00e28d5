"""Compare the exp2 models with a Hopper GPU, bit for bit, over all 2^32 float32 inputs.

    python -m lab.hardware.h200_exp2 --output h200_exp2.json [--limit 16777216]

Needs an NVIDIA GPU of compute capability 9.0, nvcc and NumPy. The GPU computes each polynomial and
MUFU's ex2.approx.ftz.f32 (h200_exp2.cu); all CPU cores evaluate fa4.reference.exp2 on the same
inputs. The polynomials must agree in every bit; MUFU must stay within MUFU_MAX_ULP of its model and
answer NaN exactly where the input is NaN. The exit status is 1 if a check fails. The JSON holds
counts, the histogram of MUFU's distances, and the first disagreeing bit patterns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fa4.reference.exp2 import COEFFICIENTS, MUFU_MAX_ULP, exp2_mufu, exp2_polynomial
from lab.hardware.there import describe_driver

ALL_INPUTS = 1 << 32
CHUNK = 1 << 26  # inputs per launch; their results are copied back together (256 MiB)
TASK = 1 << 20  # inputs that one worker compares at a time
SHOWN = 8  # disagreeing inputs listed per check
WIDEST = 8  # MUFU distances are counted from -WIDEST to WIDEST ulp; the ends hold what is beyond

# The results of one chunk. Workers inherit the mapping when they are forked.
RESULTS = mmap.mmap(-1, 4 * CHUNK)

Task = tuple[int, int, int, int]  # degree (0: MUFU), first input, offset in the chunk, step
Listing = list[dict[str, str]]


def inputs_and_results(task: Task, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The bit patterns (uint32) a task stands for, and what the GPU answered."""
    _, first, offset, step = task
    index = np.arange(first + offset, first + offset + count, dtype=np.uint64).astype(np.uint32)
    answers = np.frombuffer(RESULTS, dtype=np.uint32, count=count, offset=4 * offset)
    return index * np.uint32(step), answers


def listing(where: np.ndarray, bits: np.ndarray, gpu: np.ndarray, model: np.ndarray) -> Listing:
    """The first few disagreements as hexadecimal bit patterns."""
    return [
        {"input": f"{bits[i]:#010x}", "gpu": f"{gpu[i]:#010x}", "model": f"{model[i]:#010x}"}
        for i in np.flatnonzero(where)[:SHOWN]
    ]


def compare_polynomial(task: Task) -> tuple[int, Listing]:
    """(mismatches, the first of them) of one task."""
    bits, gpu = inputs_and_results(task, TASK)
    model = exp2_polynomial(bits.view(np.float32), degree=task[0]).view(np.uint32)
    wrong = gpu != model
    return int(np.count_nonzero(wrong)), listing(wrong, bits, gpu, model)


def signed_steps(bits: np.ndarray) -> np.ndarray:
    """Position of each float32 among all of them, 0 for both zeros: differences are ulps."""
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return np.where(bits >> np.uint32(31), -magnitude, magnitude)


def compare_mufu(task: Task) -> tuple[np.ndarray, np.ndarray, int, int, Listing]:
    """One task's histograms of GPU minus model in ulp, over all inputs and over [1, 2), the number
    of NaN inputs and of disagreements beyond the bound (or about NaN), and the first of these."""
    bits, gpu = inputs_and_results(task, TASK)
    model = exp2_mufu(bits.view(np.float32)).view(np.uint32)
    nan_in = np.isnan(bits.view(np.float32))
    nan_out = np.isnan(gpu.view(np.float32))
    both = ~(nan_in | nan_out)
    steps = np.clip(signed_steps(gpu) - signed_steps(model), -WIDEST, WIDEST)
    fractions = both & (bits >> np.uint32(23) == 127)
    histogram, of_fractions = (
        np.bincount(steps[mask] + WIDEST, minlength=2 * WIDEST + 1) for mask in (both, fractions)
    )
    wrong = (nan_in != nan_out) | (both & (np.abs(steps) > MUFU_MAX_ULP))
    counts = int(np.count_nonzero(nan_in)), int(np.count_nonzero(wrong))
    return histogram, of_fractions, *counts, listing(wrong, bits, gpu, model)


class Gpu:
    """The compiled kernels, writing into RESULTS."""

    def __init__(self, library: Path) -> None:
        """Load the shared library."""
        self._library = ctypes.CDLL(str(library))
        self._library.fa4_error.restype = ctypes.c_char_p
        self._library.fa4_exp2.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_void_p,
        ]
        self._target = ctypes.addressof(ctypes.c_char.from_buffer(RESULTS))

    def run(self, degree: int, flush: bool, first: int, count: int, step: int) -> None:
        """Compute `count` results from the input number `first` on; RuntimeError if CUDA fails."""
        coefficients = np.array(COEFFICIENTS.get(degree, ()), dtype=np.float32)
        code = self._library.fa4_exp2(
            degree, flush, coefficients.ctypes.data, first, count, step, self._target
        )
        if code:
            raise RuntimeError(f"CUDA error {code}: {self._library.fa4_error(code).decode()}")


def build(folder: str) -> Path:
    """Compile h200_exp2.cu with nvcc into a shared library in `folder`."""
    library = Path(folder) / "h200_exp2.so"
    source = Path(__file__).with_suffix(".cu")
    options = ["-O3", "-std=c++17", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *options, "-o", str(library), str(source)], check=True)
    return library


def chunks(limit: int, degree: int, step: int) -> Iterator[tuple[int, int, list[Task]]]:
    """(first input, count, tasks) of each launch that together cover `limit` inputs."""
    for first in range(0, limit, CHUNK):
        count = min(CHUNK, limit - first)
        yield first, count, [(degree, first, offset, step) for offset in range(0, count, TASK)]


def check_polynomial(gpu: Gpu, pool: Any, degree: int, flush: bool, limit: int) -> dict[str, Any]:
    """Run one polynomial over `limit` inputs and count the results that differ in any bit."""
    step, mismatches, shown = stride(limit), 0, []
    for first, count, tasks in chunks(limit, degree, step):
        gpu.run(degree, flush, first, count, step)
        for wrong, examples in pool.imap(compare_polynomial, tasks):
            mismatches += wrong
            shown += examples
    name = f"exp2_polynomial degree {degree}" + (", .ftz on every instruction" if flush else "")
    return {
        "check": name,
        "inputs": limit,
        "mismatches": mismatches,
        "first_mismatches": shown[:SHOWN],
        "passed": mismatches == 0,
    }


def check_mufu(gpu: Gpu, pool: Any, limit: int) -> dict[str, Any]:
    """Run ex2.approx.ftz.f32 over `limit` inputs and count its distances from exp2_mufu."""
    step, shown, totals = stride(limit), [], np.zeros(2, dtype=np.int64)
    histograms = np.zeros((2, 2 * WIDEST + 1), dtype=np.int64)
    for first, count, tasks in chunks(limit, 0, step):
        gpu.run(0, False, first, count, step)
        for overall, fractions, nans, wrong, examples in pool.imap(compare_mufu, tasks):
            histograms += overall, fractions
            totals += nans, wrong
            shown += examples
    named = [{str(ulp - WIDEST): int(n) for ulp, n in enumerate(row) if n} for row in histograms]
    return {
        "check": "exp2_mufu, ex2.approx.ftz.f32",
        "inputs": limit,
        "nan_inputs": int(totals[0]),
        "ulp_bound": MUFU_MAX_ULP,
        "ulp_histogram": named[0],
        "ulp_histogram_1_to_2": named[1],
        "mismatches": int(totals[1]),
        "first_mismatches": shown[:SHOWN],
        "passed": int(totals[1]) == 0,
    }


def stride(limit: int) -> int:
    """Distance between inputs, in bit patterns: odd, so that every mantissa bit varies."""
    return ALL_INPUTS // limit | 1


def output_of(*command: str) -> str:
    """Last line a command prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return done.stdout.strip().splitlines()[-1]


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--limit",
        type=int,
        default=ALL_INPUTS,
        help=f"inputs per check, spread over all patterns: a multiple of {TASK} (default: all)",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="CPU workers")
    parser.add_argument("--library", type=Path, help="use this build instead of calling nvcc")
    arguments = parser.parse_args()
    if arguments.limit % TASK or not 0 < arguments.limit <= ALL_INPUTS:
        parser.error(f"--limit must be a multiple of {TASK} up to {ALL_INPUTS}")
    return arguments


def main() -> int:
    """Run every check and write the report; 0 if all passed."""
    arguments = parse_arguments()
    start = time.perf_counter()
    # The workers are forked before the CUDA driver is loaded, and never call it.
    with (
        multiprocessing.get_context("fork").Pool(arguments.processes) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        gpu = Gpu(arguments.library or build(folder))
        runs = [(3, False), (3, True), (1, False), (2, False), (4, False), (5, False)]
        checks = []
        for degree, flush in runs:
            checks.append(check_polynomial(gpu, pool, degree, flush, arguments.limit))
            print(json.dumps(checks[-1]), flush=True)
        checks.append(check_mufu(gpu, pool, arguments.limit))
        print(json.dumps(checks[-1]), flush=True)
    report = {
        "schema_version": 1,
        "command": shlex.join(["python", *sys.argv]),
        **describe_driver(),
        "nvcc": output_of("nvcc", "--version"),
        "seconds": round(time.perf_counter() - start, 1),
        "checks": checks,
        "passed": all(check["passed"] for check in checks),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
