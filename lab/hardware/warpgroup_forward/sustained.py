"""The Hopper forward kernel called without a pause for a second and more: speed, clock and power.

    python3 -m lab.hardware.warpgroup_forward.sustained FILE.json

After a pause each call is repeated for SECONDS; events between calls tell its speed from the first
milliseconds to the last, NVML the power. The GPU's power limit makes the difference. Needs torch
and CuTe-DSL.
"""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.hardware.hopper_units.measure import text_of
from lab.hardware.hopper_units.power import FIELDS, Poller
from lab.hardware.there import query
from lab.hardware.warpgroup_forward.measure import Inputs, Problem, compiled, from_bytes, make_spec

SECONDS, PAUSE_S, AHEAD = 1.6, 0.8, 16  # AHEAD: calls that are queued before the oldest is awaited
WINDOWS_MS = (0, 5, 20, 50, 100, 200, 400, 800, 1600)
WIDE = {"head_dim": 128, "head_dim_v": 128}
LONG, SHORT = {"seqlen": 16384, "batch": 1}, {"seqlen": 4096, "batch": 4}
# Fields of a spec, of a problem beyond head dims and mask, heads.
CALLS: tuple[tuple[dict[str, Any], dict[str, int], int], ...] = (
    ({**WIDE, "consumers": 3, "tile_n": 80}, SHORT, 16),
    ({**WIDE, "consumers": 3, "tile_n": 80}, LONG, 16),
    ({**WIDE, "consumers": 3, "tile_n": 80, "causal": True, "scheduler": "lpt"}, LONG, 16),
    ({**WIDE, "consumers": 2, "tile_n": 128}, SHORT, 16),
    ({**WIDE, "consumers": 2, "tile_n": 64, "overlap": False}, SHORT, 16),
    ({**WIDE, "consumers": 1, "tile_n": 128}, SHORT, 16),
    ({"head_dim": 64, "head_dim_v": 64, "consumers": 3, "tile_n": 128}, SHORT, 32),
    ({"head_dim": 64, "head_dim_v": 64, "consumers": 1, "tile_n": 64}, SHORT, 32),
    ({"head_dim": 192, "head_dim_v": 128, "consumers": 3, "tile_n": 80}, SHORT, 16),
    ({"head_dim": 256, "head_dim_v": 256, "consumers": 2, "tile_n": 80}, SHORT, 8),
)


def repeated(function: Callable[[], Any]) -> list[float]:
    """Milliseconds at the end of each call since the first began, until SECONDS are over."""
    import torch

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    begun, events = time.monotonic(), [event()]
    while time.monotonic() - begun < SECONDS:
        function()
        events.append(event())
        if len(events) > AHEAD:
            events[-AHEAD].synchronize()
    torch.cuda.synchronize()
    return [events[0].elapsed_time(other) for other in events[1:]]


def windows(ends: list[float], flops: float) -> dict[str, float]:
    """TFLOP/s of the calls that end within each of WINDOWS_MS and lie in it as a whole."""
    found = {}
    starts = [0.0, *ends[:-1]]
    for first, last in itertools.pairwise(WINDOWS_MS):
        inside = [(a, b) for a, b in zip(starts, ends, strict=True) if a >= first and b <= last]
        if inside:
            rate = len(inside) * flops / (inside[-1][1] - inside[0][0]) / 1e9
            found[f"{first} to {last}"] = round(rate, 1)
    return found


def measure(kernel: Any, problem: Problem, poller: Poller) -> dict[str, Any]:
    """One call, repeated."""
    import torch

    given = Inputs(kernel.spec, problem.batch, problem.seqlen, problem.seqlen, problem.heads)
    given.launch(kernel)
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    begin = time.time_ns()
    ends = repeated(lambda: given.launch(kernel))
    stop = time.time_ns()
    during = [sample for sample in poller.samples if begin <= sample[0] <= stop]
    polled = {name: [round(float(x[i + 1]), 1) for x in during] for i, name in enumerate(FIELDS)}
    late = polled["power_w"][len(during) // 2 :]
    return {
        "calls": len(ends),
        "tflops": windows(ends, problem.flops),
        "first_ms": [round(x, 3) for x in ends[:8]],
        "steady_w": statistics.median(late),
        "polled_ms": [round(1e-6 * (sample[0] - begin), 1) for sample in during],
        **polled,
    }


def main() -> None:
    """Compiles, measures, writes."""
    specs = [json.dumps(fields, sort_keys=True) for fields, _, _ in CALLS]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        items = [(text, json.loads(text)) for text in dict.fromkeys(specs)]
        made = {name: (data, why) for name, data, why in pool.map(compiled, items)}
    rows = []
    with Poller() as poller:
        for text, (fields, lengths, heads) in zip(specs, CALLS, strict=True):
            data, why = made[text]
            if not data:
                sys.exit(f"{fields}: {why}")
            kernel = from_bytes(data, make_spec(fields))
            dims = {name: fields[name] for name in ("head_dim", "head_dim_v")}
            causal = fields.get("causal", False)
            problem = Problem(**dims, causal=causal, heads=heads, **lengths)
            row = {"kernel": fields, "problem": {**lengths, "heads": heads}}
            rows.append(row | measure(kernel, problem, poller))
            print(fields, lengths, rows[-1]["tflops"], rows[-1]["steady_w"], flush=True)
    report = {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT", ""),
        "machine": query("name", "driver_version", "power.limit", "clocks.max.sm"),
        "calls": rows,
    }
    Path(sys.argv[1]).write_text(text_of(report), encoding="utf-8")


if __name__ == "__main__":
    main()
