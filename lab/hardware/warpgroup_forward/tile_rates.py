"""From measured times of tiles to the table that the kernel's choice reads.

    python -m lab.hardware.warpgroup_forward.tile_rates lab/hardware/results/hopper_tiles.csv \
        fa4/measured/hopper_tiles.csv

A call's time is that of the SM which has most to do (`fa4.plan.warpgroup_lengths`): of each of its
work tiles the rows times the keys, and what a work tile costs beside, over a rate. Rate and that
cost are the least squares of relative errors over the lengths measured, of calls that give each SM
one work tile by themselves: warpgroups meet at the tensor core in another order there, which for
some lengths is a bad one, and lasts. Head dims and numbers of warpgroups that turns made faster in
most of such calls have them there, the others do not: of one tile and length chance says more. Of
each number of warpgroups those tiles stay that are the fastest for some length.
"""

from __future__ import annotations

import argparse
import csv
import statistics
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
from lab.hardware.warpgroup_forward.tiles import EACH_A_CTA

KEYS = (256, 512, 1024, 2048, 4096, 8192, 32768)  # for which a tile must be the fastest to stay
LONG = 4000  # keys of which a tile must have been measured
MOST_START, NEAR = 600.0, 1.002  # in keys; a tile so near to the fastest is not another one
# What a call takes beside its work tiles, whatever these are: the launch, the first loads from
# memory. By hopper_tiles.csv: of one warpgroup without a mask, whose rate is the same in one wave
# as in many, a work tile seems to cost 3.2 us more in one.
CALL_SECONDS = 3e-6
# A burst that took so many times as long as the others say is one that the host was late for.
LATE = 1.4
TILE = ("head_dim", "head_dim_v", "causal", "consumers", "tile_n", "kv_stages", "ahead", "columns",
        "direct", "scheduler")  # fmt: skip
FIELDS = ("head_dim", "head_dim_v", "masked", "consumers", "tile_n", "kv_stages", "tflops", "start",
          "turns", "ahead", "columns", "direct", "alone", "one_wave")  # fmt: skip


