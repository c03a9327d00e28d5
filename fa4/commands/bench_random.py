"""`fa4 bench --random N --seed S`: calls that nobody chose, and how their times are distributed.

Head dims are multiples of 8 up to 256 and a few pairs, lengths 200 to 32k and no powers of two,
heads and their groups as models have them; masks, windows, keys of another length. What a call may
take is bounded, what it needs at least too. The first n of N calls are the same for every N.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from multiprocessing import get_context
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fa4.commands.bench_timing import (
    FA3_MODULE,
    FORWARD_PASS,
    OURS,
    Measured,
    Pass,
    call_of,
    find_backend,
    make_tensors,
    measure_one,
    selected,
)
from fa4.compiled.support import NARROW

if TYPE_CHECKING:
    from pathlib import Path

    from fa4.call.choose import FoundGpu
    from fa4.config import Problem

COMMON_DIMS = (64, 96, 128, 256)
PAIRS = ((192, 128), (192, 128), (128, 96), (96, 64))
LEAST_TOKENS, MOST_TOKENS = 200, 32 * 1024
KV_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
GROUPS = (1, 1, 1, 2, 3, 4, 5, 6, 8, 16)
MOST_HEADS, MOST_BATCH = 64, 32
LEAST_FLOPS, MOST_FLOPS, MOST_BYTES = 5e9, 5e12, 3 << 30
SLOWEST_SHOWN = 10
COMPILING_SHARE = 0.55  # of the time, at most
PATIENCE_S = 45.0  # of the processes that compile, without any news


def random_problems(
    seed: int, dtype: str = "bf16", dims: Sequence[tuple[int, int]] = ()
) -> Iterator[Problem]:
    """One problem after the other. dims: those to draw from; all where there are none."""
    rng = np.random.default_rng(seed)
    while True:
        problem = _draw(rng, dtype, dims)
        p = problem
        tokens = p.seqlen_q * p.heads_q * (p.head_dim + p.head_dim_v)
        tokens += p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v)
        small = 2 * p.batch * tokens <= MOST_BYTES
        if small and LEAST_FLOPS <= p.forward_flops <= MOST_FLOPS:
            yield problem


def _draw(rng: np.random.Generator, dtype: str, dims: Sequence[tuple[int, int]]) -> Problem:
    from fa4.config import Problem

    d, dv = dims[int(rng.integers(len(dims)))] if dims else _draw_dims(rng)
    if dtype in NARROW:
        d, dv = (-(-dim // 16) * 16 for dim in (d, dv))
    rows = _draw_length(rng, LEAST_TOKENS, MOST_TOKENS)
    keys = rows if rng.random() < 0.75 else _draw_length(rng, LEAST_TOKENS, MOST_TOKENS)
    kind = rng.random()
    left, right = None, None
    if kind > 0.35:  # a mask; where it is causal every row sees a key
        keys, right = max(rows, keys), 0
    if kind > 0.8:  # a window
        left = _draw_length(rng, 64, max(keys, 128))
        right = left if kind > 0.95 else 0
    while True:
        heads_k = int(KV_HEADS[rng.integers(len(KV_HEADS))])
        heads_q = heads_k * int(GROUPS[rng.integers(len(GROUPS))])
        if heads_q <= MOST_HEADS:
            break
    return Problem(
        batch=round(math.exp(rng.uniform(0, math.log(MOST_BATCH)))),
        seqlen_q=rows, seqlen_k=keys, heads_q=heads_q, heads_k=heads_k, head_dim=d, head_dim_v=dv,
        dtype=dtype, causal=(left, right) == (None, 0),
        window_size=(left, right),
    )  # fmt: skip


def _draw_dims(rng: np.random.Generator) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.65:
        dim = 8 * int(rng.integers(5, 33))
        return dim, dim
    if kind < 0.85:
        dim = int(COMMON_DIMS[rng.integers(len(COMMON_DIMS))])
        return dim, dim
    return PAIRS[rng.integers(len(PAIRS))]


def _draw_length(rng: np.random.Generator, least: int, most: int) -> int:
    """As many short ones as long ones, by ratio; no power of two."""
    length = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    return length + 1 if length & (length - 1) == 0 else length


def draw(
    count: int, seed: int, dtype: str = "bf16", dims: Sequence[tuple[int, int]] = ()
) -> list[Problem]:
    """The first so many random problems."""
    found = random_problems(seed, dtype, dims)
    return [next(found) for _ in range(count)]


def without_missing(names: Sequence[str], *, asked: bool) -> list[str]:
    """Without FlashAttention-3 where it is not installed and nobody asked for it."""
    from importlib.util import find_spec

    missing = [] if asked or find_spec(FA3_MODULE) else ["flash-attn-3"]
    return [name for name in names if name not in missing]


def compile_all(
    problems: Sequence[Problem],
    names: Sequence[str],
    gpu: FoundGpu,
    seconds: float,
    timed: Pass = FORWARD_PASS,
) -> Compiled:
    """Has several processes make every call once, so that all kernels are in their caches.

    Ends, whatever is left to do, when the time is over or nothing was heard for long: a kernel
    hangs, or has ended its process.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    compiled = [name for name in names if name in (OURS, "flash-attn-4")]
    first: dict[tuple[Any, ...], tuple[Problem, str]] = {}
    for problem, name in product(problems, compiled):
        first.setdefault(kernel_of(problem, name), (problem, name))
    failed: dict[tuple[Any, ...], str] = {}
    processes = max(1, min(16, os.cpu_count() or 1, len(first)))
    begun = heard = time.monotonic()
    with get_context("spawn").Pool(processes) as pool:
        waiting = [
            (key, pool.apply_async(call_once, (*one, gpu, timed))) for key, one in first.items()
        ]
        while waiting and time.monotonic() - begun < seconds:
            time.sleep(0.1)
            done = [item for item in waiting if item[1].ready()]
            waiting = [item for item in waiting if not item[1].ready()]
            heard = time.monotonic() if done else heard
            for key, result in done:
                if error := result.get():
                    failed[key] = error
            if time.monotonic() - heard > PATIENCE_S:
                break
        pool.terminate()
    return Compiled(failed, {key for key, _ in waiting})


