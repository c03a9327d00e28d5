"""How sharp the test kit's judgement is, how often it errs, what it costs, and what it notices.

    python -m lab.benchmarks.verify [--quick] [--part NAME] [--jobs N] [--output FILE]

- allowance: the median budget of O over the error of plain attention, the largest of the output
  and, for honesty, the largest of the row;
- false alarms: default runs with one seed after another until 10,000 cases of each correct back end
  are judged: failures, and the worst share of the budget by element type;
- styles: other correct ways to compute the same, with 20 seeds, at a first look at what has tight
  limits (the slow tests run all properties with two seeds): what is rejected, and the worst shares;
- seconds: CPU time of the default runs on the reference, on one core; the other back ends are
  judged by the budgets that were computed for it;
- planted faults: the first property to fail with `--exitfirst`, and the CPU seconds until then.

`--quick`: one seed with few cases, every tenth fault. `--part`: allowance, correct, styles or
faults; the result file keeps the rest. CPU seconds are those of one thread; others use the machine
as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fa4.testing import Case, VerifyOptions, build_inputs, load_backend, verify
from fa4.testing.backends import DTYPES, FP8, Backend
from fa4.testing.budget import expect_forward
from fa4.testing.properties import PROPERTIES, Property
from fa4.testing.report import FAILED, NOT_ROBUST
from fa4.testing.runner import run_property
from fa4.testing.statistics import GRADIENT_STATISTICS, STATISTICS
from fa4.testing.walk import Walk
from lab.benchmarks.common import record_path, write_record
from tests.testing.planted import FAULTS, STYLES
from tests.testing.remembered import remembered_budgets
from tests.testing.test_styles import TIGHT

PLANTED = "tests.testing.planted"
CORRECT = ("reference", "torch-sdpa", f"{PLANTED}:honest")
LEAST_CASES = 10_000
STYLE_SEEDS = 20
KEYS = (257, 1025)
STATISTIC = frozenset(prop.name for prop in STATISTICS + GRADIENT_STATISTICS)


def measure_allowance(dtype: str, keys: int, values: str = "normal") -> dict[str, Any]:
    """Median over all elements of O, 64 rows of 2 heads, of 10 seeds; and the worst seed's."""
    to_largest, to_row = [], []
    for seed in range(10):
        case = Case(seqlen_q=64, seqlen_k=keys, heads_k=2, head_dim=64, head_dim_v=64,
                    dtype=dtype, values=values, seed=seed)  # fmt: skip
        out = expect_forward(build_inputs(case))["out"]
        allowed, plain, oracle = out.allowed[0], out.plain[0].astype(np.float64), out.oracle[0]
        to_largest.append(allowed / out.plain_error)
        to_row.append(allowed / np.abs(plain - oracle).max(axis=-1, keepdims=True))
    return {
        "dtype": dtype,
        "values": values,
        "keys": keys,
        "median_allowance": float(np.median(to_largest)),
        "median_allowance_of_worst_seed": max(float(np.median(x)) for x in to_largest),
        "median_allowance_of_row": float(np.median(to_row)),
    }


class Shares:
    """A property's check that notes the case count and the worst share of each element type."""

    def __init__(self, prop: Property) -> None:
        self.check, self.cases, self.worst = prop.check, dict[str, int](), dict[str, float]()

    def __call__(self, backend: Backend, case: Case | Walk) -> float:
        """Judge a case, or a session; what is not covered is not counted."""
        share = self.check(backend, case)  # type: ignore[arg-type]
        dtype = case.case.dtype if isinstance(case, Walk) else case.dtype
        self.cases[dtype] = self.cases.get(dtype, 0) + 1
        self.worst[dtype] = max(self.worst.get(dtype, 0.0), share)
        return share


def run_seed(name: str, seed: int, examples: int) -> dict[str, Any]:
    """One run of the suite, with counts and worst shares by element type."""
    found: dict[str, Any] = {"backend": name, "seed": seed, "alarms": [], "cases": {}, "worst": {}}
    backend, options = load_backend(name), VerifyOptions(max_examples=examples, seed=seed)
    start = time.process_time()
    for prop in PROPERTIES:
        shares = Shares(prop)
        result = run_property(replace(prop, check=shares), backend, options)
        if result.status == FAILED or (result.status == NOT_ROBUST and name != "torch-sdpa"):
            found["alarms"].append({"property": prop.name, "seed": seed, "error": result.error,
                                    "example": result.example})  # fmt: skip
        for dtype, cases in shares.cases.items():
            found["cases"][dtype] = found["cases"].get(dtype, 0) + cases
            group = found["worst"].setdefault(dtype, {"budget": 0.0, "statistic": 0.0})
            kind = "statistic" if prop.name in STATISTIC else "budget"
            group[kind] = max(group[kind], shares.worst[dtype])
    found["cpu_seconds"] = time.process_time() - start
    return found


