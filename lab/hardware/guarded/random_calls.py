"""Random calls of the Hopper kernels on guarded memory: do they end, are they right?

    python3 -m lab.hardware.guarded.random_calls OUT.json [--calls 3000] [--seed N]     # GPU

Every tensor of torch, outputs and workspaces included, begins or ends at unmapped memory
(`lab.hardware.guarded.memory`). Each two choices of pass, type, head dims, heads, mask, sink,
softcap, layout and strides occur together (`lab.hardware.guarded.drawing`); sequences without
queries or keys may stand anywhere. The seed is drawn unless it is given, and printed. Several
processes share the calls. One that breaks the context, or does not end in 40 s, is written down,
and another process goes on behind it; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fa4.compiled.build import build
from fa4.compiled.support import BackwardCall, ForwardCall
from fa4.compiled.variants import choose_backward_spec, choose_sm90_spec
from fa4.hardware import H200
from lab.hardware.guarded.drawing import (
    FIXED,
    STRIDES,
    WORKS,
    GuardedCall,
    draw_calls,
    make_tensors,
)
from lab.hardware.guarded.memory import CudaDriver, GuardedMemory, install_in_torch
from lab.hardware.there import describe_machine
from lab.hardware.warpgroup_backward.random_gradients import run as differentiate
from lab.hardware.warpgroup_forward.random_launches import run as launch
from lab.hardware.warpgroup_forward.random_launches import watch


def spec_of(call: ForwardCall) -> Any:
    """The kernels of a pass."""
    if isinstance(call, BackwardCall):
        return choose_backward_spec(call, H200)
    return choose_sm90_spec(call)


def compile_spec(call: ForwardCall) -> str:
    """Its kernels into the cache; the key."""
    return build(spec_of(call), "sm_90a").key


def compile_calls(calls: Sequence[GuardedCall], processes: int) -> int:
    """How many kernels there are, each compiled by one of the processes."""
    chosen = {spec_of(kernel): kernel for call in calls for kernel in call.kernels()}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return len(set(pool.map(compile_spec, chosen.values())))


def make_call(one: GuardedCall, seed: int, impl: str) -> float:
    """The largest error as a share of its band. Raises AssertionError beyond it."""
    make = partial(make_tensors, one.strides)
    if one.differentiates:
        return differentiate(one.call, one.work == FIXED, seed, impl, make)
    return launch(one.call, seed, impl, make, parts=one.parts, descale=one.descale)


def work(calls: list[GuardedCall], arguments: argparse.Namespace) -> None:
    """Every so many-th call from the first on, each a line of the log before and after."""
    state: dict[str, Any] = {"since": time.monotonic(), "doing": ""}
    first, until = arguments.first, time.monotonic() + arguments.seconds
    if arguments.impl == "sm90":  # the emulator says itself what hangs
        threading.Thread(target=watch, args=(state,), daemon=True).start()
        install_in_torch(GuardedMemory(CudaDriver(), at_end=bool(first % 2)))
    with log_of(arguments.out, first % arguments.workers).open("a") as stream:

        def say(number: int, **found: Any) -> None:
            stream.write(json.dumps({"number": number, **found}) + "\n")
            stream.flush()
            if "error" in found:
                print(f"WRONG {number}: {calls[number]}: {found['error']}", flush=True)

        for number in range(first, len(calls), arguments.workers):
            if time.monotonic() > until:
                say(number, late=True)
                continue
            state.update(since=time.monotonic(), doing=f"{number}: {calls[number]}")
            say(number, started=True)
            try:
                say(number, share=make_call(calls[number], number, arguments.impl))
            except AssertionError as error:
                say(number, error=str(error)[:300])
            except Exception as error:  # the context may be lost: another process goes on
                say(number, error=f"{type(error).__name__}: {error}"[:300])
                os._exit(4)
    os._exit(0)  # not the allocator's end, which comes after its driver's


def log_of(out: Path, worker: int) -> Path:
    """The lines of one of the processes."""
    return out.with_suffix(f".{worker}.log")


def supervise(arguments: argparse.Namespace, ends: float, worker: int) -> dict[int, dict[str, Any]]:
    """Processes until every call of a worker is done, or broke one, or time.monotonic() is `ends`:
    the last line of each call."""
    log = log_of(arguments.out, worker)
    found: dict[int, dict[str, Any]] = {}
    log.unlink(missing_ok=True)
    first = worker
    while first < arguments.calls:
        command = [sys.executable, "-m", "lab.hardware.guarded.random_calls", str(arguments.out)]
        for name in ("calls", "seed", "longest", "impl", "workers"):
            command += [f"--{name}", str(getattr(arguments, name))]
        command += ["--first", str(first), "--seconds", str(max(ends - time.monotonic(), 0.0))]
        done, before = subprocess.run(command, check=False), len(found)
        for line in log.read_text().splitlines() if log.exists() else []:
            entry = json.loads(line)
            found[entry["number"]] = entry
        if len(found) == before:
            raise SystemExit(f"no call was begun: exit code {done.returncode}")
        first = max(found) + arguments.workers
    for entry in found.values():
        if "started" in entry:
            entry["error"] = "the process ended, or hung, in this call"
    return found


def main() -> int:
    """Compiles, calls, writes what was found; exit code 1 if a result is wrong, or none judged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--longest", type=int, default=1100, help="rows or keys of a sequence")
    parser.add_argument("--impl", default="sm90", choices=("sm90", "emulator_sm90", "reference"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the calls")
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="no call begins later than so long after the start, compilation included",
    )
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--first", type=int, help="work on the calls from this one on")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.seconds
    calls = draw_calls(arguments.seed, arguments.calls, arguments.longest)
    if arguments.first is not None:
        work(calls, arguments)
    print(f"seed {arguments.seed}", flush=True)
    kernels = 0
    if arguments.impl != "reference":
        kernels = compile_calls(calls, arguments.processes)
        print(f"{kernels} kernels", flush=True)
    if arguments.only_compile:
        return 0
    began, workers = time.perf_counter(), range(arguments.workers)
    found: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(arguments.workers) as pool:
        for some in pool.map(partial(supervise, arguments, ends), workers):
            found |= some
    seconds = time.perf_counter() - began
    report = describe_machine() | {"seed": arguments.seed, "impl": arguments.impl}
    report |= {"kernels": kernels, "seconds": seconds, **summarised(calls, found)}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report)[:2000], flush=True)
    return bool(report["wrong"]) or not report["calls"]


def summarised(calls: list[GuardedCall], found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Which calls were wrong, how many there were of which kind; late ones were not made."""
    made = {number: entry for number, entry in sorted(found.items()) if "late" not in entry}
    those = [calls[number] for number in made]
    strides, works = Counter(x.strides for x in those), Counter(x.work for x in those)
    return {
        "calls": len(made),
        "wrong": [
            {"number": number, "call": str(calls[number]), "error": entry["error"]}
            for number, entry in made.items()
            if "error" in entry
        ],
        "worst_share": max((x["share"] for x in made.values() if "share" in x), default=None),
        "with_empty_sequences": sum(any(0 in pair for pair in one.call.lengths) for one in those),
        "strides": {name: strides[name] for name in STRIDES},
        "works": {name: works[name] for name in WORKS},
        "types": dict(Counter(one.call.dtype for one in those)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