def kernel_of(problem: Problem, name: str) -> tuple[Any, ...]:
    """Problems that have this in common need one kernel of flash-attn-4; ours depends on more."""
    p = problem
    sides = tuple(None if side is None else side == 0 for side in p.window_size)
    kind = (name, p.head_dim, p.head_dim_v, p.dtype, sides)
    if name != OURS:
        return (*kind, p.heads_q // p.heads_k)
    return (*kind, p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k)


def call_once(problem: Problem, name: str, gpu: FoundGpu, timed: Pass) -> str:
    """One call; what went wrong, or "". A process whose GPU context is lost ends itself."""
    import torch

    warnings.simplefilter("ignore")
    try:
        with torch.cuda.device(gpu.device), selected(name):
            function = find_backend(name, problem, timed, gpu.impl)
            call_of(function, make_tensors(problem, gpu.device), timed)()
            torch.cuda.synchronize()
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if "CUDA error" in said:
            os._exit(3)
        return said
    finally:
        torch.cuda.empty_cache()
    return ""


class Compiled(NamedTuple):
    """Kernels that failed, and why; those that nothing was heard of."""

    failed: dict[tuple[Any, ...], str]
    waiting: set[tuple[Any, ...]]


class Limits(NamedTuple):
    """Seconds after which no call is begun, and the file that each row is added to."""

    seconds: float
    rows: Path | None = None


def measure_random(
    problems: Sequence[Problem],
    names: Sequence[str],
    timer: Callable[[Sequence[str], Problem], Measured],
    update: Callable[[int, int, str], None],
    gpu: FoundGpu,
    limits: Limits,
    timed: Pass = FORWARD_PASS,
) -> list[dict[str, Any]]:
    """A row per problem, until the time is over; about half of it goes into compiling at most.

    What has a kernel to be compiled still comes last.
    """
    begun = time.monotonic()
    update(0, len(problems), "compiling")
    failed, waiting = compile_all(problems, names, gpu, limits.seconds * COMPILING_SHARE, timed)
    rows: list[dict[str, Any]] = []
    last = [any(kernel_of(p, name) in waiting for name in names) for p in problems]
    for number, (_, problem) in enumerate(sorted(zip(last, problems, strict=True), key=first_of)):
        if time.monotonic() - begun > limits.seconds:
            break
        update(number, len(problems), f"d {problem.head_dim}, {problem.seqlen_k} keys")
        refused = {name: why for name in names
                   if (why := failed.get(kernel_of(problem, name)))}  # fmt: skip
        left = [name for name in names if name not in refused]
        rows.append(row := measure_one(problem, left, timer, timed))
        row["missing"] |= refused
        if limits.rows is not None:
            with limits.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def first_of(pair: tuple[bool, Any]) -> bool:
    """What pairs are ordered by."""
    return pair[0]


def best_ratio(row: Mapping[str, Any]) -> float | None:
    """How many times as fast as the best of the others ours is; None if one of both is missing."""
    return min(row["ratio"].values(), default=None)


def features(problem: Mapping[str, Any]) -> Iterator[str]:
    """The names of the groups that a problem is counted in."""
    d, dv = problem["head_dim"], problem["head_dim_v"]
    left, right = problem["window_size"]
    widest = max(d, dv)
    bound = next(most for most in (64, 96, 128, 192, 256) if widest <= most)
    yield "all"
    yield "d, dv differ" if d != dv else f"head dim to {bound}"
    yield "no mask" if (left, right) == (None, None) else "causal" if left is None else "window"
    yield "grouped heads" if problem["heads_q"] > problem["heads_k"] else "heads not grouped"
    longest = max(problem["seqlen_q"], problem["seqlen_k"])
    yield f"keys to {next(name for most, name in LENGTH_NAMES if longest <= most)}"


LENGTH_NAMES = ((1024, "1k"), (4096, "4k"), (16384, "16k"), (1 << 31, "32k"))


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each group: calls, geometric mean against the best of the others, slower ones, worst."""
    found: dict[str, list[float]] = {}
    for row in rows:
        ratio = best_ratio(row)
        if ratio is not None:
            for name in features(row["problem"]):
                found.setdefault(name, []).append(ratio)
    order = sorted(found, key=lambda name: (name != "all", name.split()[0], len(name), name))
    return [
        {
            "group": name,
            "calls": len(found[name]),
            "mean": geometric_mean(found[name]),
            "slower": sum(ratio < 1 for ratio in found[name]),
            "worst": min(found[name]),
        }
        for name in order
    ]


def render_random(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The distribution, the slowest calls, and why something is missing."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows, drawn = report["rows"], report["random"]
    table = Table("calls of", "calls", "mean", "slower", "worst", box=SIMPLE_HEAD, pad_edge=False)
    for group in summarize(rows):
        table.add_row(group["group"], str(group["calls"]), f"{group['mean']:.3f}",
                      str(group["slower"]), f"{group['worst']:.2f}")  # fmt: skip
    known = [row for row in rows if best_ratio(row) is not None]
    slowest = sorted(known, key=lambda row: best_ratio(row) or 0.0)[:SLOWEST_SHOWN]
    gaps = dict.fromkeys((name, why) for row in rows for name, why in row["missing"].items())
    return (
        f"{report['device']}: {report['pass']}, {len(rows)} of {drawn['calls']} random calls, seed "
        f"{drawn['seed']}; times as fast as the fastest of the others",
        table,
        "the slowest:",
        *(describe(row) for row in slowest),
        *(f"{name}: {why}" for name, why in gaps),
    )


def describe(row: Mapping[str, Any]) -> str:
    """A call in a line."""
    p = row["problem"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
    mask = {(None, None): "full", (None, 0): "causal"}.get(tuple(p["window_size"]))
    return (
        f"  {best_ratio(row):.2f}: {p['batch']} x {p['seqlen_q']} x {p['seqlen_k']} keys, heads "
        f"{p['heads_q']} on {p['heads_k']}, d {p['head_dim']}, {p['head_dim_v']}, "
        f"{mask or 'window {} {}'.format(*p['window_size'])}, {p['dtype']}: {rates} TFLOP/s"
    )