def catch_fault(name: str) -> dict[str, Any]:
    """The first failure of a planted fault, and the CPU seconds until it is reported."""
    fault = FAULTS[name]
    verify(f"{PLANTED}:honest", only=["plain"], max_examples=2)  # what is loaded once
    start = time.process_time()
    report = verify(f"{PLANTED}:{name}", exitfirst=True, strict=True)
    seconds = time.process_time() - start
    failed = report.with_status(FAILED)
    first = failed[0] if failed else None
    return {
        "fault": name,
        "class": fault.group,
        "cpu_seconds": round(seconds, 2),
        "property": first.name if first else None,
        "needs": list(first.needs) if first else [],
        "named": first is not None and fault.is_named_by(first.name),
    }


def in_one_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a worker process calls."""
    with threadpool_limits(1):
        return function(*arguments)


def run_seeds(names: list[str], seed: int, examples: int) -> list[dict[str, Any]]:
    """`run_seed` of several back ends; what is expected of a case is computed for the first."""
    with remembered_budgets():
        return [run_seed(name, seed, examples) for name in names]


def judge_correct(pool: ProcessPoolExecutor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of the correct back ends, until each has its cases; a summary of each."""
    least, examples = (1, 4) if options.quick else (LEAST_CASES, 20)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CORRECT}
    seed = 0
    while lacking := [name for name in CORRECT if cases_of(runs[name]) < least]:
        seeds = range(seed, seed + options.jobs)
        seed += options.jobs
        futures = [pool.submit(in_one_thread, run_seeds, lacking, s, examples) for s in seeds]
        for future in futures:
            for run in future.result():
                runs[run["backend"]].append(run)
                alarms = len(run["alarms"])
                print(f"{run['backend']}, seed {run['seed']}: {cases_of([run])} cases, "
                      f"{alarms} alarms, {run['cpu_seconds']:.0f} s", flush=True)  # fmt: skip
    return [summarize(name, runs[name]) for name in CORRECT]


def cases_of(runs: list[dict[str, Any]]) -> int:
    """How many cases were judged."""
    return sum(sum(run["cases"].values()) for run in runs)


