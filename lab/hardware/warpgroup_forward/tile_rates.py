"""From measured times of tiles to the table that the kernel's choice reads.

    python -m lab.hardware.warpgroup_forward.tile_rates lab/hardware/results/hopper_tiles.csv \
        fa4/plan/warpgroup_rates.py

A call's time is that of its waves of work tiles (or, under a causal mask, of all of them divided by
the SMs); of each the rows times the keys, and what a work tile costs beside, over a rate. Rate and
that cost are the least squares of relative errors over the lengths measured. Of each number of
warpgroups those tiles stay that are the fastest for some length.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa4.config import WARPGROUP_ROWS
from fa4.hardware import H200
from fa4.plan.warpgroup_tuned import padded_width

KEYS = (256, 512, 1024, 2048, 4096, 8192, 32768)  # for which a tile must be the fastest to stay
LONG = 6000  # tokens of which a tile must have been measured
MOST_START, NEAR = 600.0, 1.002  # in keys; a tile so near to the fastest is not another one

HEAD = '''"""Rates of the Hopper forward kernel's tiles, by head dims and mask.

Written by python -m lab.hardware.warpgroup_forward.tile_rates from
lab/hardware/results/hopper_tiles.csv: a tile is (warpgroups, keys, stages, TFLOP/s, start, turns,
ahead); start: what a work tile costs beside its keys, in keys.
"""

RATES: dict[tuple[int, int, bool], tuple[tuple[int, int, int, float, int, bool, bool], ...]] = {
'''


class Rate(NamedTuple):
    """A tile of a class with its fit. error: the largest relative one."""

    consumers: int
    tile_n: int
    kv_stages: int
    tflops: float
    start: float
    turns: bool
    ahead: bool
    error: float

    def seconds(self, keys: int) -> float:
        """Of a row, in units of the rate: what is compared."""
        return (-(-keys // self.tile_n) * self.tile_n + self.start) / self.tflops


def fit(rows: Iterable[Mapping[str, str]]) -> Rate:
    """Of the rows of one tile."""
    found = list(rows)
    first = found[0]
    height, width = int(first["consumers"]) * WARPGROUP_ROWS, int(first["tile_n"])
    keys, times = [], []
    for row in found:
        length, sms = int(row["seqlen"]), H200.sm_count
        count = -(-length // height) * int(row["batch"]) * int(row["heads"])
        waves = count / sms if int(row["causal"]) else -(-count // sms)
        seen = (length + height + width) / 2 if int(row["causal"]) else -(-length // width) * width
        flops = 2.0 * (int(row["head_dim"]) + int(row["head_dim_v"])) * height * waves * sms
        keys.append(seen)
        times.append(float(row["microseconds"]) * 1e6 / flops)  # a row's, over 1e12
    x, y = np.array(keys, float), np.array(times)
    slope, offset = np.linalg.lstsq(
        np.stack([x, np.ones_like(x)], 1) / y[:, None], np.ones_like(y), rcond=None
    )[0]
    start = min(max(offset / slope, 0.0), MOST_START)
    rate = 1 / np.mean(y / (x + start))
    error = np.abs((x + start) / rate / y - 1).max()
    return Rate(int(first["consumers"]), width, int(first["kv_stages"]), float(rate), float(start),
                first["ping_pong"] == "1", first["ahead"] == "1", float(error))  # fmt: skip


def rates_of(rows: Iterable[Mapping[str, str]]) -> dict[tuple[int, int, bool], list[Rate]]:
    """All fits by class."""
    tiles: dict[tuple[Any, ...], list[Mapping[str, str]]] = {}
    names = ("consumers", "tile_n", "kv_stages", "ping_pong", "ahead")
    for row in rows:
        one = (int(row["head_dim"]), int(row["head_dim_v"]), row["causal"] == "1")
        tiles.setdefault((one, *(row[name] for name in names)), []).append(row)
    found: dict[tuple[int, int, bool], list[Rate]] = {}
    for key, mine in tiles.items():
        if len(mine) > 1 and max(int(row["seqlen"]) for row in mine) >= LONG:
            found.setdefault(key[0], []).append(fit(mine))
    return found


def kept(rates: list[Rate]) -> Iterator[Rate]:
    """The fastest ones of each number of warpgroups, ahead or not, for some length; by rate."""
    chosen: set[Rate] = set()
    for consumers, ahead in product((1, 2, 3), (False, True)):  # ahead is not for all problems
        mine = [one for one in rates if (one.consumers, one.ahead) == (consumers, ahead)]
        for keys in KEYS if mine else ():
            best = min(rate.seconds(keys) for rate in mine)
            near = [rate for rate in mine if rate.seconds(keys) <= best * NEAR]
            if not chosen & set(near):
                chosen.add(min(near, key=lambda rate: rate.seconds(keys)))
    yield from sorted(chosen, key=lambda rate: -rate.tflops)


def render(found: Mapping[tuple[int, int, bool], list[Rate]]) -> str:
    """The module's source."""
    lines = [HEAD]
    for one in sorted(one for one in found if one[0] == padded_width(one[0])):
        lines.append(f"    {one}: (\n")
        lines += [
            f"        ({x.consumers}, {x.tile_n}, {x.kv_stages}, {x.tflops:.1f}, "
            f"{x.start:.0f}, {x.turns}, {x.ahead}),\n"
            for x in kept(found[one])
        ]
        lines.append("    ),\n")
    return "".join(lines) + "}\n"


def main() -> None:
    """Writes the table; prints the fits that are off by more than 3%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("table", type=Path)
    given = parser.parse_args()
    with given.measured.open(newline="", encoding="utf-8") as file:
        found = rates_of(csv.DictReader(file))
    given.table.write_text(render(found), encoding="utf-8")
    for one, rates in found.items():
        for rate in kept(rates):
            if rate.error > 0.03:
                print(one, rate)


if __name__ == "__main__":
    main()
