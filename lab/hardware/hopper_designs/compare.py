"""What the H200 gave of the search's designs beside what was predicted: rank and regret.

    python -m lab.hardware.hopper_designs.compare PLAN.json RESULTS.jsonl --machine NAME

Regret: what the design that the search puts first loses against the fastest that was measured, of
the search's own and random ones, and against what a call gets today.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lab.records import record_path, write_record

TODAY = " today"


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, equal values sharing their ranks."""
    ranks = [np.array([np.mean([y < x for y in some]) + np.mean([y <= x for y in some])
                       for x in some]) for some in (first, second)]  # fmt: skip
    return float(np.corrcoef(*ranks)[0, 1])


def summarize(
    plan: Mapping[str, Any], problem: Mapping[str, Any], rates: Mapping[str, float]
) -> Any:
    """Of one problem: every variant's fields and rates, rank correlation, regret."""
    predicted = {name: x for name, x in plan["predicted"].items() if name in rates}
    rows = [
        {"name": name, "fields": plan["variants"][name], "tflops": rates[name],
         "predicted": predicted.get(name)}
        for name in sorted(rates)
    ]  # fmt: skip
    names = list(predicted)
    first = max(names, key=lambda name: (predicted[name]["least"], -names.index(name)))
    best = max(rates[name] for name in names)
    (today,) = (rate for name, rate in rates.items() if name.endswith(TODAY))
    errors = [predicted[name]["tflops"] / rates[name] - 1 for name in names]
    own = [name for name in names if " best " in name]
    return {
        "problem": dict(problem),
        "designs": len(names),
        "rank_correlation": rank_correlation(
            [predicted[name]["least"] for name in names], [rates[name] for name in names]
        ),
        "mean_error": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
        "bias_of_best": float(np.mean([predicted[x]["tflops"] / rates[x] - 1 for x in own])),
        "first": first,
        "first_tflops": rates[first],
        "best_tflops": best,
        "best_of_ten_tflops": max(rates[name] for name in own),
        "today_tflops": today,
        "regret": 1 - rates[first] / best,
        "regret_to_today": 1 - rates[first] / today,
        "rows": rows,
    }


def compare(plan: Mapping[str, Any], lines: list[dict[str, Any]]) -> list[Any]:
    """A summary of each problem that was timed."""
    return [summarize(plan, line["problem"], line["tflops"]) for line in lines if "tflops" in line]


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--machine", required=True)
    given = parser.parse_args()
    plan = json.loads(given.plan.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in given.results.read_text(encoding="utf-8").splitlines()]
    found = compare(plan, lines)
    for row in found:
        print(
            f"d{row['problem']['head_dim']}: rank {row['rank_correlation']:.2f}, regret "
            f"{row['regret']:.1%} of {row['designs']}, {row['regret_to_today']:.1%} to today"
        )
    record = {"gpu": given.machine, "problems": found}
    write_record(record_path("hopper_designs"), record, ("nvidia-cutlass-dsl",),
                 machine=given.machine)  # fmt: skip


if __name__ == "__main__":
    main()