def summarize(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums and maxima over the seeds."""
    types = [dtype for dtype in DTYPES + FP8 if any(dtype in run["cases"] for run in runs)]

    def worst(kind: str) -> dict[str, float]:
        return {d: max(run["worst"].get(d, {}).get(kind, 0.0) for run in runs) for d in types}

    return {
        "backend": name,
        "seeds": len(runs),
        "cases": cases_of(runs),
        "cases_by_type": {d: sum(run["cases"].get(d, 0) for run in runs) for d in types},
        "false_alarms": [alarm for run in runs for alarm in run["alarms"]],
        "worst_share_of_budget": worst("budget"),
        "worst_share_of_statistic": worst("statistic"),
        "cpu_seconds_of_runs": [round(run["cpu_seconds"], 1) for run in runs],
    }


def judge_styles_once(seed: int) -> list[dict[str, Any]]:
    """All styles with one seed; what is expected of a case is computed for the first."""
    rows = []
    with remembered_budgets():
        for name in STYLES:
            report = verify(f"{PLANTED}:{name}", only=TIGHT, quick=True, strict=True, seed=seed)
            failed = report.with_status(FAILED)
            rows.append({
                "style": name,
                "cases": sum(result.cases for result in report.results),
                "rejected": [f"seed {seed}: {x.name}: {x.error}" for x in failed],
                "worst_share": max(result.worst_share or 0.0 for result in report.results),
            })  # fmt: skip
    return rows


def judge_styles(pool: ProcessPoolExecutor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per style, over the seeds."""
    seeds = range(1 if options.quick else STYLE_SEEDS)
    runs = [pool.submit(in_one_thread, judge_styles_once, seed) for seed in seeds]
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for row in run.result():
            total = found.setdefault(row["style"], {"style": row["style"], "seeds": len(seeds),
                                     "cases": 0, "rejected": [], "worst_share": 0.0})  # fmt: skip
            total["cases"] += row["cases"]
            total["rejected"] += row["rejected"]
            total["worst_share"] = max(total["worst_share"], row["worst_share"])
    return list(found.values())


def show_allowance(rows: list[dict[str, Any]]) -> None:
    """A line per element type and length."""
    print("\nO: median allowance over the largest error of plain attention (worst of 10 seeds), "
          "and over the row's")  # fmt: skip
    for row in rows:
        print(f"  {row['dtype']:5} {row['values']:11} Sk {row['keys']:5}  "
              f"{row['median_allowance']:.2f} "
              f"({row['median_allowance_of_worst_seed']:.2f}), "
              f"{row['median_allowance_of_row']:.2f}")  # fmt: skip


def show_correct(rows: list[dict[str, Any]]) -> None:
    """A table per back end, by element type."""
    for row in rows:
        print(f"\n{row['backend']}: {row['cases']} cases, {len(row['false_alarms'])} false alarms, "
              f"CPU seconds of its runs {row['cpu_seconds_of_runs']}")  # fmt: skip
        for dtype, cases in row["cases_by_type"].items():
            share, statistic = (row[f"worst_share_of_{x}"][dtype] for x in ("budget", "statistic"))
            print(f"  {dtype:5} {cases:6} cases  worst {share:.2f} of the budget, "
                  f"{statistic:.2f} of a statistic's limit")  # fmt: skip
        for alarm in row["false_alarms"]:
            print(f"  ALARM {alarm['property']}: {alarm['error'][:200]} {alarm['example']}")


def show_faults(rows: list[dict[str, Any]]) -> None:
    """A line per fault, the slowest last."""
    named, seconds = sum(row["named"] for row in rows), [row["cpu_seconds"] for row in rows]
    print(f"\n{named} of {len(rows)} planted faults are caught by a property that names them, "
          f"in {median(seconds):.1f} s (median), {max(seconds):.1f} s (most)")  # fmt: skip
    for row in sorted(rows, key=lambda row: row["cpu_seconds"]):
        needs = ", ".join(row["needs"]) + ("" if row["named"] else "   NOT NAMED")
        print(f"  {row['cpu_seconds']:5.1f} s  {row['fault']:36} {row['property']}  [{needs}]")


def show_styles(rows: list[dict[str, Any]]) -> None:
    """A line per style, and what was rejected."""
    print(f"\n{sum(bool(row['rejected']) for row in rows)} of {len(rows)} correct styles rejected")
    for row in rows:
        print(f"  {row['style']:36} {row['cases']:6} cases of {row['seeds']} seeds, "
              f"worst {row['worst_share']:.2f} of what is allowed")  # fmt: skip
        for text in row["rejected"]:
            print(f"    REJECTED {text[:200]}")


PACKAGES = ("numpy", "ml_dtypes", "hypothesis", "torch")
PARTS = {
    "allowance": show_allowance,
    "correct": show_correct,
    "styles": show_styles,
    "faults": show_faults,
}


def parse() -> argparse.Namespace:
    """The options in the docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=record_path("verify"))
    parser.add_argument("--quick", action="store_true", help="a sample of everything")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="leave the others as they are"
    )
    return parser.parse_args()


def measure(part: str, pool: ProcessPoolExecutor, options: argparse.Namespace) -> list[Any]:
    """The rows of one part."""
    if part == "allowance":
        kinds = [(dtype, "normal") for dtype in DTYPES + FP8] + [(x, "common_mean") for x in FP8]
        return [measure_allowance(dtype, keys, values) for dtype, values in kinds for keys in KEYS]
    if part == "correct":
        return judge_correct(pool, options)
    if part == "styles":
        return judge_styles(pool, options)
    names = list(FAULTS)[:: 10 if options.quick else 1]
    return [
        future.result() for future in [pool.submit(in_one_thread, catch_fault, n) for n in names]
    ]


def main() -> None:
    """Run the parts, print their tables, write the result file after each."""
    options = parse()
    report = json.loads(options.output.read_text()) if options.output.exists() else {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for part in options.part or PARTS:
            start = time.monotonic()
            rows = measure(part, pool, options)
            run = {"quick": options.quick, "jobs": options.jobs,
                   "seconds": round(time.monotonic() - start)}  # fmt: skip
            report[part] = {"run": run, "rows": rows}
            PARTS[part](rows)
            done = options.part is None and part == list(PARTS)[-1]
            write_record(options.output, report, PACKAGES, whole=done)


if __name__ == "__main__":
    main()
