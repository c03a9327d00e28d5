"""From measured times of tiles to the table that the kernel's choice reads.

    python -m lab.hardware.warpgroup_forward.tile_rates lab/hardware/results/hopper_tiles.csv \
        fa4/measured/hopper_tiles.csv

A call's time is that of the SM which has most to do (`fa4.plan.warpgroup_lengths`): of each of its
work tiles the rows times the keys, and what a work tile costs beside, over a rate. Rate and that
cost are the least squares of relative errors over the lengths measured. Of each number of
warpgroups those tiles stay that are the fastest for some length.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa4.config import WARPGROUP_ROWS, Window
from fa4.hardware import H200
from fa4.plan.warpgroup_lengths import busiest, keys_of_blocks
from fa4.plan.warpgroup_rates import TileClass
from fa4.plan.warpgroup_tuned import QUEUE_SECONDS

KEYS = (256, 512, 1024, 2048, 4096, 8192, 32768)  # for which a tile must be the fastest to stay
LONG = 4000  # tokens of which a tile must have been measured
MOST_START, NEAR = 600.0, 1.002  # in keys; a tile so near to the fastest is not another one
CHOSEN = ("static", "queue", "lpt")  # how a kernel that may be chosen comes by its work tiles
FIELDS = ("head_dim", "head_dim_v", "masked", "consumers", "tile_n", "kv_stages", "tflops", "start",
          "turns", "ahead", "columns", "direct", "alone")  # fmt: skip


class Rate(NamedTuple):
    """A tile of a class with its fit. columns: of which its rows have a multiple; alone: each work
    tile has a CTA; error: the largest relative one."""

    consumers: int
    tile_n: int
    kv_stages: int
    tflops: float
    start: float
    turns: bool
    ahead: bool
    columns: int
    direct: bool
    alone: bool
    error: float

    def seconds(self, keys: int) -> float:
        """Of a row, in units of the rate: what is compared."""
        return (-(-keys // self.tile_n) * self.tile_n + self.start) / self.tflops


@cache
def work(
    length: int, copies: int, consumers: int, tile_n: int, causal: bool
) -> tuple[float, float]:
    """Keys of the SM that has most to do, and how many work tiles it has."""
    window: Window = (None, 0) if causal else (None, None)
    lengths = keys_of_blocks(length, consumers * WARPGROUP_ROWS, tile_n, length, length, window)
    keys = busiest(lengths, copies, H200.sm_count)
    step = float(lengths.max())
    return keys, (busiest(lengths + step, copies, H200.sm_count) - keys) / step


def fit(rows: Iterable[Mapping[str, str]]) -> Rate:
    """Of the rows of one tile."""
    found = list(rows)
    first = found[0]
    consumers, width = int(first["consumers"]), int(first["tile_n"])
    terms, times = [], []
    for row in found:
        copies = int(row["batch"]) * int(row["heads"])
        terms.append(work(int(row["seqlen"]), copies, consumers, width, row["causal"] == "1"))
        columns = int(row["head_dim"]) + int(row["head_dim_v"])
        flops = 2.0 * columns * consumers * WARPGROUP_ROWS * H200.sm_count
        seconds = float(row["microseconds"]) / 1e6
        seconds -= QUEUE_SECONDS if row["scheduler"] == "queue" else 0.0
        times.append(seconds * 1e12 / flops)  # of a row and a key, over the rate
    a, y = np.array(terms), np.array(times)
    slope, offset = np.linalg.lstsq(a / y[:, None], np.ones_like(y), rcond=None)[0]
    start = min(max(offset / slope, 0.0), MOST_START)
    taken = a[:, 0] + start * a[:, 1]
    rate = 1 / np.mean(y / taken)
    error = np.abs(taken / rate / y - 1).max()
    return Rate(consumers, width, int(first["kv_stages"]), float(rate), float(start),
                first["ping_pong"] == "1", first["ahead"] == "1", step_of(first),
                first["direct"] == "1", first["scheduler"] == "lpt", float(error))  # fmt: skip


def step_of(row: Mapping[str, str]) -> int:
    """Of how many columns the rows in shared memory have a multiple."""
    widths = [int(width) for width in row["columns"].split()]
    return next(step for step in (64, 32, 16) if not any(width % step for width in widths))


def rates_of(rows: Iterable[Mapping[str, str]]) -> dict[TileClass, list[Rate]]:
    """All fits by class."""
    tiles: dict[tuple[Any, ...], list[Mapping[str, str]]] = {}
    names = ("consumers", "tile_n", "kv_stages", "ping_pong", "ahead", "columns", "direct",
             "scheduler")  # fmt: skip
    for row in rows:
        if row["scheduler"] in CHOSEN:
            one = (int(row["head_dim"]), int(row["head_dim_v"]), row["causal"] == "1")
            tiles.setdefault((one, *(row[name] for name in names)), []).append(row)
    found: dict[TileClass, list[Rate]] = {}
    for key, mine in tiles.items():
        if len(mine) > 1 and max(int(row["seqlen"]) for row in mine) >= LONG:
            found.setdefault(key[0], []).append(fit(mine))
    return found


def kept(rates: list[Rate]) -> Iterator[Rate]:
    """The fastest ones of each number of warpgroups, alone or not, for some length; by rate."""
    chosen: set[Rate] = set()
    for consumers, alone in product((1, 2, 3), (False, True)):
        mine = [one for one in rates if (one.consumers, one.alone) == (consumers, alone)]
        for keys in KEYS if mine else ():
            best = min(rate.seconds(keys) for rate in mine)
            near = [rate for rate in mine if rate.seconds(keys) <= best * NEAR]
            if not chosen & set(near):
                chosen.add(min(near, key=lambda rate: rate.seconds(keys)))
    yield from sorted(chosen, key=lambda rate: -rate.tflops)


def table(found: Mapping[TileClass, list[Rate]]) -> Iterator[dict[str, Any]]:
    """The rows of the file."""
    for one in sorted(found):
        for x in kept(found[one]):
            values = (one[0], one[1], int(one[2]), x.consumers, x.tile_n, x.kv_stages,
                      f"{x.tflops:.1f}", f"{x.start:.0f}", int(x.turns), int(x.ahead),
                      x.columns, int(x.direct), int(x.alone))  # fmt: skip
            yield dict(zip(FIELDS, values, strict=True))


def main() -> None:
    """Writes the table; prints the fits that are off by more than 3%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("table", type=Path)
    given = parser.parse_args()
    with given.measured.open(newline="", encoding="utf-8") as file:
        found = rates_of(csv.DictReader(file))
    with given.table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table(found))
    for one, rates in found.items():
        for rate in kept(rates):
            if rate.error > 0.03:
                print(one, rate)


if __name__ == "__main__":
    main()
