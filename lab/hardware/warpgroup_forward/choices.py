"""Slow calls of a record: would another tile, packing or number of parts have been faster?

    python3 -m lab.hardware.warpgroup_forward.choices RECORD.json OUT.jsonl --seconds 150

Of each call that a peer was faster in, today's choice and those that cost little more take turns in
CUDA graphs. Where one of them is as fast as the peer, the choice is at fault, else the kernel. A
line of results per call, as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from fa4.commands.bench_random import best_ratio
from fa4.commands.bench_timing import (
    BURST_SECONDS,
    find_backend,
    graph_of,
    make_tensors,
    time_burst,
    time_graph,
)
from fa4.compiled.support import NARROW, ForwardCall
from fa4.compiled.variants import warpgroup_problem
from fa4.config import Problem, WarpgroupPipeline
from fa4.hardware import H200, Gpu
from fa4.plan.warpgroup_tuned import choices

ROUNDS = 5
SLOWER_THAN = 1.0  # times the fastest peer
SHOWN = ("packed", "consumers", "tile_n", "kv_stages", "num_splits", "scheduler", "direct")


def slow_calls(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, Problem]]:
    """(times as fast as the best peer, call), the slowest first."""
    found = []
    for row in rows:
        ratio = best_ratio(row)
        if ratio is not None and ratio < SLOWER_THAN:
            sizes = {**row["problem"], "window_size": tuple(row["problem"]["window_size"])}
            found.append((ratio, Problem(**sizes)))
    return sorted(found, key=lambda one: one[0])


def neighbours(problem: Problem, count: int, gpu: Gpu = H200) -> list[WarpgroupPipeline]:
    """Today's choice and the next ones by cost, each of them another kernel."""
    p = problem
    call = ForwardCall(
        dtype=p.dtype, head_dim=p.head_dim, head_dim_v=p.head_dim_v, heads_q=p.heads_q,
        heads_k=p.heads_k, batch=p.batch, rows_q=p.seqlen_q, rows_k=p.seqlen_k,
        window=p.window_size, num_splits=1 if p.dtype in NARROW else 0,
    )  # fmt: skip
    found = sorted(choices(warpgroup_problem(call), gpu), key=lambda one: one.cost)
    return list(dict.fromkeys(one.pipeline() for one in found))[:count]


@contextmanager
def chosen(pipeline: WarpgroupPipeline) -> Iterator[None]:
    """Calls get this pipeline, whatever they are; none is remembered."""
    with (
        mock.patch("fa4.compiled.variants.tuned_warpgroups", lambda problem, gpu: pipeline),
        mock.patch("fa4.backends.kernel.remembered", lambda call, key, find, *x: find(call, *x)),
    ):
        yield


def graph_of_choice(
    problem: Problem, tensors: tuple[Any, ...], pipeline: WarpgroupPipeline
) -> tuple[Any, int]:
    """A graph of some calls with this pipeline, and how many these are."""
    with chosen(pipeline):
        call = partial(find_backend("fa4", problem, impl="sm90"), *tensors)
        call()
        calls = max(1, min(100, round(BURST_SECONDS / time_burst(call, 2))))
        return graph_of(call, calls), calls


def compile_choice(problem: Problem, pipeline: WarpgroupPipeline) -> str:
    """One call, so that its kernel is in the cache; what went wrong, or ""."""
    try:
        with chosen(pipeline):
            find_backend("fa4", problem, impl="sm90")(*make_tensors(problem, "cuda"))
    except Exception as error:
        return str(error)[:200] or type(error).__name__
    return ""


def times(problem: Problem, found: Sequence[WarpgroupPipeline]) -> list[float]:
    """Median TFLOP/s of each pipeline, in turns."""
    tensors = make_tensors(problem, "cuda")
    graphs = [graph_of_choice(problem, tensors, pipeline) for pipeline in found]
    seconds: list[list[float]] = [[] for _ in found]
    for _ in range(ROUNDS):
        for own, (graph, calls) in zip(seconds, graphs, strict=True):
            own.append(time_graph(graph.replay) / calls)
    return [round(problem.forward_flops / sorted(own)[ROUNDS // 2] / 1e12, 1) for own in seconds]


def main() -> None:
    """Compile in parallel, for half of the time at most; then time call after call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--count", type=int, default=5)
    given = parser.parse_args()
    begun, slow = time.monotonic(), slow_calls(json.loads(given.record.read_text())["rows"])
    pairs = [(p, one) for _, p in slow for one in neighbours(p, given.count)]
    failed: dict[tuple[Problem, WarpgroupPipeline], str] = {}
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        waiting = {pair: pool.apply_async(compile_choice, pair) for pair in pairs}
        for pair, result in waiting.items():
            result.wait(max(0.0, begun + given.seconds / 2 - time.monotonic()))
            failed[pair] = result.get() if result.ready() else "not compiled in time"
        pool.terminate()
    for ratio, problem in slow:
        if time.monotonic() - begun > given.seconds:
            break
        able = [one for one in neighbours(problem, given.count) if not failed[problem, one]]
        rows = [{name: getattr(one, name) for name in SHOWN} for one in able]
        for row, rate in zip(rows, times(problem, able), strict=True):
            row["tflops"] = rate
        line = {"problem": str(problem), "ratio": round(ratio, 3), "choices": rows}
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
