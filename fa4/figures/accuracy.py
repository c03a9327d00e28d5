"""Predicted against measured throughput: published B200 figures, and our sweep of a Hopper kernel.

The measurements are files of the package: `fa4 validate --measurements` takes the path of one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fa4.base import drawing
from fa4.figures.entry import Data, FigureEntry

FOLDER = Path(__file__).parents[1] / "measured"
B200_FILE, HOPPER_FILE = FOLDER / "b200_published.csv", FOLDER / "hopper_sweep.csv"
H100_FILE = FOLDER / "h100_published.csv"  # FlashAttention-3: kept out of every fit
KEPT_OUT_FILE = FOLDER / "b200_kept_out.csv"  # B200 and GB300 by pull requests: of no fit
GROUPS = {  # colour, marker, name
    "b200 fwd": (drawing.BLUE, "o", "B200 forward (published)"),
    "b200 bwd": (drawing.VERMILION, "s", "B200 backward (published)"),
    "h200 fwd": (drawing.GREEN, "x", "H200 forward, this package's kernel, every tile size"),
}


def collect_measured() -> Data:
    """Every point: what was measured, and what the simulator says of the same call."""
    rows = [*published(), *swept()]
    left_out = sum(1 for _ in read_sweep()) - sum(row[0] == "h200 fwd" for row in rows)
    errors = {
        group: [abs(row[3] / row[2] - 1) for row in rows if row[0] == group] for group in GROUPS
    }
    b200 = errors["b200 fwd"] + errors["b200 bwd"]
    mean = {"B200": sum(b200) / len(b200),
            "H200": sum(errors["h200 fwd"]) / len(errors["h200 fwd"])}  # fmt: skip
    return {
        "title": f"Mean error {mean['B200']:.1%} on {len(b200)} points of B200, "
        f"{mean['H200']:.0%} on {len(errors['h200 fwd'])} of H200",
        "note": f"Constants were fitted to the B200 points. Of the sweep, {left_out} points are "
        "left out: kernels that spill registers, emulate exponentials, use the scheduler fold, or "
        "had inputs of larger spread.",
        "columns": ["group", "point", "measured TFLOP/s", "predicted TFLOP/s"],
        "rows": rows,
        "mean_error": mean,
    }


def published() -> Iterator[list[Any]]:
    """The published figures of FlashAttention-4 on B200."""
    from fa4.sim.machine import find_machine
    from fa4.sim.measurements import read_measurements, select_rows
    from fa4.sim.validation import compare

    machine = find_machine("b200")
    rows, _ = select_rows(read_measurements(B200_FILE), machine)
    for point in compare(rows, machine).points:
        row = point.row
        yield [f"b200 {row.direction}", row.label, row.tflops, point.predicted_tflops]


def read_sweep() -> Iterator[dict[str, str]]:
    """The rows of the sweep's file."""
    with HOPPER_FILE.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def swept() -> Iterator[list[Any]]:
    """Our kernel on H200 at all its tile sizes, as far as the simulator knows their settings."""
    from fa4.sim.machine import find_machine
    from fa4.sim.measurements import pipeline_for, read_measurements
    from fa4.sim.predict import predict

    machine = find_machine("h200")
    for cells, row in zip(read_sweep(), read_measurements(HOPPER_FILE), strict=True):
        if is_modelled(cells):
            usual: Any = pipeline_for(row, machine)
            pipeline = replace(usual, scheduler=cells["scheduler"])
            found = predict(row.problem, pipeline, machine)
            yield ["h200 fwd", row.label, row.tflops, found.tflops]


def is_modelled(row: dict[str, str]) -> bool:
    """Does the simulator know all settings of a row, and did nothing spill?"""
    plain = float(row["emulated_percent"]) == 0 and float(row["spread"]) == 1
    return plain and row["frame_bytes"] == "0" and row["scheduler"] in ("static", "lpt", "naive")


def draw_measured(figure: Any, data: Data) -> None:
    """Points around the line on which a prediction is right."""
    axes = figure.subplots()
    values = [value for row in data["rows"] for value in row[2:4]]
    low, high = 0.85 * min(values), 1.15 * max(values)
    axes.plot([low, high], [low, high], color=drawing.GREY, linewidth=1, label="equal")
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
                      color=drawing.PALE, zorder=0, label="within 10%")  # fmt: skip
    for group, (colour, marker, label) in reversed(GROUPS.items()):
        points = [row for row in data["rows"] if row[0] == group]
        face = {} if marker == "x" else {"facecolors": "white", "edgecolors": colour}
        axes.scatter([row[2] for row in points], [row[3] for row in points], marker=marker, s=26,
                     linewidths=1.2, **(face or {"color": colour}), zorder=3,
                     label=f"{label}: {len(points)}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    ticks = [tick for tick in (50, 100, 200, 300, 500, 700, 1000, 1500) if low < tick < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("measured TFLOP/s")
    axes.set_ylabel("predicted TFLOP/s")
    axes.legend(frameon=False, loc="upper left")
    axes.set_title(data["title"])


MEASURED = FigureEntry(
    name="measured",
    about="predicted against measured TFLOP/s: published B200, our Hopper sweep",
    sources="FlashAttention-4 paper, figures 4-6, and the flash-attention project (B200); own "
    "measurements on one H200 (fa4/measured/hopper_sweep.csv)",
    size_inches=(7.6, 7.4),
    collect=collect_measured,
    draw=draw_measured,
)
