"""Slow calls of a record: would another tile, packing or number of parts have been faster?

    python3 -m lab.hardware.warpgroup_forward.choices OUT.jsonl --record RECORD.json --seconds 150

Of each call that a peer was faster in, and of calls drawn anew, today's choice, others that cost
little more and the peers take turns in CUDA graphs. Where another choice is as fast as the peer,
the choice is at fault, else the kernel. A line of results per call, as soon as it is there, while
the kernels of the next calls are being compiled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from fa4.call.choose import find_gpu
from fa4.commands.bench_random import best_ratio, call_once, kernel_of, random_problems
from fa4.commands.bench_timing import find_backend, make_tensors, selected
from fa4.compiled.build import build
from fa4.compiled.support import NARROW, ForwardCall
from fa4.compiled.variants import choose_sm90_spec, warpgroup_problem
from fa4.config import Problem, WarpgroupPipeline
from fa4.hardware import H200, Gpu
from fa4.plan.warpgroup_tuned import TileChoice, choices
from lab.hardware.graphs import graph_timer

ROUNDS = 5
SLOWER_THAN = 1.0  # times the fastest peer
WITHIN = 1.15  # of today's cost are the alternatives
COMPILED_PEER = "flash-attn-4"
PEERS = ("flash-attn-3", "cudnn", COMPILED_PEER)
COMPILING_SHARE = 0.3  # of the time, for the peer that is compiled
SHOWN = ("packed", "consumers", "tile_n", "kv_stages", "num_splits", "scheduler", "direct", "ahead",
         "widths", "ping_pong")  # fmt: skip


def slow_calls(
    rows: Sequence[Mapping[str, Any]], below: float = SLOWER_THAN
) -> list[tuple[float, Problem]]:
    """(times as fast as the best peer, call), the slowest first."""
    found = []
    for row in rows:
        ratio = best_ratio(row)
        if ratio is not None and ratio < below:
            sizes = {**row["problem"], "window_size": tuple(row["problem"]["window_size"])}
            found.append((ratio, Problem(**sizes)))
    return sorted(found, key=lambda one: one[0])


def call_of(problem: Problem) -> ForwardCall:
    """As `fa4 bench` makes it."""
    p = problem
    return ForwardCall(
        dtype=p.dtype, head_dim=p.head_dim, head_dim_v=p.head_dim_v, heads_q=p.heads_q,
        heads_k=p.heads_k, batch=p.batch, rows_q=p.seqlen_q, rows_k=p.seqlen_k,
        window=p.window_size, lse=False, num_splits=1 if p.dtype in NARROW else 0,
    )  # fmt: skip


def costs(problem: Problem, gpu: Gpu = H200) -> list[TileChoice]:
    """All choices, by cost."""
    return sorted(choices(warpgroup_problem(call_of(problem)), gpu), key=lambda one: one.cost)


def alternatives(problem: Problem, count: int, gpu: Gpu = H200) -> list[WarpgroupPipeline]:
    """Today's choice; the best of each number of heads packed, of each tile and of each number of
    parts, in turn, that cost little more; each of them another kernel."""
    found = costs(problem, gpu)
    near = [one for one in found if one.cost <= WITHIN * found[0].cost]
    firsts: list[dict[Any, TileChoice]] = [{}, {}, {}]
    for one in near:
        keys = one.problem.packed, one.tile, one.splits
        for kind, key in zip(firsts, keys, strict=True):
            kind.setdefault(key, one)
    ordered = [found[0]]
    for number in range(len(near)):
        ordered += [one for kind in firsts for one in islice(kind.values(), number, number + 1)]
    return list(dict.fromkeys(one.pipeline() for one in (*ordered, *near)))[:count]


@contextmanager
def chosen(pipeline: WarpgroupPipeline) -> Iterator[None]:
    """Calls of one form get this pipeline, whatever they are; what is found is forgotten later."""
    memo: dict[Any, Any] = {}

    def remembered(call: Any, key: Any, find: Callable[..., Any], *arguments: Any) -> Any:
        if key not in memo:
            memo[key] = find(call, *arguments)
        return memo[key]

    with (
        mock.patch("fa4.compiled.variants.tuned_warpgroups", lambda problem, gpu: pipeline),
        mock.patch("fa4.backends.kernel.remembered", remembered),
    ):
        yield


def compile_choice(problem: Problem, pipeline: WarpgroupPipeline) -> str:
    """Its kernel is in the cache then, and the GPU was left alone; what went wrong, or ""."""
    try:
        with chosen(pipeline):
            build(choose_sm90_spec(call_of(problem)), H200.arch)
    except Exception as error:
        return str(error)[:200] or type(error).__name__
    return ""


def prepared(
    problem: Problem, tensors: tuple[Any, ...], one: WarpgroupPipeline | str
) -> Callable[[], float] | str:
    """What times a pipeline or a peer, or why there is nothing."""
    try:
        if isinstance(one, str):
            with selected(one):
                return graph_timer(partial(find_backend(one, problem), *tensors))
        with chosen(one):
            return graph_timer(partial(find_backend("fa4", problem, impl="sm90"), *tensors))
    except Exception as error:
        return " ".join(str(error).split())[:200] or type(error).__name__


def times(
    problem: Problem, found: Mapping[str, WarpgroupPipeline | str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds by name, in turns; why others have none."""
    import torch

    tensors = make_tensors(problem, "cuda")
    made = {name: prepared(problem, tensors, one) for name, one in found.items()}
    missing = {name: why for name, why in made.items() if isinstance(why, str)}
    timers = {name: timer for name, timer in made.items() if not isinstance(timer, str)}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            seconds[name].append(timer())
    torch.cuda.empty_cache()
    medians = {name: round(sorted(own)[ROUNDS // 2] * 1e6, 2) for name, own in seconds.items()}
    return medians, missing


def result_of(
    problem: Problem, found: Sequence[WarpgroupPipeline], peers: Sequence[str]
) -> dict[str, Any]:
    """What is written of a call."""
    named = {str(number): one for number, one in enumerate(found)}
    microseconds, missing = times(problem, {**named, **{peer: peer for peer in peers}})
    rows = [
        {name: getattr(one, name) for name in SHOWN} | {"us": microseconds.get(number)}
        for number, one in named.items()
    ]
    others = {name: us for name, us in microseconds.items() if name not in named}
    return {"problem": problem.__dict__, "choices": rows, "peers": others, "missing": missing}


class Work(NamedTuple):
    """A call, the pipelines that it is timed with, and the peers beside them."""

    problem: Problem
    pipelines: Sequence[WarpgroupPipeline]
    peers: Sequence[str] = PEERS
    label: str = ""


def measure(work: Sequence[Work], out: Path, seconds: float) -> None:
    """Times call after call, as soon as its kernels are compiled."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    begun, found = time.monotonic(), find_gpu("sm90")
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        # Other compilers need the GPU: nothing is timed meanwhile.
        needed = {kernel_of(one.problem, COMPILED_PEER): one.problem
                  for one in work if COMPILED_PEER in one.peers}  # fmt: skip
        others = [pool.apply_async(call_once, (problem, COMPILED_PEER, found))
                  for problem in needed.values()]  # fmt: skip
        made = [[pool.apply_async(compile_choice, (one.problem, pipeline))
                 for pipeline in one.pipelines] for one in work]  # fmt: skip
        for result in others:
            result.wait(max(0.0, begun + COMPILING_SHARE * seconds - time.monotonic()))
        print(f"peers compiled in {time.monotonic() - begun:.0f} s", flush=True)
        for one, results in zip(work, made, strict=True):
            able = []
            for pipeline, result in zip(one.pipelines, results, strict=True):
                result.wait(max(0.0, begun + seconds - 2 - time.monotonic()))
                if result.ready() and not result.get():
                    able.append(pipeline)
            if time.monotonic() - begun > seconds:
                print("no time left", flush=True)
                break
            line = {"label": one.label, **result_of(one.problem, able, one.peers)}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{time.monotonic() - begun:.0f} s {one.label}", said_of(line), flush=True)
        pool.terminate()


def said_of(line: Mapping[str, Any]) -> str:
    """A result in a line."""
    p = line["problem"]
    own = ["{packed}/{consumers}x{tile_n}x{kv_stages}/{num_splits}{scheduler[0]} {us}".format(**one)
           for one in line["choices"]]  # fmt: skip
    others = [f"{name} {us}" for name, us in line["peers"].items()]
    sizes = (p["batch"], p["seqlen_q"], p["seqlen_k"], p["heads_q"], p["heads_k"], p["head_dim"],
             p["head_dim_v"], *p["window_size"])  # fmt: skip
    return f"{sizes}: {', '.join(own)}; {', '.join(others)}"


def problems_of(given: argparse.Namespace) -> Iterable[Problem]:
    """The record's slow calls, then those drawn."""
    rows = json.loads(given.record.read_text())["rows"] if given.record else []
    yield from (problem for _, problem in slow_calls(rows, given.below))
    yield from islice(random_problems(given.seed), given.random)


def main() -> None:
    """Times call after call until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--record", type=Path, help="whose slow calls are timed")
    parser.add_argument("--below", type=float, default=SLOWER_THAN, help="what is slow")
    parser.add_argument("--random", type=int, default=0, help="calls drawn anew")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--count", type=int, default=5)
    given = parser.parse_args()
    work = [Work(problem, alternatives(problem, given.count)) for problem in problems_of(given)]
    measure(work, given.out, given.seconds)


if __name__ == "__main__":
    main()
