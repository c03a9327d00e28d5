"""The random calls of the record, with the simulator's predictions: none was fitted to their times.

python -m lab.hardware.warpgroup_forward.predicted

The record's calls were drawn after the model: what it left out had been looked for in calls of an
earlier record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from fa4.config import Problem
from fa4.designs.hopper_forward import choose
from fa4.sim.machine import find_machine
from fa4.sim.predict import predict
from lab.records import read_record

RECORD = "hopper_random"


@dataclass(frozen=True)
class PredictedCall:
    """A call and its TFLOP/s."""

    problem: Problem
    measured: float
    predicted: float

    @property
    def seconds(self) -> float:
        """Measured."""
        return self.problem.forward_flops / self.measured / 1e12

    @property
    def ratio(self) -> float:
        """How many times as fast as measured."""
        return self.predicted / self.measured


def predicted_calls(rows: Sequence[dict[str, Any]], machine: str) -> Iterator[PredictedCall]:
    """By the kernel that a call gets."""
    found = find_machine(machine)
    for row in rows:
        if "fa4" not in row["tflops"]:
            continue
        sizes = row["problem"] | {"window_size": tuple(row["problem"]["window_size"])}
        problem = Problem(**sizes)
        tflops = predict(problem, choose(problem, found.gpu), found).tflops
        yield PredictedCall(problem, row["tflops"]["fa4"], tflops)


def machine_of(record: dict[str, Any]) -> str:
    """The machine that a record is of."""
    return "h100" if "H100" in record["device"] else "h200"


def summarised(calls: Sequence[PredictedCall]) -> dict[str, float]:
    """Mean of the predicted speeds over the measured ones, mean error, rank correlation."""
    ranks = [
        np.argsort(np.argsort([getattr(call, name) for call in calls]))
        for name in ("measured", "predicted")
    ]
    return {
        "calls": len(calls),
        "times": geometric_mean(call.ratio for call in calls),
        "mean error": fmean(abs(call.ratio - 1) for call in calls),
        "rank": float(np.corrcoef(*ranks)[0, 1]),
    }


def main() -> None:
    """Prints the summaries and the worst calls."""
    record = read_record(RECORD)
    calls = list(predicted_calls(record["rows"], machine_of(record)))
    print(summarised(calls))
    for call in sorted(calls, key=lambda call: abs(np.log(call.ratio)))[-8:]:
        print(f"{call.ratio:.2f} {call.problem}")


if __name__ == "__main__":
    main()
