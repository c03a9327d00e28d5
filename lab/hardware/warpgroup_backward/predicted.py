"""The calls of the gradients' records, with their predictions: nothing is fitted to their times.

python -m lab.hardware.warpgroup_backward.predicted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

import numpy as np

from fa4.config import Problem
from fa4.sim.hopper_backward import MOST_NARROW, predict_hopper_backward
from fa4.sim.machine import find_machine
from lab.hardware.warpgroup_forward.predicted import machine_of
from lab.records import read_record

NARROW, WIDE = "warpgroup_backward", "warpgroup_backward_wide"
FIXED = " deterministic"


@dataclass(frozen=True)
class PredictedGradient:
    """A call and its TFLOP/s."""

    problem: Problem
    deterministic: bool
    measured: float
    predicted: float

    @property
    def wide(self) -> bool:
        """Has it a kernel of dK and dV and one of dQ?"""
        return max(self.problem.head_dim, self.problem.head_dim_v) > MOST_NARROW

    @property
    def seconds(self) -> float:
        """Measured."""
        return self.problem.backward_flops / self.measured / 1e12

    @property
    def ratio(self) -> float:
        """How many times as fast as measured."""
        return self.predicted / self.measured


def predicted_gradients(record: str, *, deterministic: bool = False) -> Iterator[PredictedGradient]:
    """Of the kernels that fa4 chooses, in any or in a fixed order of sums."""
    machine = find_machine("h200")
    for row in read_record(record)["rows"]:
        sizes = row["problem"]
        problem = Problem(
            batch=sizes["batch"], seqlen_q=sizes["seqlen"], seqlen_k=sizes["seqlen"],
            heads_q=sizes["heads"], heads_k=sizes["heads"], head_dim=sizes["head_dim"],
            head_dim_v=sizes.get("head_dim_v") or sizes["head_dim"], causal=sizes["causal"],
        )  # fmt: skip
        measured = row["tflops"][name_of(problem) + FIXED * deterministic]
        found = predict_hopper_backward(problem, machine, deterministic=deterministic)
        yield PredictedGradient(problem, deterministic, measured, found.tflops)


def random_gradients(record: str) -> Iterator[PredictedGradient]:
    """Of a record of random calls."""
    found = read_record(record)
    machine = find_machine(machine_of(found))
    for row in found["rows"]:
        if "fa4" in row["tflops"]:
            sizes = row["problem"] | {"window_size": tuple(row["problem"]["window_size"])}
            problem = Problem(**sizes)
            tflops = predict_hopper_backward(problem, machine).tflops
            yield PredictedGradient(problem, False, row["tflops"]["fa4"], tflops)


def name_of(problem: Problem) -> str:
    """What the record calls the kernels that fa4 chooses."""
    dims = problem.head_dim, problem.head_dim_v
    return f"d{dims[0] if dims[0] == dims[1] else dims}{' causal' * problem.causal}"


def rank_correlation(calls: Sequence[PredictedGradient]) -> float:
    """Spearman's, of measured and predicted speeds."""
    ranks = [
        np.argsort(np.argsort([getattr(call, name) for call in calls]))
        for name in ("measured", "predicted")
    ]
    return float(np.corrcoef(*ranks)[0, 1])


def summarised(calls: Sequence[PredictedGradient]) -> dict[str, float]:
    """Mean of the predicted speeds over the measured ones, mean and largest error, rank."""
    errors = [abs(call.ratio - 1) for call in calls]
    return {
        "calls": len(calls),
        "times": geometric_mean(call.ratio for call in calls),
        "mean error": fmean(errors),
        "largest error": max(errors),
        "rank": rank_correlation(calls),
    }


def main() -> None:
    """A line for each kind of kernel."""
    for record, deterministic in ((NARROW, False), (NARROW, True), (WIDE, False)):
        found = summarised(list(predicted_gradients(record, deterministic=deterministic)))
        print(record + FIXED * deterministic, {k: round(v, 3) for k, v in found.items()})


if __name__ == "__main__":
    main()
