"""Every tile of the Hopper forward kernel that fits, for head dims 32 to 256: which are fastest?

    python3 -m lab.hardware.warpgroup_forward.tiles RESULTS.jsonl --seconds 200     # GPU
    python -m lab.hardware.warpgroup_forward.tiles table RESULTS.jsonl CSV --commit COMMIT

With --short, the tiles that `fa4.plan.warpgroup_rates` has, with turns too, at short lengths.
Kernels are compiled in parallel first; each is checked on small calls, then timed at three lengths
in bursts that take turns with the other tiles of its head dims. A line of results per kernel, as
soon as it is there; a kernel that hangs ends the program.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fa4.config import WarpgroupPipeline
from fa4.hardware import H200
from fa4.plan.warpgroup import begins_ahead, output_over_queries, warpgroup_plan
from fa4.plan.warpgroup_rates import RATES
from lab.hardware.warpgroup_forward.measure import (
    Inputs,
    Meter,
    Watchdog,
    burst_ms,
    check,
    compiled,
    frame_bytes,
    make_spec,
)

DIMS = ((160, 160), (80, 80), (256, 256), (112, 112), (192, 192), (224, 224), (144, 144), (96, 96),
        (192, 128), (128, 128), (208, 208), (176, 176), (240, 240), (64, 64), (48, 48),
        (32, 32))  # fmt: skip
LENGTHS = ((1500, 8, 16), (6000, 2, 16), (24000, 1, 8))  # tokens, batch, heads
SHORT_LENGTHS = ((300, 40, 16), (512, 24, 16), (1024, 12, 16), (2500, 5, 16))
MOST_STAGES = 4
FEWEST_KEYS = {1: 80, 2: 48, 3: 48}  # of a KV tile, by warpgroups
MOST_KEYS = 192
ROUNDS, BURST_MS, PAUSE_S = 3, 1.0, 0.006
COLUMNS = (
    "head_dim", "head_dim_v", "causal", "consumers", "tile_n", "kv_stages", "ping_pong", "ahead",
    "scheduler", "frame_bytes", "seqlen", "batch", "heads", "microseconds", "tflops", "clock_mhz",
    "power_w",
)  # fmt: skip


class Class(NamedTuple):
    """Head dims and mask: the tiles of a class compete."""

    head_dim: int
    head_dim_v: int
    causal: bool


def classes() -> Iterator[Class]:
    """In the order of their turn: what is least known first."""
    for (d, dv), causal in product(DIMS, (False, True)):
        yield Class(d, dv, causal)


def known_variants(one: Class) -> Iterator[dict[str, Any]]:
    """Those of the table, and with turns where these may pay."""
    for consumers, tile_n, stages, _, _, turns, ahead in RATES.get(tuple(one), ()):
        base = {**one._asdict(), "consumers": consumers, "tile_n": tile_n, "ping_pong": turns,
                "kv_stages": stages, "scheduler": "lpt" if one.causal else "static"}  # fmt: skip
        if ahead:
            base |= {"ahead": True, "scheduler": "snake" if one.causal else "static"}
        yield base
        if ahead and one.head_dim <= 128:
            yield {**base, "ping_pong": True}


def most_stages(one: Class, consumers: int, tile_n: int) -> int:
    """Stages of K and V that fit without a spilled register, beside Q and O if two do; 0 for none.

    Where O lies over Q, a work tile waits for the store of the one before.
    """
    fitting = {}
    for stages in range(MOST_STAGES, 1, -1):
        pipeline = WarpgroupPipeline(
            head_dim=one.head_dim, head_dim_v=one.head_dim_v, causal=one.causal, tile_n=tile_n,
            consumers=consumers, kv_stages=stages, ping_pong=False,
        )  # fmt: skip
        try:
            plan = warpgroup_plan(pipeline, H200)
        except ValueError:
            continue
        if not any(role.spilled_registers for role in plan.roles):
            fitting.setdefault(output_over_queries(pipeline, H200), stages)
    return fitting.get(False, fitting.get(True, 0))


def variants(one: Class) -> Iterator[dict[str, Any]]:
    """Fields of specs: all tiles; the next work tile begun ahead or not, turns where they pay."""
    for consumers in (3, 2, 1):
        sizes = [
            n for n in range(FEWEST_KEYS[consumers], 193, 16) if most_stages(one, consumers, n)
        ]
        sizes = sizes[-5:] if consumers > 1 else [n for n in sizes if n <= 128][-2:]
        for tile_n in sizes or ([32] if most_stages(one, consumers, 32) else []):
            base = {**one._asdict(), "consumers": consumers, "tile_n": tile_n, "ping_pong": False,
                    "kv_stages": most_stages(one, consumers, tile_n),
                    "scheduler": "lpt" if one.causal else "static"}  # fmt: skip
            yield base
            begins = {**base, "ahead": True, "scheduler": "snake" if one.causal else "static"}
            spec = make_spec(begins)
            if begins_ahead(spec.pipeline, H200) and consumers > 1:
                yield begins
            if consumers > 1 and one.head_dim <= 128 and tile_n >= sizes[-2]:
                yield {**base, "ping_pong": True}


def flops(one: Class, length: int, batch: int, heads: int) -> float:
    """Of both products; of the visible half where causal."""
    pairs = length**2 / (2 if one.causal else 1)
    return 2.0 * batch * heads * pairs * (one.head_dim + one.head_dim_v)


def measure_class(
    one: Class,
    kernels: list[tuple[dict[str, Any], Any]],
    lengths: tuple[tuple[int, int, int], ...],
    watchdog: Watchdog,
    meter: Meter,
) -> Iterator[dict[str, Any]]:
    """Rows of the kernels that are right."""
    good = []
    for fields, kernel in kernels:
        watchdog.alive(f"check {fields}")
        try:
            found = check(kernel)
        except Exception as error:
            yield {**fields, "error": f"{type(error).__name__}: {error}"[:200]}
            continue
        if found["ok"]:
            good.append((fields, kernel))
        else:
            yield {**fields, "error": f"wrong: {found}"}
    for length, batch, heads in lengths if good else ():
        given = Inputs(good[0][1].spec, batch, length, length, heads)
        times: list[list[float]] = [[] for _ in good]
        state: list[tuple[int, float]] = []
        for turn in range(ROUNDS):
            for number, (fields, kernel) in enumerate(good):
                watchdog.alive(f"time {length} {fields}")
                calls = 1
                if turn:
                    calls = max(1, min(20, round(BURST_MS / times[number][0])))
                    time.sleep(PAUSE_S)
                times[number].append(burst_ms(lambda k=kernel, x=given: x.launch(k), calls))
            state.append(meter.read())
        for (fields, kernel), ms in zip(good, times, strict=True):
            best = statistics.median(ms[1:]) if len(ms) > 1 else ms[0]
            yield {
                **fields, "frame_bytes": frame_bytes(kernel), "seqlen": length, "batch": batch,
                "heads": heads, "microseconds": round(best * 1e3, 1),
                "tflops": round(flops(one, length, batch, heads) / best / 1e9, 1),
                "clock_mhz": state[-1][0], "power_w": round(state[-1][1]),
            }  # fmt: skip


def run(results: Path, seconds: float, processes: int, short: bool) -> None:
    """Compile all, then measure class after class until the time is over."""
    variants_of = known_variants if short else variants
    lengths = SHORT_LENGTHS if short else LENGTHS
    from fa4.compiled.artifact import from_bytes

    begun = time.monotonic()
    items = [(str(n), fields) for n, (_, fields) in enumerate(
        (one, fields) for one in classes() for fields in variants_of(one))]  # fmt: skip
    print(f"{len(items)} kernels", flush=True)
    by_name = dict(items)
    watchdog: Watchdog | None = None
    with results.open("a") as file, multiprocessing.get_context("spawn").Pool(processes) as pool:
        made = pool.imap(compiled, items)  # in order: the first classes are timed meanwhile
        meter = Meter()
        for one in classes():
            kernels = []
            for _ in variants_of(one):
                name, data, why = next(made)
                if data:
                    kernels.append((by_name[name], from_bytes(data, make_spec(by_name[name]))))
                else:
                    file.write(json.dumps({**by_name[name], "error": why[:200]}) + "\n")
            watchdog = watchdog or Watchdog()
            watchdog.alive(f"{one}")
            rows = list(measure_class(one, kernels, lengths, watchdog, meter))
            for row in rows:
                file.write(json.dumps(row) + "\n")
            file.flush()
            long = [row for row in rows if row.get("seqlen") == lengths[-1][0]]
            best = sorted(long, key=lambda row: -row["tflops"])[:4]
            told = [f"{x['consumers']}x{x['tile_n']}{'a' * x.get('ahead', False)} {x['tflops']:.0f}"
                    for x in best]  # fmt: skip
            wrong = sum("error" in row for row in rows)
            took = time.monotonic() - begun
            print(f"{took:.0f} s {tuple(one)}: {', '.join(told)}; {wrong} wrong", flush=True)
            if took > seconds:
                print("no time left", flush=True)
                break
        pool.terminate()


def table(results: Path, target: Path) -> None:
    """The rows that were timed, as CSV."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            if "tflops" in row:
                row = {"ahead": False, **row}
                writer.writerow({name: int(x) if isinstance(x := row[name], bool) else x
                                 for name in COLUMNS})  # fmt: skip


def main() -> None:
    """Measures, or writes the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path, help="write this CSV instead of measuring")
    given = parser.parse_args()
    if given.table:
        table(given.results, given.table)
    else:
        run(given.results, given.seconds, given.processes, given.short)


if __name__ == "__main__":
    main()