class Rate(NamedTuple):
    """A tile of a class with its fit. columns: of which its rows have a multiple; alone: each work
    tile has a CTA; one_wave: and no SM has two; error: the largest relative one."""

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
    one_wave: bool
    error: float

    def seconds(self, keys: int) -> float:
        """Of a row, in units of the rate: what is compared."""
        return (-(-keys // self.tile_n) * self.tile_n + self.start) / self.tflops


@cache
def work(
    sizes: tuple[int, int, int], consumers: int, tile_n: int, causal: bool
) -> tuple[float, float]:
    """Keys of the SM that has most to do, and how many work tiles it has. sizes: rows, keys, and
    sequences times heads."""
    window: Window = (None, 0) if causal else (None, None)
    rows, keys_of_rows, copies = sizes
    block = consumers * WARPGROUP_ROWS
    lengths = keys_of_blocks(rows, block, tile_n, rows, keys_of_rows, window)
    keys = busiest(lengths, copies, H200.sm_count)
    step = float(lengths.max())
    return keys, (busiest(lengths + step, copies, H200.sm_count) - keys) / step


def sizes_of(row: Mapping[str, str]) -> tuple[int, int, int]:
    """Rows, keys, and sequences times heads."""
    return int(row["rows"]), int(row["keys"]), int(row["batch"]) * int(row["heads"])


def in_one_wave(row: Mapping[str, str]) -> bool:
    """Has no SM a second work tile?"""
    rows, _, copies = sizes_of(row)
    return -(-rows // (int(row["consumers"]) * WARPGROUP_ROWS)) * copies <= H200.sm_count


def least_squares(a: np.ndarray, y: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Rate, start, and times over what these say; a: keys and work tiles of each time."""
    slope, offset = np.linalg.lstsq(a / y[:, None], np.ones_like(y), rcond=None)[0]
    start = min(max(offset / slope, 0.0), MOST_START)
    taken = a[:, 0] + start * a[:, 1]
    rate = 1 / np.mean(y / taken)
    return float(rate), float(start), y * rate / taken


def fit(rows: Iterable[Mapping[str, str]]) -> Rate:
    """Of the rows of one tile, without times that are late."""
    found = list(rows)
    first = found[0]
    consumers, width = int(first["consumers"]), int(first["tile_n"])
    terms, times = [], []
    for row in found:
        terms.append(work(sizes_of(row), consumers, width, row["causal"] == "1"))
        columns = int(row["head_dim"]) + int(row["head_dim_v"])
        flops = 2.0 * columns * consumers * WARPGROUP_ROWS * H200.sm_count
        seconds = float(row["microseconds"]) / 1e6 - CALL_SECONDS
        seconds -= QUEUE_SECONDS if row["scheduler"] == "queue" else 0.0
        times.append(seconds * 1e12 / flops)  # of a row and a key, over the rate
    a, y = np.array(terms), np.array(times)
    late = least_squares(a, y)[2].argmax()
    others = np.arange(len(y)) != late
    rate, start, _ = least_squares(a[others], y[others])
    if y[late] * rate <= LATE * (a[late, 0] + start * a[late, 1]):
        others[late] = True
    rate, start, shares = least_squares(a[others], y[others])
    error = np.abs(1 / shares - 1).max()
    return Rate(consumers, width, int(first["kv_stages"]), rate, start,
                first["ping_pong"] == "1", first["ahead"] == "1", step_of(first),
                first["direct"] == "1", first["scheduler"] in EACH_A_CTA, in_one_wave(first),
                float(error))  # fmt: skip


def step_of(row: Mapping[str, str]) -> int:
    """Of how many columns the rows in shared memory have a multiple."""
    widths = [int(width) for width in row["columns"].split()]
    return next(step for step in (64, 32, 16) if not any(width % step for width in widths))


def rates_of(rows: Iterable[Mapping[str, str]]) -> dict[TileClass, list[Rate]]:
    """All fits by class."""
    tiles: dict[tuple[Any, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        key = *(row[name] for name in TILE), row["ping_pong"], in_one_wave(row)
        tiles.setdefault(key, []).append(row)
    found: dict[TileClass, list[Rate]] = {}
    faster = faster_with_turns(row for mine in tiles.values() for row in mine)
    for mine in tiles.values():
        first = mine[0]
        turns = faster.get(group_of(first)) if in_one_wave(first) else None
        long = len(mine) > 2 and max(int(row["keys"]) for row in mine) >= LONG
        if long and turns in (None, first["ping_pong"] == "1"):
            one = int(first["head_dim"]), int(first["head_dim_v"]), first["causal"] == "1"
            found.setdefault(one, []).append(fit(mine))
    return found


def group_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Head dims and number of warpgroups."""
    return row["head_dim"], row["head_dim_v"], row["consumers"]


def faster_with_turns(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, ...], bool]:
    """Are they, in most calls of one wave? Of the groups that were timed both ways."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in filter(in_one_wave, rows):
        call = (group_of(row), *(row[name] for name in TILE), sizes_of(row))
        times.setdefault(call, {})[row["ping_pong"]] = float(row["microseconds"])
    ratios: dict[tuple[str, ...], list[float]] = {}
    for (group, *_), both in times.items():
        if len(both) == 2:
            ratios.setdefault(group, []).append(both["0"] / both["1"])
    return {group: statistics.median(found) > 1 for group, found in ratios.items()}


def kept(rates: list[Rate]) -> Iterator[Rate]:
    """The fastest ones of each number of warpgroups, alone, in one wave or neither, for some
    length; by rate."""
    chosen: set[Rate] = set()
    kinds = ((False, False), (True, False), (True, True))
    for consumers, kind in product((1, 2, 3), kinds):
        mine = [one for one in rates
                if (one.consumers, (one.alone, one.one_wave)) == (consumers, kind)]  # fmt: skip
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
                      x.columns, int(x.direct), int(x.alone), int(x.one_wave))  # fmt: skip
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
