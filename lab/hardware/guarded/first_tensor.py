"""Calls of fresh processes whose first tensor begins a segment: is what lies before it touched?

    python3 -m lab.hardware.guarded.first_tensor OUT.json [--drawn 36] [--seed N]       # GPU

torch's allocator, as it is: the tensor that is made first begins a segment of 2 MiB, and nothing is
mapped in front of it; the others lie behind it. The three calls that once ended in an illegal
memory access, with Q, K and V first, by both passes; then drawn packed calls with empty sequences.
Every call has a process of its own. Exit code 1 if one did not end, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fa4.compiled.support import ForwardCall
from lab.hardware.guarded.drawing import FORWARD, GRADIENTS, GuardedCall, draw_calls
from lab.hardware.guarded.random_calls import compile_calls
from lab.hardware.there import describe_machine
from lab.hardware.warpgroup_backward.random_gradients import run as differentiate
from lab.hardware.warpgroup_forward.random_launches import Drawn, element_type
from lab.hardware.warpgroup_forward.random_launches import run as launch

SEGMENT_BYTES = 2 << 20
LIMIT_S = 120.0
CRASHED = (((64, 1), (1, 0)), ((64, 0), (1, 1)), ((5, 300), (70, 0)))
LONGEST = 300  # rows or keys of a drawn sequence


class FirstTensor(NamedTuple):
    """A call, and which of its tensors is made first: q, k or v."""

    first: str
    one: GuardedCall


def all_calls(drawn: int, seed: int) -> list[FirstTensor]:
    """Those that crashed, with every tensor first and by both passes; then drawn ones."""
    plain = Drawn((128, 128), (4, 2), (None, None), (), True, False, False, 0.0, "bf16")
    found = [
        FirstTensor(first, GuardedCall(plain._replace(lengths=lengths), "contiguous", work))
        for lengths in CRASHED for first in "qkv" for work in (FORWARD, GRADIENTS)
    ]  # fmt: skip
    others = (
        one for one in draw_calls(seed, 100 * drawn, LONGEST)
        if one.call.packed and one.kernels() and any(0 in pair for pair in one.call.lengths)
    )  # fmt: skip
    some = enumerate(islice(others, drawn))
    return found + [FirstTensor("qkv"[i % 3], one) for i, one in some]


def make_tensors(first: str, drawn: Drawn, call: ForwardCall, place: str) -> tuple[Any, Any, Any]:
    """Q, K and V, that one first. Raises AssertionError if it begins no segment of a GPU."""
    import torch

    shapes = {"q": (call.rows_q, call.heads_q, call.head_dim),
              "k": (call.rows_k, call.heads_k, call.head_dim),
              "v": (call.rows_k, call.heads_k, call.head_dim_v)}  # fmt: skip
    kind = element_type(drawn.dtype)
    made = {name: torch.empty(shapes[name], dtype=kind, device=place)
            for name in sorted(shapes, key=lambda name: name != first)}  # fmt: skip
    if place == "cuda":
        assert made[first].data_ptr() % SEGMENT_BYTES == 0, f"{first} begins no segment"
    return tuple(made[name].copy_(torch.randn(shapes[name], device=place)) for name in "qkv")


def make_call(call: FirstTensor, seed: int, impl: str) -> float:
    """The largest error as a share of its band. Raises AssertionError beyond it."""
    one, make = call.one, partial(make_tensors, call.first)
    if one.differentiates:
        return differentiate(one.call, one.work != GRADIENTS, seed, impl, make)
    return launch(one.call, seed, impl, make, parts=one.parts, descale=one.descale)


def call_apart(number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own said of a call: its share of the band, or its error."""
    command = [sys.executable, "-m", "lab.hardware.guarded.first_tensor", "-",
               "--number", str(number)]  # fmt: skip
    for name in ("drawn", "seed", "impl"):
        command += [f"--{name}", str(getattr(arguments, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"did not end in {LIMIT_S:g} s"}
    if done.returncode:
        told = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        return {"error": told[-1][:300]}
    return {"share": float(done.stdout.split()[-1])}


def main() -> int:
    """Compiles, calls, writes what was found; exit code 1 if a call did not end or was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--drawn", type=int, default=36)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--impl", default="sm90", choices=("sm90", "emulator_sm90", "reference"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--number", type=int, help="one call, made in this process")
    arguments = parser.parse_args()
    calls = all_calls(arguments.drawn, arguments.seed)
    if arguments.number is not None:
        print(make_call(calls[arguments.number], arguments.number, arguments.impl))
        return 0
    print(f"seed {arguments.seed}", flush=True)
    kernels = 0
    if arguments.impl != "reference":
        kernels = compile_calls([call.one for call in calls], arguments.processes)
    with ThreadPoolExecutor(arguments.processes) as pool:
        found = list(pool.map(partial(call_apart, arguments=arguments), range(len(calls))))
    rows = [
        {"first": call.first, "work": call.one.work, "call": str(call.one.call), **what}
        for call, what in zip(calls, found, strict=True)
    ]
    wrong = [row for row in rows if "error" in row]
    for row in wrong:
        print(f"WRONG {row}", flush=True)
    report = describe_machine() | {"seed": arguments.seed, "impl": arguments.impl}
    report |= {"kernels": kernels, "wrong": wrong, "calls": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(rows)} calls by {kernels} kernels, {len(wrong)} wrong", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
