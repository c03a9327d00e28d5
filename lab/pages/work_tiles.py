"""What a work tile takes beyond its steps, by published points: a table of docs/simulator.md.

Of the points of one kernel, source, head dim and mask the measured time of a work tile is a line in
the predicted one. A cost of each work tile, whatever its length, is where the line begins; a wrong
time of a step is its slope.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fa4.figures.accuracy import B200_FILE, KEPT_OUT_FILE
from fa4.plan.render import markdown_table
from fa4.sim.machine import find_machine
from fa4.sim.measurements import pipeline_for, read_measurements, select_rows
from fa4.sim.validation import Point, compare
from lab.benchmarks.baselines import flops_of
from lab.benchmarks.ratios import in_a_row

FEWEST = 3  # points, or any line would do


def line(measured: Sequence[float], predicted: Sequence[float]) -> tuple[float, float]:
    """(begin, slope) with the least squares of relative errors."""
    at, weights = np.array(predicted), 1 / np.array(measured)
    columns = np.stack([weights, at * weights], axis=1)
    (begin, slope), *_ = np.linalg.lstsq(columns, np.ones(len(at)), rcond=None)
    return float(begin), float(slope)


def of_a_tile(point: Point) -> tuple[float, float]:
    """Measured and predicted us of a work tile, of the SM that has most of them."""
    row = point.row
    machine = find_machine(row.gpu.lower())
    flops = 1e-6 * flops_of(row) / in_a_row(row.problem, pipeline_for(row, machine), machine)
    return flops / row.tflops, flops / point.predicted_tflops


def render_work_tiles() -> str:
    """Each kernel's line: those whose CTAs stay for the next work tile, and those that end."""
    groups = defaultdict(list)
    for path, name in ((B200_FILE, "b200"), (KEPT_OUT_FILE, "b200"), (KEPT_OUT_FILE, "gb300")):
        machine = find_machine(name)
        for point in compare(select_rows(read_measurements(path), machine)[0], machine).points:
            row = point.row
            if row.direction == "fwd":
                key = row.gpu, row.source, row.software, row.problem.head_dim, row.problem.causal
                groups[key].append(of_a_tile(point))
    rows = []
    for (gpu, source, software, head_dim, causal), times in groups.items():
        if len(times) >= FEWEST:
            begin, slope = line(*zip(*times, strict=True))
            ends = "ends" if causal else "stays"
            rows.append((f"{gpu} {source}", software, f"d{head_dim}{' causal' * causal}", ends,
                         len(times), f"{begin:+.1f} us", f"{slope:.2f}"))  # fmt: skip
    titles = ("published", "kernel", "calls", "CTA", "points", "each work tile", "each step, times")
    return markdown_table(titles, rows)
