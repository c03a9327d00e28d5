"""Writes the record of a run of `measure` on a GPU.

    python -m lab.hardware.warpgroup_fp8.record RESULTS.jsonl --gpu "NVIDIA H200, 132 SMs, 700 W"

The record has every call with the TFLOP/s of each variant, the errors of small calls and, of some
variants, those over many keys. Its stamp says of which commit (`python -m lab.records stamp`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from lab.records import record_path

HOW = (
    "8-bit inputs, random normal; median of 5 bursts of about 1.5 ms that take turns with the "
    "others', queued while the GPU sleeps; TFLOP/s count both products, half if causal"
)


def summarised(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Variants that were right, with errors, and calls with their speeds."""
    variants, calls, peer = {}, [], []
    for line in lines:
        what = line["what"]
        if what.startswith("checked ") and line["ok"]:
            kept = ("fields", "rms_of_plain", "largest_of_plain", "lse", "frame_bytes", "long")
            variants[what.removeprefix("checked ")] = {k: line[k] for k in kept if k in line}
        elif what == "peer flash-attn-3":
            peer = line["long"]
        elif what.startswith("time "):
            clocks = [reading[0] for one in line["state"].values() for reading in one]
            calls.append(
                line["problem"]
                | {"tflops": {k: round(v, 1) for k, v in line["tflops"].items()}}
                | {"median_mhz": statistics.median(clocks)}
            )
    return {"how": HOW, "variants": variants, "flash-attn-3": peer, "calls": calls}


def main() -> int:
    """Reads lines, writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--gpu", required=True, help="machine, SMs, power limit")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    path = record_path("warpgroup_fp8")
    path.write_text(json.dumps({"machine": arguments.gpu, **summarised(lines)}, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
