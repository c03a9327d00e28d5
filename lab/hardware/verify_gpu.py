"""`fa4 verify` on the attention kernels of a GPU: what the kit finds in each, as one JSON file.

    python -m lab.hardware.verify_gpu --out out.json flash-attn-4 torch-sdpa-cudnn

Each back end runs in worker processes, in turn and for at most --seconds: properties that did not
get their turn are listed as skipped. The file is written after each back end and after each
property, so that a run that is cut off leaves what it found. A back end that is not installed here
is one line in the file, not the end of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fa4.testing import Backend, PropertyResult, find_properties, load_backend
from fa4.testing.isolation import isolate
from fa4.testing.report import FAILED, NOT_COVERED, NOT_ROBUST, PASSED, VerifyReport
from fa4.testing.runner import VerifyOptions, run_property
from lab.machine import describe_run

BACKENDS = (
    "flash-attn-4",
    "torch-sdpa-cudnn",
    "torch-sdpa-flash",
    "torch-sdpa-efficient",
    "flex-attention",
)


def main() -> None:
    """Run, print a line per property and a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backends", nargs="*", default=BACKENDS, metavar="BACKEND")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=20, help="cases per property")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="for each back end")
    parser.add_argument("--jobs", type=int, default=4, help="processes for each back end")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one call")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="only these properties")
    parser.add_argument("--dtype", action="append", metavar="NAME", help="only these types")
    arguments = parser.parse_args()
    options = VerifyOptions(
        max_examples=arguments.examples,
        seed=arguments.seed,
        only=tuple(arguments.only) if arguments.only else None,
        dtypes=tuple(arguments.dtype) if arguments.dtype else None,
        timeout_s=arguments.timeout,
    )
    result: dict[str, Any] = describe_run(("numpy", "hypothesis")) | describe_gpu()
    result["options"] = {"max_examples": options.max_examples, "seed": options.seed,
                         "seconds": arguments.seconds, "timeout_s": options.timeout_s}  # fmt: skip
    result["backends"] = {}
    for name in arguments.backends:
        for entry in judge(name, options, arguments.seconds, arguments.jobs):
            result["backends"][name] = entry
            write(arguments.out, result)
    print(table(result["backends"]), "", findings(result["backends"]), sep="\n", flush=True)


def judge(name: str, options: VerifyOptions, seconds: float, jobs: int) -> Iterator[dict[str, Any]]:
    """What is known of one back end, after each of its properties."""
    start = time.monotonic()
    try:
        isolate(load_backend(name), timeout_s=options.timeout_s).close()
    except ValueError as error:
        print(f"{name}: {error}", flush=True)
        yield {"error": str(error)}
        return
    chosen = [prop.name for prop in find_properties(options.only)]
    results: dict[str, PropertyResult] = {}
    notes: dict[str, str] = {}
    replaced: dict[int, int] = {}
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), start_process, (name, options))
    try:
        futures = [pool.submit(run_one, prop, start + seconds) for prop in chosen]
        for future in as_completed(futures):
            found = future.result()
            if found is None:
                continue
            last, its_notes, process, count = found
            results[last.name] = last
            notes = its_notes | notes
            replaced[process] = count
            print(f"{name} {len(results)}/{len(chosen)} {last.name}: {last.status}, {last.cases} "
                  f"cases, {last.seconds:.1f} s {last.error[:200]}", flush=True)  # fmt: skip
            report = VerifyReport(
                backend=name,
                max_examples=options.max_examples,
                seed=options.seed,
                results=tuple(results[prop] for prop in chosen if prop in results),
                not_covered=notes,
                skipped=tuple(prop for prop in chosen if prop not in results),
                seconds=time.monotonic() - start,
            )
            yield summary(report) | {"processes_replaced": sum(replaced.values())}
    finally:
        pool.shutdown(cancel_futures=True)


_mine: tuple[Backend, VerifyOptions] | None = None


def start_process(name: str, options: VerifyOptions) -> None:
    """Load the back end of one of the processes; it calls a worker process of its own."""
    global _mine
    _mine = isolate(load_backend(name), timeout_s=options.timeout_s), options


def run_one(name: str, deadline: float) -> tuple[PropertyResult, dict[str, str], int, int] | None:
    """(result, what is not covered, this process, workers replaced); None if time is up."""
    if time.monotonic() > deadline or _mine is None:
        return None
    backend, options = _mine
    (prop,) = find_properties([name])
    result = run_property(prop, backend, options)
    return result, dict(backend.notes), os.getpid(), backend.function.process.replaced


def summary(report: VerifyReport) -> dict[str, Any]:
    """Counts, groups of failures, the worst share of the budget, and a line per property."""
    data = report.as_dict()
    shares = [
        (result.worst_share, result.name)
        for result in report.results
        if result.status == PASSED and result.worst_share is not None
    ]
    worst, where = max(shares, default=(None, ""))
    keep = ("counts", "cases", "seconds", "failures", "skipped", "not_covered")
    lines = [
        {"name": result.name, "status": result.status, "cases": result.cases,
         "worst_share": result.worst_share, "error": result.error, "example": result.example,
         "reason": result.reason[:300]}
        for result in report.results
    ]  # fmt: skip
    return {
        **{key: data[key] for key in keep},
        "worst_share_of_passed": worst,
        "worst_property": where,
        "properties": lines,
    }


def table(backends: dict[str, Any]) -> str:
    """Kernels, cases and what passed, as Markdown."""
    head = (PASSED, FAILED, NOT_ROBUST, NOT_COVERED)
    lines = [f"| kernel | cases | {' | '.join(head)} | skipped | worst share |", "|---" * 8 + "|"]
    for name, entry in backends.items():
        if "error" in entry:
            lines.append(f"| {name} | {entry['error']} |" + " |" * 6)
            continue
        counts = [str(entry["counts"][status.replace(" ", "_")]) for status in head]
        share = entry["worst_share_of_passed"]
        shown = "" if share is None else f"{share:.2f} ({entry['worst_property']})"
        lines.append(
            f"| {name} | {entry['cases']} | {' | '.join(counts)} | {len(entry['skipped'])} | "
            f"{shown} |"
        )
    return "\n".join(lines)


def findings(backends: dict[str, Any]) -> str:
    """A line per cause of failure."""
    return "\n".join(
        f"- {name}: {len(group['properties'])} properties need {', '.join(group['needs'])}: "
        f"{group['error'][:300]} {group['example']}"
        for name, entry in backends.items()
        for group in entry.get("failures", ())
    )


def describe_gpu() -> dict[str, Any]:
    """The GPU and the versions that decide its results; FA4_COMMIT where there is no git."""
    from importlib import metadata

    found: dict[str, Any] = {}
    if os.environ.get("FA4_COMMIT"):
        found["commit"] = os.environ["FA4_COMMIT"]
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    wanted = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "triton", "xformers")
    here = {entry.metadata["Name"]: entry.version for entry in metadata.distributions()}
    found["gpu_packages"] = {name: here[name] for name in wanted if name in here}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    """The whole file or none of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, default=float) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
