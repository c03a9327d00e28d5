"""The simulator beside measurements that it was not fitted to, and beside a roofline formula.

B200: each kind of the published figures (causal, backward, each length, each source) is left out,
the free constants are fitted to the others, and the kind is predicted; a roofline formula with
eight parameters and a random forest (scikit-learn) go through the same. All three predict what
other pull requests published, to which nothing was fitted, and ratios of theirs by all sets of
constants. H200: the free constants are fitted to
half of the configurations of the measured tile sweep, three draws, and predict the other half;
which kernels spill registers is predicted without any fit, and what the tiles that the simulator
chooses lose to the fastest ones, also where a constant is a tenth off. This package's own sweep was
not fitted to: its error, in another run, too, its spills, and for each head dim, mask and length
the configuration that the simulator chooses beside the best.
Usage: python -m lab.benchmarks.validation [--output FILE]
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fa4.figures.accuracy import B200_FILE, HOPPER_FILE, KEPT_OUT_FILE
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim.calibrate import configuration, quick_fit
from fa4.sim.cost_table import CostTable, free_constants
from fa4.sim.elasticity import figures_read
from fa4.sim.machine import Machine, find_machine
from fa4.sim.measurements import Row, pipeline_for, read_measurements, select_rows
from fa4.sim.validation import Comparison, Point, compare
from lab import ROOT
from lab.benchmarks.baselines import by_forest, by_formula, score
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.ratios import RATIOS, STAYS, ratio, staying_us, with_more

DATA = ROOT / "tests" / "sim" / "data"
AGAIN_FILE = ROOT / "lab" / "hardware" / "results" / "hopper_sweep_again.csv"
OWN = "fa4 sm_90a"
# Of the speed of the same tile with P in shared memory or the next narrower one.
SPILLED_SHARE = 0.7
DRAWS = (0, 1, 2)
MEASURED_ELSEWHERE = ("hbm_queue_share", "cta_start_cycles")  # on an H200: at both ends
MOVES = (0.9, 1.1)  # of a constant, to see what is chosen then


def kinds_of(rows: list[Row]) -> Mapping[str, Callable[[Row], bool]]:
    """The groups that are left out, by name."""
    kinds: dict[str, Callable[[Row], bool]] = {
        "causal": lambda row: row.problem.causal,
        "backward": lambda row: row.direction == "bwd",
    }
    for length in sorted({row.problem.seqlen_k for row in rows}):
        kinds[f"length {length}"] = lambda row, length=length: row.problem.seqlen_k == length
    for source in sorted({row.source for row in rows}):
        kinds[source] = lambda row, source=source: row.source == source
    return kinds


def summary(found: Comparison) -> dict[str, Any]:
    """Mean and worst error, in percent."""
    return {
        "points": len(found.points),
        "mape_percent": round(100 * found.mape, 3),
        "worst_percent": round(100 * found.worst.error, 2),
    }


def blackwell() -> dict[str, Any]:
    """Fitted to all, and each kind by a fit to the others, of simulator and formula."""
    machine = find_machine("b200")
    rows = list(select_rows(read_measurements(B200_FILE), machine)[0])
    names = free_constants(machine.costs)
    report: dict[str, Any] = {"all, by the shipped constants": summary(compare(rows, machine))}
    report["all, formula"] = score(rows, by_formula(rows, rows))["mape_percent"]
    groups = {}
    for name, belongs in kinds_of(rows).items():
        rest, out = [r for r in rows if not belongs(r)], [r for r in rows if belongs(r)]
        groups[name] = left_out(rest, out, machine, names, CostTable()) | {
            "formula_mape_percent": score(out, by_formula(rest, out))["mape_percent"],
            "forest_mape_percent": score(out, by_forest(rest, out))["mape_percent"],
        }
        print(name, groups[name])
    return report | {
        "left out": groups,
        "other starts": other_starts(rows, machine, names),
        **kept_out(rows),
        "ratios": {name: ratio(asked) for name, asked in RATIOS.items()},
    }


def kept_out(rows: list[Row]) -> dict[str, Any]:
    """What other pull requests published, predicted by all three: each machine, source and kind;
    and by the simulator if CTAs that stay take as much more as another ratio of theirs says."""
    every = read_measurements(KEPT_OUT_FILE)
    found = []
    for name in ("b200", "gb300"):
        machine = find_machine(name)
        found += compare(select_rows(every, machine)[0], machine).points
    out, more_us = [point.row for point in found], staying_us(RATIOS[STAYS])
    models = {
        "simulator": np.array([point.predicted_tflops for point in found]),
        "formula": by_formula(rows, out),
        "forest": by_forest(rows, out),
    }
    staying = np.array([with_more(point, more_us) for point in found])
    report, stayed = {}, {}
    for group, belongs in kept_out_kinds(out).items():
        used = np.array([belongs(row) for row in out])
        some = [row for row in out if belongs(row)]
        report[group] = {model: score(some, said[used]) for model, said in models.items()}
        stayed[group] = score(some, staying[used])
        print(group, report[group], stayed[group])
    return {"kept out": report, "staying": {"more_us": round(more_us, 3), "kept out": stayed}}


def kept_out_kinds(rows: list[Row]) -> dict[str, Callable[[Row], bool]]:
    """Groups of what was published elsewhere, by name."""
    kinds: dict[str, Callable[[Row], bool]] = {"all": lambda row: True}
    for gpu in ("B200", "GB300"):
        kinds[gpu] = lambda row, gpu=gpu: row.gpu == gpu
    for source in sorted({(row.gpu, row.source) for row in rows}):
        kinds[" ".join(source)] = lambda row, source=source: (row.gpu, row.source) == source
    kinds["(192, 128)"] = lambda row: row.problem.head_dim == 192
    kinds["head dim 64"] = lambda row: row.problem.head_dim == 64
    kinds["pairs, forward"] = lambda row: "2-CTA" in row.software and row.direction == "fwd"
    kinds["backward"] = lambda row: row.direction == "bwd"
    return kinds


def left_out(
    rest: list[Row], out: list[Row], machine: Machine, names: tuple[str, ...], start: CostTable
) -> dict[str, Any]:
    """The rows `out` predicted by a fit to the rest, which begins with `start`."""
    costs, _ = quick_fit(rest, machine, names, rounds=4, start=start)
    return summary(compare(out, replace(machine, costs=costs)))


def other_starts(
    rows: list[Row], machine: Machine, names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """The groups again with figures that are not fitted at the ends of their intervals."""
    report: dict[str, dict[str, Any]] = {}
    for figure in MEASURED_ELSEWHERE:
        for end in CostTable.intervals()[figure]:
            moved = replace(machine, costs=replace(machine.costs, **{figure: end}))
            start = replace(CostTable(), **{figure: end})
            report[f"{figure} {end:g}"] = {
                name: left_out(
                    [r for r in rows if not belongs(r)], [r for r in rows if belongs(r)],
                    moved, names, start,
                )["mape_percent"]
                for name, belongs in kinds_of(rows).items()
            }  # fmt: skip
            print(figure, end, report[f"{figure} {end:g}"])
    return report


def spills(rows: list[Row]) -> dict[str, Any]:
    """Kernels that spill by the plan, against those that collapse in the measurements.

    Collapsed: less than SPILLED_SHARE of the fastest tile of as many rows.
    """
    machine = find_machine("h200")
    best: dict[object, float] = {}
    for row in rows:
        key = (row.problem, row.tile["tile_m"])
        best[key] = max(best.get(key, 0.0), row.tflops)
    wrong = []
    for row in rows:
        plan = warpgroup_plan(pipeline_for(row, machine), machine.gpu)  # type: ignore[arg-type]
        predicted = plan.role("consumer0").spilled_registers > 0
        collapsed = row.tflops < SPILLED_SHARE * best[row.problem, row.tile["tile_m"]]
        if predicted != collapsed:
            wrong.append(row.label)
    return {"points": len(rows), "misjudged": len(wrong), "which": wrong}


def hopper() -> dict[str, Any]:
    """Half of the configurations predicted by a fit to the others, three draws."""
    machine = find_machine("h200")
    rows = list(select_rows(read_measurements(DATA / "h200_tile_sweep.csv"), machine)[0])
    names = free_constants(machine.costs)
    every = compare(rows, machine)
    report: dict[str, Any] = {
        "all, by the shipped constants": summary(every)
        | {"rank_correlation": round(every.rank_correlation, 3)},
        "spills": spills(rows),
    }
    keys = sorted({configuration(row) for row in rows}, key=repr)
    for draw in DRAWS:
        order = np.random.default_rng(draw).permutation(len(keys))
        chosen = {keys[i] for i in order[: len(keys) // 2]}
        used, kept = ([r for r in rows if (configuration(r) in chosen) is x] for x in (True, False))
        costs, _ = quick_fit(used, machine, names, rounds=2)
        found = compare(kept, replace(machine, costs=costs))
        report[f"kept out, draw {draw}"] = summary(found) | {
            "rank_correlation": round(found.rank_correlation, 3),
            "constants": {name: round(getattr(costs, name), 3) for name in names},
        }
        print(f"draw {draw}", report[f"kept out, draw {draw}"])
    return report | {"choices": choices(every), "moved": moved_choices(rows, machine)}


def _error(row: Row, machine: Machine) -> float:
    return compare([row], machine).mape


def moved_choices(rows: list[Row], machine: Machine) -> dict[str, Any]:
    """What the chosen tiles lose at most with each constant that the rows use a tenth off."""
    used = frozenset[str]().union(*(figures_read(partial(_error, row), machine) for row in rows))
    lost = {}
    for name in sorted(x.partition(".")[2] for x in used if x.startswith("costs.")):
        for factor in MOVES:
            costs = replace(machine.costs, **{name: getattr(machine.costs, name) * factor})
            found = choices(compare(rows, replace(machine, costs=costs)))
            lost[f"{name} x {factor}"] = max(row["lost_percent"] for row in found)
    worst = max(lost, key=lambda name: lost[name])
    print("moved by a tenth", worst, lost[worst])
    return {"constants": len(lost) // len(MOVES), "worst": worst, "lost_percent": lost}


def own_hopper() -> dict[str, Any]:
    """This package's sweep: errors, spills against the compiled kernels' stacks, choices."""
    machine = find_machine("h200")
    rows = list(select_rows(read_measurements(HOPPER_FILE), machine, OWN)[0])
    with HOPPER_FILE.open(encoding="utf-8", newline="") as lines:
        frames = [int(line["frame_bytes"]) > 0 for line in csv.DictReader(lines)]
    every = compare(rows, machine)
    kept = Comparison(machine="H200", points=tuple(
        point for point, spilled in zip(every.points, frames, strict=True) if not spilled
    ))  # fmt: skip
    plans = [warpgroup_plan(pipeline_for(row, machine), machine.gpu) for row in rows]  # type: ignore[arg-type]
    predicted = [plan.role("consumer0").spilled_registers > 0 for plan in plans]
    wrong = [row.label for row, a, b in zip(rows, predicted, frames, strict=True) if a != b]
    again = compare(list(select_rows(read_measurements(AGAIN_FILE), machine, OWN)[0]), machine)
    return {
        "all": summary(every) | {"rank_correlation": round(every.rank_correlation, 3)},
        "another run": summary(again) | {"rank_correlation": round(again.rank_correlation, 3)},
        "without spills": summary(kept) | {"rank_correlation": round(kept.rank_correlation, 3)},
        "spills": {"points": len(rows), "misjudged": len(wrong), "which": wrong},
        "choices": choices(every),
    }


def choices(found: Comparison) -> list[dict[str, Any]]:
    """The fastest by prediction beside the fastest by measurement, of each call on inputs of
    standard deviation 1, among the schedulers that can be predicted (not the snake order)."""
    calls: dict[object, list[Point]] = {}
    for point in found.points:
        if point.row.spread == 1.0 and point.row.tile.get("scheduler") != "snake":
            calls.setdefault(point.row.problem, []).append(point)
    table = []
    for points in calls.values():
        best = max(points, key=lambda point: point.row.tflops)
        chosen = max(points, key=lambda point: point.predicted_tflops)
        problem = best.row.problem
        table.append({
            "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
            "causal": problem.causal, "seqlen": problem.seqlen_k, "candidates": len(points),
            "best": dict(best.row.tile), "best_tflops": best.row.tflops,
            "chosen": dict(chosen.row.tile), "chosen_tflops": chosen.row.tflops,
            "lost_percent": round(100 * (1 - chosen.row.tflops / best.row.tflops), 2),
        })  # fmt: skip
    return table


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "h200": hopper,
    "own h200": own_hopper,
    "b200": blackwell,
}


def main() -> None:
    """Print and write all."""
    options = parse_output(__doc__, "validation")
    report = {name: part() for name, part in PARTS.items()}
    write_record(options.output, report, ("numpy", "numba", "scikit-learn"))


if __name__ == "__main__":
    main()
