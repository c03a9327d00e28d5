"""One query per sequence, as when a model generates: time and bandwidth beside others.

    PYTHONPATH=. python3 -m hardware.warpgroup_forward.one_query OUT.json

Each call is checked against float64 attention first; then back ends take turns in CUDA graphs of
some calls. Bandwidth is that of K and V, each of whose elements is needed once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fa4.commands.bench_timing import Pass, find_backend, make_tensors, time_calls
from fa4.config import Problem

# batch, keys, query heads, KV heads
CALLS = ((1, 131072, 64, 8), (8, 16384, 64, 8), (32, 4096, 64, 8), (32, 4096, 128, 1),
         (1, 4096, 32, 8), (4, 5000, 40, 8), (3, 7777, 30, 6), (16, 1000, 12, 2))  # fmt: skip
NAMES = ("fa4", "flash-attn-4", "cudnn", "flash")
HEAD_DIM = 128


def error_of(problem: Problem) -> float:
    """The largest difference from attention in float32, relative to the largest element."""
    import torch

    q, k, v = make_tensors(problem, "cuda")
    out = find_backend("fa4", problem, impl="sm90")(q, k, v)
    group = problem.heads_q // problem.heads_k
    worst = 0.0
    for b in range(problem.batch):
        queries, keys, values = (x[b].transpose(0, 1).float() for x in (q, k, v))
        s = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * problem.head_dim**-0.5
        exact = (torch.softmax(s, -1) @ values.repeat_interleave(group, 0)).transpose(0, 1)
        worst = max(worst, ((out[b] - exact).abs().max() / exact.abs().max()).item())
    return worst


def main() -> None:
    """A line per call, and all of them in a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    from fa4.choose import find_gpu

    found, rows = find_gpu("sm90"), []
    for batch, keys, heads_q, heads_k in CALLS:
        problem = Problem(batch=batch, seqlen_q=1, seqlen_k=keys, heads_q=heads_q, heads_k=heads_k,
                          head_dim=HEAD_DIM)  # fmt: skip
        row: dict[str, Any] = {"problem": problem.__dict__, "error": error_of(problem)}
        for timing in ("graph", "burst"):
            measured = time_calls(found, given.repeats, Pass(timing=timing), NAMES, problem)
            num_bytes = 2 * batch * keys * heads_k * HEAD_DIM * 2
            row[timing] = {
                "microseconds": {n: round(s * 1e6, 1) for n, s in measured.seconds.items()},
                "tb_per_s": {n: num_bytes / s / 1e12 for n, s in measured.seconds.items()},
                "missing": measured.missing, "state": measured.state,
            }  # fmt: skip
        rows.append(row)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
        told = {timing: row[timing]["microseconds"] for timing in ("graph", "burst")}
        print(batch, keys, heads_q, heads_k, f"error {row['error']:.1e}", told, flush=True)


if __name__ == "__main__":
    main()
