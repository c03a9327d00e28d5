"""Calls that do not fill the GPU: in how many parts should their keys be divided?

    python3 -m lab.hardware.warpgroup_forward.splits OUT.json --seconds 100

One query per sequence, as when a model generates, and short prompts. Each call is checked against
float32 attention; then back ends and numbers of parts take turns in CUDA graphs of some calls.
Bandwidth is that of K and V, each of whose elements is needed once.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fa4.commands.bench_random import compile_all
from fa4.commands.bench_timing import Pass, find_backend, make_tensors, time_calls
from fa4.config import Problem
from lab.hardware.graphs import graph_timer

NAMES = ("fa4", "flash-attn-4", "cudnn", "flash", "flash-attn-3")
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 33)
ROUNDS = 5


class Shape(NamedTuple):
    """batch x queries x keys, heads."""

    batch: int
    queries: int
    keys: int
    heads_q: int
    heads_k: int
    head_dim: int = 128
    causal: bool = False


CALLS = (
    Shape(1, 1, 131072, 64, 8), Shape(8, 1, 16384, 64, 8), Shape(32, 1, 4096, 64, 8),
    Shape(32, 1, 4096, 128, 1), Shape(1, 1, 4096, 32, 8), Shape(4, 1, 5000, 40, 8),
    Shape(1, 1500, 1500, 4, 4), Shape(1, 1500, 1500, 8, 8, causal=True), Shape(2, 300, 3000, 6, 2),
    Shape(16, 1, 1000, 12, 2, 64), Shape(1, 3000, 3000, 5, 5, 256), Shape(1, 24000, 24000, 1, 1),
    Shape(3, 800, 800, 10, 5, 96, causal=True), Shape(1, 100, 20000, 16, 2, 192),
)  # fmt: skip


def make_problem(shape: Shape) -> Problem:
    """As the bench command times it."""
    return Problem(
        batch=shape.batch, seqlen_q=shape.queries, seqlen_k=shape.keys, heads_q=shape.heads_q,
        heads_k=shape.heads_k, head_dim=shape.head_dim, causal=shape.causal,
    )  # fmt: skip


def error_of(problem: Problem) -> float:
    """The largest difference from attention in float32, relative to the largest element."""
    import torch

    q, k, v = make_tensors(problem, "cuda")
    out = find_backend("fa4", problem, impl="sm90")(q, k, v)
    group = problem.heads_q // problem.heads_k
    worst = 0.0
    for b in range(problem.batch):
        queries, keys, values = (x[b].transpose(0, 1).float() for x in (q, k, v))
        for head in range(problem.heads_q):
            s = queries[head] @ keys[head // group].T * problem.head_dim**-0.5
            if problem.causal:
                s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
            exact = torch.softmax(s, -1) @ values[head // group]
            difference = (out[b, :, head] - exact).abs().max() / exact.abs().max()
            worst = max(worst, difference.item())
    return worst


def times_by_parts(problem: Problem) -> dict[str, float]:
    """Microseconds by number of parts; "0" is the kernel's choice."""
    import fa4

    tensors, timers = make_tensors(problem, "cuda"), {}
    for parts in (0, *PARTS):
        call = partial(fa4.flash_attn_func, *tensors, causal=problem.causal, num_splits=parts,
                       impl="sm90")  # fmt: skip
        timers[parts] = graph_timer(call)
    found: dict[int, list[float]] = {parts: [] for parts in timers}
    for _ in range(ROUNDS):
        for parts, timer in timers.items():
            found[parts].append(timer() * 1e6)
    return {str(parts): round(sorted(us)[ROUNDS // 2], 1) for parts, us in found.items()}


def main() -> None:
    """A line per call, and all of them in a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    from fa4.call.choose import find_gpu
    from fa4.commands.bench import device_name

    begun, found, rows = time.monotonic(), find_gpu("sm90"), []
    problems = [make_problem(shape) for shape in CALLS]
    compile_all(problems, NAMES[:2], found, given.seconds / 2)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for shape, problem in zip(CALLS, problems, strict=True):
        if time.monotonic() - begun > given.seconds:
            print("no time left")
            break
        try:
            row: dict[str, Any] = {"problem": problem.__dict__, "error": error_of(problem)}
        except Exception as error:
            print(tuple(shape), f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        measured = time_calls(found, ROUNDS, Pass(timing="graph"), NAMES, problem)
        num_bytes = 4 * shape.batch * shape.keys * shape.heads_k * shape.head_dim
        row |= {
            "microseconds": {n: round(s * 1e6, 1) for n, s in measured.seconds.items()},
            "tb_per_s": {n: num_bytes / s / 1e12 for n, s in measured.seconds.items()},
            "missing": measured.missing, "state": measured.state,
            "by_parts": times_by_parts(problem),
        }  # fmt: skip
        rows.append(row)
        report = {"device": device_name(found.device), "calls": rows}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(tuple(shape), f"error {row['error']:.1e}", row["microseconds"], "by parts:",
              row["by_parts"], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
