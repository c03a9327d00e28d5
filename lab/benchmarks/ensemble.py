"""Sets of constants of the B200 that fit the published figures as well as the best one does.

Figures that are known to lie in an interval (`CostTable.intervals`) are drawn from it, the free
constants start anywhere within their bounds and are fitted; sets whose mean error is at most half
a point above the least are kept if they agree that the software exponentials that were tuned on a
B200 pay there, and of those a sample that is spread over what they predict for calls that no one
has measured.
Usage: python -m lab.benchmarks.ensemble [--output FILE]
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from fa4.figures.accuracy import B200_FILE
from fa4.sim.calibrate import quick_fit
from fa4.sim.cost_table import FREE_CONSTANTS, CostTable, free_constants
from fa4.sim.ensemble import ALIKE, CONSTANTS_FILE, ERROR_COLUMN
from fa4.sim.machine import Machine, find_machine
from fa4.sim.measurements import Row, read_measurements, select_rows
from fa4.sim.options import build
from fa4.sim.validation import compare

DRAWN, KEPT, SEED = 80, 24, 0
TUNED = ({"cta_group": 1}, {"causal": True}, {"head_dim": 64})
MARGIN = 0.005  # of the mean error above the least
# What the kept sets are spread over: kernels without a published figure to fit to.
ASKED = ({"head_dim": 64}, {"cta_group": 2}, {"cta_group": 1}, {"head_dim": 192, "head_dim_v": 128},
         {"tile_n": 96}, {"correction": "inline"}, {"machine": "gb300"})  # fmt: skip


def draw(count: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """Latin hypercube over the intervals and the bounds of the free constants."""
    machine = find_machine("b200")
    ranges = dict(CostTable.intervals()) | {
        name: FREE_CONSTANTS[name][:2] for name in free_constants(machine.costs)
    }
    strata = np.argsort(rng.random((count, len(ranges))), axis=0)
    places = (strata + rng.random(strata.shape)) / count
    return [
        {name: round(float(least + at * (most - least)), 4)
         for (name, (least, most)), at in zip(ranges.items(), row, strict=True)}
        for row in places
    ]  # fmt: skip


def fit(rows: list[Row], machine: Machine, drawn: dict[str, float]) -> dict[str, float]:
    """A drawn set with its free constants fitted, and the mean error that it has then."""
    names = free_constants(machine.costs)
    start = replace(machine.costs, **drawn)
    costs, _ = quick_fit(rows, replace(machine, costs=start), names, rounds=2, start=start)
    found = compare(rows, replace(machine, costs=costs))
    return {name: getattr(costs, name) for name in drawn} | {ERROR_COLUMN: round(found.mape, 5)}


def spread_out(sets: list[dict[str, float]], count: int) -> list[dict[str, float]]:
    """The best set and those that are farthest, one after the other, from all chosen before."""
    said = np.log([[_predict(asked, found) for asked in ASKED] for found in sets])
    said = (said - said.mean(axis=0)) / said.std(axis=0)
    chosen = [int(np.argmin([found[ERROR_COLUMN] for found in sets]))]
    while len(chosen) < min(count, len(sets)):
        gaps = np.linalg.norm(said[:, None] - said[chosen], axis=2).min(axis=1)
        chosen.append(int(np.argmax(gaps)))
    return [sets[index] for index in chosen]


def emulation_pays(found: dict[str, float]) -> bool:
    """Does no call lose by the share of exponentials that FlashAttention-4 emulates on a B200?"""
    return all(
        _predict(asked, found) >= (1 - ALIKE) * _predict({**asked, "exp2_frequency": 0}, found)
        for asked in TUNED
    )


def _predict(asked: dict[str, object], found: dict[str, float]) -> float:
    figures = {f"costs.{name}": x for name, x in found.items() if name != ERROR_COLUMN}
    return build({**asked, **figures}).predict().tflops


def write_sets(path: Path, sets: list[dict[str, float]]) -> None:
    """As CSV, a line each."""
    names = [ERROR_COLUMN, *(name for name in sets[0] if name != ERROR_COLUMN)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sets)


def main() -> None:
    """Draw, fit, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=CONSTANTS_FILE)
    options = parser.parse_args()
    machine = find_machine("b200")
    rows = list(select_rows(read_measurements(B200_FILE), machine)[0])
    fitted = []
    for number, drawn in enumerate(draw(DRAWN, np.random.default_rng(SEED)), 1):
        fitted.append(fit(rows, machine, drawn))
        if number % 20 == 0:
            print(number, min(found[ERROR_COLUMN] for found in fitted), flush=True)
    least = min(found[ERROR_COLUMN] for found in fitted)
    near = [found for found in fitted if found[ERROR_COLUMN] <= least + MARGIN]
    good = [found for found in near if emulation_pays(found)]
    print(f"{len(near)} of {DRAWN} within {MARGIN:.1%} of {least:.2%}, {len(good)} of them kept")
    write_sets(options.output, spread_out(good, KEPT))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
