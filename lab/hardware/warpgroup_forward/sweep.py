"""The sweep of the Hopper forward kernel's tiles: what to measure, and the table of it.

    python -m lab.hardware.warpgroup_forward.sweep plan PLAN.json
    python3 -m lab.hardware.warpgroup_forward.measure PLAN.json RESULTS.jsonl      # GPU
    nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv > GPU.csv
    python -m lab.hardware.warpgroup_forward.sweep table RESULTS.jsonl \
        fa4/measured/hopper_sweep.csv lab/hardware/results/hopper_sweep.json \
        --gpu GPU.csv --commit COMMIT

A row of the table is one call of one variant: tile sizes, stages, where P is held, overlap, turns,
scheduler, share of emulated exponentials, spread of the inputs (which sets how often O is
rescaled), bytes of a thread's frame (0: nothing spilled), TFLOP/s (median of bursts that took turns
with the other variants'), clock and power read behind the bursts. The JSON file says which GPU,
which driver and which commit of the kernel.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from fa4.hardware import H200
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sm90.forward.fragment import emulated_elements
from lab.hardware.warpgroup_forward.measure import make_spec

DIMS = {64: (64, 32), 96: (96, 16), 128: (128, 16), 192: (128, 16), 256: (256, 8)}  # dv, heads
TILE_N = {64: (64, 80, 96, 112, 128, 144, 160, 176, 192, 208), 96: (80, 96, 112, 128, 144, 176),
          128: (64, 80, 96, 112, 128, 144, 160, 176, 192, 208), 192: (64, 80, 96, 112, 128),
          256: (48, 64, 80)}  # fmt: skip
EMULATED = ((16, 2), (16, 4), (8, 2), (8, 4), (4, 2))  # frequency and residue
SPREADS = (1.0, 2.0, 4.0, 8.0)  # standard deviation of Q: of the scores too, as K's is 1
LENGTHS = ((4, 4096), (1, 16384))  # batch, seqlen
COLUMNS = (
    "gpu", "software", "pass", "head_dim", "head_dim_v", "causal", "seqlen", "batch", "heads",
    "dtype", "tile_m", "tile_n", "kv_stages", "p_source", "overlap", "ping_pong", "scheduler",
    "emulated_percent", "spread", "frame_bytes", "tflops", "clock_mhz", "power_w",
)  # fmt: skip


def variants() -> Iterator[dict[str, Any]]:
    """Fields of specs: tiles, P's source and overlap in all combinations; the rest one by one."""
    for dim, (value, _) in DIMS.items():
        dims = {"head_dim": dim, "head_dim_v": value}
        sources = ("registers", "smem") if dim in (64, 96, 128) else ("registers",)
        overlaps = (True, False) if dim in (64, 128) else (True,)
        for rows, tile_n, source, overlap in product((1, 2, 3), TILE_N[dim], sources, overlaps):
            yield {**dims, "consumers": rows, "tile_n": tile_n, "p_source": source,
                   "overlap": overlap}  # fmt: skip
    for dim, value, rows, tile_n in ((128, 128, 2, 128), (128, 128, 3, 80), (64, 64, 3, 128)):
        base = {"head_dim": dim, "head_dim_v": value, "consumers": rows, "tile_n": tile_n}
        for stages in (1, 3, 4):
            yield {**base, "kv_stages": stages}
        for turns in (True, False):
            yield {**base, "ping_pong": turns}
        for frequency, residue in EMULATED:
            yield {**base, "exp2": {"frequency": frequency, "residue": residue}}
        for scheduler in ("static", "snake", "lpt", "naive"):
            yield {**base, "causal": True, "scheduler": scheduler}
        for other, scheduler in product((64, 96, 112, 144), ("snake", "lpt")):
            yield {**base, "tile_n": other, "causal": True, "scheduler": scheduler}


def fits(fields: dict[str, Any]) -> bool:
    """Has the machine the shared memory?"""
    try:
        return warpgroup_plan(make_spec(fields).pipeline, H200).bytes_used("smem") > 0
    except ValueError:
        return False


def make_plan() -> dict[str, Any]:
    """Everything that `measure` reads."""
    chosen: dict[str, dict[str, Any]] = {}
    for fields in variants():
        if fits(fields) and fields not in chosen.values():
            chosen[f"v{len(chosen)}"] = fields
    problems = []
    for dim, (value, heads) in DIMS.items():
        for causal, (batch, seqlen) in product((False, True), LENGTHS):
            problem = {"head_dim": dim, "head_dim_v": value, "causal": causal, "seqlen": seqlen,
                       "batch": batch, "heads": heads}  # fmt: skip
            problems.append(problem)
            if dim in (64, 128) and not causal and batch > 1:
                rescaled = [name for name, fields in chosen.items()
                            if fields["head_dim"] == dim and "kv_stages" in fields]  # fmt: skip
                problems += [{**problem, "spread": s, "only": rescaled} for s in SPREADS[1:]]
    return {"variants": chosen, "problems": problems, "peers": []}


def rows(results: Path, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The table's rows."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    frames = {line["what"].removeprefix("checked "): line["frame_bytes"] for line in lines
              if line["what"].startswith("checked ")}  # fmt: skip
    for line in lines:
        for name, rate in line.get("tflops", {}).items():
            spec = make_spec(plan["variants"][name])
            emulated = emulated_elements(spec.numerics.exp2, spec.tile_n // 4)  # of a row and lane
            state = line["state"][name]
            yield {
                **line["problem"], "gpu": "H200", "software": "fa4 sm_90a", "pass": "fwd",
                "dtype": spec.dtype, "causal": int(spec.causal), "tile_m": 64 * spec.consumers,
                "tile_n": spec.tile_n, "kv_stages": spec.kv_stages, "p_source": spec.p_source,
                "overlap": int(spec.overlap), "ping_pong": int(spec.takes_turns),
                "scheduler": spec.scheduler, "frame_bytes": frames[name],
                "emulated_percent": round(100 * sum(emulated) / len(emulated), 1),
                "tflops": round(rate, 1),
                "clock_mhz": statistics.median(mhz for mhz, _ in state),
                "power_w": round(statistics.median(watts for _, watts in state)),
            }  # fmt: skip


def main() -> None:
    """Writes the plan, or the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan").add_argument("file", type=Path)
    table = commands.add_parser("table")
    table.add_argument("results", type=Path)
    table.add_argument("file", type=Path)
    table.add_argument("about", type=Path, help="what is said of the run as a whole")
    table.add_argument("--gpu", type=Path, required=True, help="what nvidia-smi said")
    table.add_argument("--commit", required=True, help="of the kernel that ran")
    given = parser.parse_args()
    plan = make_plan()
    if given.command == "plan":
        given.file.write_text(json.dumps(plan), encoding="utf-8")
        print(f"{len(plan['variants'])} variants, {len(plan['problems'])} calls")
        return
    with given.file.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found := list(rows(given.results, plan)))
    with given.gpu.open(newline="", encoding="utf-8") as file:
        (machine,) = csv.DictReader(file, skipinitialspace=True)
    about = {
        "commit": given.commit,
        "machine": machine,
        "points": len(found),
        "table": given.file.name,
    }
    given.about.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} points in {given.file}")


if __name__ == "__main__":
    main()
