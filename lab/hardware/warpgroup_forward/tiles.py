"""Tiles of the Hopper forward kernel that fit, for head dims 40 to 256: which are fastest?

    python3 -m lab.hardware.warpgroup_forward.tiles RESULTS.jsonl --seconds 200     # GPU
    python -m lab.hardware.warpgroup_forward.tiles table RESULTS.jsonl CSV --commit COMMIT

Kernels are compiled in parallel first; each is checked on small calls, then timed in bursts that
take turns with the other tiles of its head dims: in calls of many waves of CTAs, and in calls that
give each SM one work tile, which have kernels of their own. A line of results per kernel, as soon
as it is there; a kernel that hangs ends the program.
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

from fa4.config import WARPGROUP_ROWS, WarpgroupPipeline
from fa4.hardware import H200
from fa4.plan.warpgroup import output_over_queries, warpgroup_plan
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

DIMS = ((136, 136), (128, 128), (72, 72), (152, 152), (256, 256), (168, 168), (64, 64), (200, 200),
        (192, 128), (232, 232), (40, 40), (184, 184), (192, 192), (216, 216), (248, 248), (88, 88),
        (104, 104), (224, 224), (120, 120), (96, 96), (56, 56), (144, 144), (160, 160), (176, 176),
        (208, 208), (240, 240), (80, 80), (112, 112), (128, 96), (96, 64), (48, 48),
        (32, 32))  # fmt: skip
TURNS_UP_TO = 128  # of a head dim: in 12 drawn calls of wider ones turns were no gain
MOST_STAGES = 4
FEWEST_KEYS = {1: 80, 2: 48, 3: 48}  # of a KV tile, by warpgroups
MOST_KEYS = {1: 128, 2: 192, 3: 192}
SMALLER = {1: 1.0, 2: 0.7, 3: 0.9}  # of the widest tile, that another one is at most
RUN_COLUMNS = (64, 32)  # of a row, that lie together in shared memory
ROUNDS, BURST_MS, PAUSE_S = 3, 1.0, 0.006
COLUMNS = (
    "head_dim", "head_dim_v", "columns", "direct", "causal", "consumers", "tile_n", "kv_stages",
    "ping_pong", "ahead", "scheduler", "frame_bytes", "rows", "keys", "batch", "heads",
    "microseconds", "tflops", "clock_mhz", "power_w",
)  # fmt: skip


class Timed(NamedTuple):
    """A call: rows and keys of a sequence, sequences, heads."""

    rows: int
    keys: int
    batch: int
    heads: int


MANY_WAVES = (Timed(333, 333, 37, 16), Timed(1111, 1111, 11, 16), Timed(4321, 4321, 3, 16),
              Timed(12001, 12001, 1, 16))  # fmt: skip
# Rows and keys of the calls in which each SM has one work tile; the heads are what fills the SMs.
ONE_WAVE = ((1400, 1400), (760, 5000), (380, 18000))
EACH_A_CTA = ("naive", "lpt")  # schedulers: a work tile has a CTA


class Class(NamedTuple):
    """Head dims and mask: the tiles of a class compete."""

    head_dim: int
    head_dim_v: int
    causal: bool


def classes() -> Iterator[Class]:
    """In the order of their turn: what is least known first."""
    for (d, dv), causal in product(DIMS, (False, True)):
        yield Class(d, dv, causal)


def columns_of(one: Class) -> Iterator[tuple[int, int]]:
    """Rows in shared memory that are swizzled in 128 bytes and, where narrower, in 64."""
    found = [
        tuple(-(-dim // step) * step for dim in (one.head_dim, one.head_dim_v))
        for step in RUN_COLUMNS
    ]
    yield from dict.fromkeys(found)


def stages_of(
    one: Class, columns: tuple[int, int], consumers: int, tile_n: int, *, direct: bool
) -> int:
    """Stages of K and V that fit without a spilled register, the most up to four, where O has a
    place beside Q or needs none; 0 for none."""
    for stages in range(MOST_STAGES, 1, -1):
        pipeline = WarpgroupPipeline(
            head_dim=-(-one.head_dim // 16) * 16, head_dim_v=-(-one.head_dim_v // 16) * 16,
            columns=columns, causal=one.causal, tile_n=tile_n, consumers=consumers,
            kv_stages=stages, ping_pong=False, direct=direct,
        )  # fmt: skip
        try:
            plan = warpgroup_plan(pipeline, H200)
        except ValueError:
            continue
        spilled = any(role.spilled_registers for role in plan.roles)
        if not spilled and not output_over_queries(pipeline, H200):
            return stages
    return 0


def variants(one: Class) -> Iterator[dict[str, Any]]:
    """Fields of specs: of each number of warpgroups the widest tiles, with O from registers or by
    way of shared memory; of those from registers also with a CTA for each work tile, and turns."""
    ways = (True, False) if one.head_dim_v % 16 == 0 else (True,)
    striding, each = ("queue", "lpt") if one.causal else ("static", "naive")
    for columns, consumers, direct in product(columns_of(one), (3, 2, 1), ways):
        first = direct and columns == next(columns_of(one))
        if consumers == 1 and not first:
            continue
        sizes = {n: found for n in range(FEWEST_KEYS[consumers], MOST_KEYS[consumers] + 1, 16)
                 if (found := stages_of(one, columns, consumers, n, direct=direct))}  # fmt: skip
        widest = max(sizes, default=0)
        share = SMALLER[consumers] if direct else 1.0
        small = max((n for n in sizes if n <= share * widest), default=0)
        turns = first and consumers > 1 and max(one.head_dim, one.head_dim_v) <= TURNS_UP_TO
        for tile_n in dict.fromkeys(n for n in (widest, small) if n):
            base = {**one._asdict(), "consumers": consumers, "tile_n": tile_n, "columns": columns,
                    "direct": direct, "kv_stages": sizes[tile_n]}  # fmt: skip
            for ping_pong in (False, True) if turns else (False,):
                yield {**base, "ahead": consumers > 1, "scheduler": striding,
                       "ping_pong": ping_pong}  # fmt: skip
                if first:
                    yield {**base, "ahead": False, "scheduler": each, "ping_pong": ping_pong}


def calls_of(fields: dict[str, Any]) -> Iterator[Timed]:
    """That a kernel is timed in."""
    if fields["scheduler"] != "naive":
        yield from MANY_WAVES
    if fields["scheduler"] in EACH_A_CTA:
        for rows, keys in ONE_WAVE:
            blocks = -(-rows // (WARPGROUP_ROWS * fields["consumers"]))
            yield Timed(rows, keys, 1, H200.sm_count // blocks)


def flops(one: Class, call: Timed) -> float:
    """Of both products; of the visible part where causal."""
    pairs = call.rows * (call.keys - (call.rows / 2 if one.causal else 0))
    return 2.0 * call.batch * call.heads * pairs * (one.head_dim + one.head_dim_v)


def measure_class(
    one: Class,
    kernels: list[tuple[dict[str, Any], Any]],
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
    for call in dict.fromkeys(call for fields, _ in good for call in calls_of(fields)):
        timed = [(fields, kernel) for fields, kernel in good if call in calls_of(fields)]
        inputs = Inputs(timed[0][1].spec, call.batch, call.rows, call.keys, call.heads)
        times: list[list[float]] = [[] for _ in timed]
        state: list[tuple[int, float]] = []
        for turn in range(ROUNDS):
            for number, (fields, kernel) in enumerate(timed):
                watchdog.alive(f"time {call} {fields}")
                calls = 1
                if turn:
                    calls = max(1, min(20, round(BURST_MS / times[number][0])))
                    time.sleep(PAUSE_S)
                times[number].append(burst_ms(lambda k=kernel, x=inputs: x.launch(k), calls))
            state.append(meter.read())
        for (fields, kernel), ms in zip(timed, times, strict=True):
            best = statistics.median(ms[1:]) if len(ms) > 1 else ms[0]
            yield {
                **fields, "frame_bytes": frame_bytes(kernel), **call._asdict(),
                "microseconds": round(best * 1e3, 1),
                "tflops": round(flops(one, call) / best / 1e9, 1),
                "clock_mhz": state[-1][0], "power_w": round(state[-1][1]),
            }  # fmt: skip


def run(results: Path, seconds: float, processes: int) -> None:
    """Compile all, then measure class after class until the time is over."""
    from fa4.compiled.artifact import from_bytes

    begun = time.monotonic()
    items = [(str(n), fields) for n, (_, fields) in enumerate(
        (one, fields) for one in classes() for fields in variants(one))]  # fmt: skip
    print(f"{len(items)} kernels", flush=True)
    by_name = dict(items)
    watchdog: Watchdog | None = None
    with results.open("a") as file, multiprocessing.get_context("spawn").Pool(processes) as pool:
        made = pool.imap(compiled, items)  # in order: the first classes are timed meanwhile
        meter = Meter()
        for one in classes():
            kernels = []
            for _ in variants(one):
                name, data, why = next(made)
                if data:
                    kernels.append((by_name[name], from_bytes(data, make_spec(by_name[name]))))
                else:
                    file.write(json.dumps({**by_name[name], "error": why[:200]}) + "\n")
            watchdog = watchdog or Watchdog()
            watchdog.alive(f"{one}")
            rows = list(measure_class(one, kernels, watchdog, meter))
            for row in rows:
                file.write(json.dumps(row) + "\n")
            file.flush()
            long = [row for row in rows if row.get("rows") == MANY_WAVES[-1].rows]
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
                row = {"ahead": False, **row, "columns": "{} {}".format(*row["columns"])}
                writer.writerow({name: int(x) if isinstance(x := row[name], bool) else x
                                 for name in COLUMNS})  # fmt: skip


def main() -> None:
    """Measures, or writes the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path, help="write this CSV instead of measuring")
    given = parser.parse_args()
    if given.table:
        table(given.results, given.table)
    else:
        run(given.results, given.seconds, given.processes)


if __name__ == "__main__":
    main()
