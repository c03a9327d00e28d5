"""Tiled NumPy forward against torch's CPU attention, and its memory.

Float32, B1 H8 S2048 D128, causal and not, on 1 thread and on all cores; both sides in one run.
Usage: python -m lab.benchmarks.reference [--output FILE]
"""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import fa4
from fa4.reference import exp2
from lab.benchmarks.common import parse_output, time_against, write_record

SHAPE = (1, 2048, 8, 128)  # (B, S, H, D)


def compare_forward(causal: bool, threads: int) -> dict[str, Any]:
    """One row: our time, torch's time, ratio."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, *SHAPE), dtype=np.float32)
    tensors = [torch.from_numpy(x).transpose(1, 2).contiguous() for x in (q, k, v)]
    torch.set_num_threads(threads)
    with threadpool_limits(threads), torch.inference_mode():
        times = time_against(
            lambda: fa4.flash_attn_func(q, k, v, causal=causal),
            lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal),
        )
    return {"causal": causal, "threads": threads, **times}


def measure_memory(seqlen: int) -> dict[str, int]:
    """Peak bytes allocated by a forward call, and the size of one full score matrix."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, seqlen, 1, 64), dtype=np.float32)
    tracemalloc.start()
    fa4.flash_attn_func(q, k, v)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"seqlen": seqlen, "peak_bytes": peak, "score_matrix_bytes": 4 * seqlen**2}


def measure_exp2() -> dict[str, float]:
    """The software exp2 in NumPy against NumPy's own exp2, per element of a large array."""
    x = -np.random.default_rng(0).random(1 << 22, dtype=np.float32) * 60
    times = time_against(lambda: exp2.exp2_polynomial(x), lambda: np.exp2(x))
    return {"elements": x.size, **times}


def main() -> None:
    """Run everything, print the table, write the result file."""
    options = parse_output(__doc__ or "", "reference")
    rows = [
        compare_forward(causal, threads)
        for threads in sorted({1, os.cpu_count() or 1})
        for causal in (False, True)
    ]
    memory = [measure_memory(seqlen) for seqlen in (1024, 2048, 4096, 8192)]
    for row in rows:
        print(
            f"threads {row['threads']}  causal {row['causal']!s:5}  fa4 {row['seconds']:.3f} s  "
            f"torch {row['peer_seconds']:.3f} s  ratio {row['ratio']:.2f}"
        )
    for row in memory:
        print(
            f"seqlen {row['seqlen']:5}  peak {row['peak_bytes'] / 2**20:.2f} MiB  "
            f"score matrix {row['score_matrix_bytes'] / 2**20:.0f} MiB"
        )
    report = {
        "shape_bshd": SHAPE,
        "forward": rows,
        "memory": memory,
        "exp2_polynomial": measure_exp2(),
    }
    write_record(options.output, report, ("numpy", "torch"))


if __name__ == "__main__":
    main()
