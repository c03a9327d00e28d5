"""Predictions of a dozen calls in full: times, busy units, stalls, bounds.

The figures in the documentation rest on these. `tests/sim/test_predictions.py` predicts them again,
so that a change of a plan, a cost or the engine shows here, in numbers, before it shows elsewhere.
Usage: python -m lab.benchmarks.predictions [--output FILE]
"""

from __future__ import annotations

from typing import Any

from fa4.commands.predict import describe
from fa4.sim.ablate import ablate
from lab.benchmarks.common import parse_output, write_record

PUBLISHED = {"kernel": "published"}  # the kernel that published figures are of
# Between them: each kernel, machine, element type, mask and scheduler, widths of heads, and shapes
# with remainders.
CALLS: dict[str, dict[str, str]] = {
    "headline": {"seqlen": "32k", "heads": "16"},
    "causal, GQA": {"causal": "yes", "seqlen": "8k", "heads": "32", "heads_k": "8"},
    "remainders": {"seqlen": "4001", "seqlen_k": "5003", "batch": "3", "heads": "5",
                   "heads_k": "5", "causal": "yes"},
    "window": {"seqlen": "8k", "window": "1000,0", "head_dim": "64"},
    "wide heads": {"seqlen": "4k", "head_dim": "192", "head_dim_v": "128", "causal": "yes"},
    "one CTA, FP8": {"seqlen": "8k", "cta_group": "1", "dtype": "e4m3"},
    "inline correction": {"seqlen": "4k", "correction": "inline", "tau": "0"},
    "P in shared memory": {"seqlen": "4k", "p_space": "smem", "head_dim": "64"},
    "no ping-pong": {"seqlen": "4k", "ping_pong": "no"},
    "B300": {"machine": "b300", "seqlen": "8k", "causal": "yes"},
    "FA3 on an H100": {"machine": "h100", "kernel": "published",
                       "seqlen": "8k", "causal": "yes"},
    "FA3 on an H200": {"machine": "h200", "kernel": "published",
                       "seqlen": "4k", "head_dim": "64"},
    "backward": {"pass": "bwd", "seqlen": "8k", "batch": "4"},
    "backward, causal, one CTA": {"pass": "bwd", "seqlen": "4k", "causal": "yes",
                                  "cta_group": "1", "head_dim": "64"},
    "backward, deterministic": {"pass": "bwd", "seqlen": "4k", "deterministic": "yes",
                                "causal": "yes", "heads": "32", "heads_k": "8"},
    "published backward": {"pass": "bwd", "seqlen": "8k", "batch": "4", **PUBLISHED},
    "published backward, causal, one CTA": {"pass": "bwd", "seqlen": "4k", "causal": "yes",
                                            "cta_group": "1", "head_dim": "64", **PUBLISHED},
    "published backward, deterministic": {"pass": "bwd", "seqlen": "4k", "deterministic": "yes",
                                          "causal": "yes", "heads": "32", "heads_k": "8",
                                          **PUBLISHED},
    "ideas": {"seqlen": "4k", "causal": "yes"},
    "ideas of the backward pass": {"pass": "bwd", "seqlen": "4k"},
    "ideas of the published backward pass": {"pass": "bwd", "seqlen": "4k", **PUBLISHED},
}  # fmt: skip
FIGURES = ("seconds", "tflops", "peak_share", "cycles", "busiest", "bound", "unit_busy",
           "role_stalls", "imbalance", "kernels", "work_tiles", "events")  # fmt: skip


def figures(name: str) -> dict[str, Any]:
    """The figures of a call, or of what its ideas are worth."""
    if name.startswith("ideas"):
        return {x.idea.name: x.speedup or x.note for x in ablate(CALLS[name]).outcomes}
    report = describe(CALLS[name])
    return {key: report[key] for key in FIGURES}


def main() -> None:
    """Predict and write the result file."""
    options = parse_output((__doc__ or "").splitlines()[0], "predictions")
    found = {name: figures(name) for name in CALLS}
    for name, row in found.items():
        if "seconds" in row:
            print(f"{name:28} {row['seconds'] * 1e6:10.1f} us  {row['busiest']}")
    rows = {name: {"call": CALLS[name], **row} for name, row in found.items()}
    report = {"schema_version": 1, "predictions": rows}
    write_record(options.output, report, ("numpy", "numba"))


if __name__ == "__main__":
    main()
