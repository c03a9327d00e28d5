"""Predictions beside measurements: the error of each point, of all, and what is known of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from fa4.designs import Design, design_of, find_design
from fa4.hardware import GPUS
from fa4.sim.fields import FIELDS
from fa4.sim.machine import COSTS, Machine
from fa4.sim.measurements import Row, pipeline_for
from fa4.sim.options import SimulationRequest
from fa4.sim.power import POWER
from fa4.sim.predict import Simulation, predict

NINE_OF_TEN = 0.9


@dataclass(frozen=True)
class Point:
    """One measured point and its prediction."""

    row: Row
    predicted_tflops: float
    bottleneck: str

    @property
    def error(self) -> float:
        """Relative: positive if the model is too fast."""
        return self.predicted_tflops / self.row.tflops - 1.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All points of a comparison; `mape` is the mean of the absolute relative errors."""

    machine: str
    points: tuple[Point, ...]

    @property
    def mape(self) -> float:
        """Mean absolute relative error."""
        return sum(abs(point.error) for point in self.points) / len(self.points)

    @property
    def rank_correlation(self) -> float:
        """Of predicted and measured throughput (Spearman); 1 for fewer than two points."""
        if len(self.points) < 2:
            return 1.0
        columns = [[p.row.tflops, p.predicted_tflops] for p in self.points]
        return float(np.corrcoef(_ranks(np.array(columns)).T)[0, 1])

    @property
    def ratio_error(self) -> float:
        """Of the ratio of two predictions that are off, one up and one down, by what nine of ten
        further points are within: the ninth tenth of the errors and one that is larger than all."""
        errors = sorted(abs(point.error) for point in self.points)
        rank = math.ceil(NINE_OF_TEN * (len(errors) + 1))
        within = errors[min(rank, len(errors)) - 1]
        return (1.0 + within) / (1.0 - within) - 1.0

    @property
    def worst(self) -> Point:
        """The point with the largest absolute error."""
        return max(self.points, key=lambda point: abs(point.error))


def _ranks(columns: np.ndarray) -> np.ndarray:
    """Ranks in each column of (points, columns); equal values share the mean of theirs."""
    below = (columns[None] < columns[:, None]).sum(axis=1)
    level = (columns[None] == columns[:, None]).sum(axis=1)
    return below + (level - 1) / 2


def compare(rows: Seq[Row], machine: Machine, *, sustained: bool = False) -> Comparison:
    """Predict every row, in a burst or at the sustained clock. Raises ValueError naming the line
    that cannot be predicted, or the machine whose sustained clock is not known."""
    if sustained and machine.power is None:
        known = ", ".join(sorted(POWER))
        raise ValueError(
            f"a sustained clock is known of {known}; nobody has measured what operations take of "
            f"the power of {machine.name}"
        )
    points = []
    for row in rows:
        try:
            pipeline = pipeline_for(row, machine)
            simulation = Simulation(spread=row.spread)
            prediction = predict(row.problem, pipeline, at_clock(machine, row), simulation)
        except ValueError as error:
            raise ValueError(f"line {row.line}: {error}") from error
        tflops = prediction.tflops
        if sustained and prediction.sustained is not None:
            tflops = prediction.sustained.tflops
        points.append(Point(row, tflops, prediction.bottleneck))
    return Comparison(machine=machine.name, points=tuple(points))


def at_clock(machine: Machine, row: Row) -> Machine:
    """The machine at the clock that a row was measured with, where that was locked."""
    if row.clock_ghz is None:
        return machine
    gpu = replace(machine.gpu, clock_hz=row.clock_ghz * 1e9)
    return replace(machine, gpu=gpu, costs=replace(machine.costs, sustained_clock=1.0))


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What a machine's predictions of a kind of kernel were compared with, and how far off.

    choices: settings that were varied in the measurements. ratio: `Comparison.ratio_error`.
    """

    points: int
    mape: float
    worst: float
    ratio: float
    against: str
    head_dims: tuple[int, ...]
    seqlens: tuple[int, int]
    dtypes: tuple[str, ...] = ("bf16",)
    choices: tuple[str, ...] = ()


# Machine, pass (own: of this package's kernel) -> what `fa4 validate` prints;
# tests/sim/test_calibrate.py repeats the comparisons.
MEASURED: Mapping[tuple[str, str], Accuracy] = {
    ("b200", "fwd"): Accuracy(
        points=8,
        mape=0.021,
        worst=0.049,
        ratio=0.103,
        against="published FlashAttention-4 throughput of single CTAs, which the constants were "
        "fitted to",
        head_dims=(128,),
        seqlens=(1024, 32768),
        choices=("cta_group",),
    ),
    ("b200", "bwd"): Accuracy(
        points=7,
        mape=0.019,
        worst=0.039,
        ratio=0.080,
        against="published FlashAttention-4 throughput, which the constants were fitted to",
        head_dims=(128,),
        seqlens=(1024, 16384),
        choices=("deterministic",),
    ),
    ("h100", "fwd"): Accuracy(
        points=18,
        mape=0.080,
        worst=0.167,
        ratio=0.401,
        against="published FlashAttention-3 throughput, kept out of every fit; those of 8k tokens "
        "and more are within 5% of the predictions without a pause",
        head_dims=(64, 128),
        seqlens=(512, 16384),
        dtypes=("fp16",),
        choices=("tile_m", "tile_n"),
    ),
    ("h200", "own fwd"): Accuracy(
        points=680,
        mape=0.0424,
        worst=0.537,
        ratio=0.215,
        against="this package's Hopper forward on one H200, to which nothing was fitted",
        head_dims=(64, 96, 128, 256),
        seqlens=(4096, 16384),
        choices=(
            "tile_m",
            "tile_n",
            "p_source",
            "overlap",
            "kv_stages",
            "ping_pong",
            "scheduler",
        ),
    ),
    ("h200", "fwd"): Accuracy(
        points=176,
        mape=0.0385,
        worst=0.184,
        ratio=0.1735,
        against="flash-attn-4's Hopper forward with forced tiles on one H200, to which two "
        "constants were fitted",
        head_dims=(128,),
        seqlens=(4096, 16384),
        choices=("tile_m", "tile_n", "p_source", "overlap"),
    ),
}

KERNEL_TARGETS = ("pipeline", "numerics", "exp2")  # fields that change FlashAttention's choice


def known_accuracy(request: SimulationRequest) -> dict[str, object]:
    """The error measured for such a kernel, as plain data, and what of `request` never was."""
    machine = request.machine
    name, direction = machine.name.lower(), str(request.given.get("pass", "fwd"))
    design = _kernel(request)
    what = (design.measured_as or "") + direction
    accuracy = MEASURED.get((name, what))
    if accuracy is None:
        kind = "forward" if direction == "fwd" else "backward"
        own = "of this package " if what == "own fwd" else ""
        text = f"unknown: no {kind} {own}was ever compared with a measured {machine.name}"
        return {"measured": False, "applies": False, "outside": [], "text": text}
    outside = _unmeasured(request, accuracy)
    if (COSTS.get(name), GPUS.get(name)) != (machine.costs, machine.gpu):
        outside.append("other figures of the machine")
    text = (
        f"mean {accuracy.mape:.1%}, worst {accuracy.worst:.1%} on {accuracy.points} points of "
        f"{accuracy.against}"
    )
    if outside:
        text += f"; not measured: {', '.join(outside)}"
    return {
        "measured": True,
        "applies": not outside,
        "points": accuracy.points,
        "mape": accuracy.mape,
        "worst": accuracy.worst,
        "ratio": accuracy.ratio,
        "against": accuracy.against,
        "outside": outside,
        "text": text,
    }


def machine_mape(name: str) -> float | None:
    """Mean error over all that was measured on a machine; None if nothing was."""
    own = [accuracy for (machine, _), accuracy in MEASURED.items() if machine == name]
    points = sum(accuracy.points for accuracy in own)
    return sum(x.points * x.mape for x in own) / points if own else None


def _kernel(request: SimulationRequest) -> Design:
    """The kernel that was asked for, or that of the pipeline."""
    name = request.given.get("kernel")
    if name is None:
        return design_of(request.pipeline)
    backward = request.given.get("pass") == "bwd"
    return find_design(request.machine.gpu, backward=backward, kernel=str(name))


def _unmeasured(request: SimulationRequest, accuracy: Accuracy) -> list[str]:
    """What of a request lies outside the measured points."""
    design = _kernel(request)
    problem, given = request.problem, request.given
    least, most = accuracy.seqlens
    lengths = f"{problem.seqlen_q} queries, {problem.seqlen_k} keys"
    tuned = [
        item
        for item in given
        if item not in accuracy.choices
        and item in FIELDS
        and (item == "rescale_rate" or FIELDS[item].target in KERNEL_TARGETS)
    ]
    checks = {
        f"head dims {problem.head_dim}, {problem.head_dim_v}": (
            problem.head_dim == problem.head_dim_v and problem.head_dim in accuracy.head_dims
        ),
        problem.dtype: problem.dtype in accuracy.dtypes,
        lengths: problem.seqlen_q == problem.seqlen_k and least <= problem.seqlen_k <= most,
        "grouped heads": problem.heads_q == problem.heads_k,
        "a window": problem.window_size in ((None, None), (None, 0)),
        "sequences of unequal length": request.simulation.lengths is None,
        "pairs of CTAs forward": getattr(request.pipeline, "cta_group", 1) == 1,
        "this package's backward kernel": not (design.backward and design.compiled),
        f"kernel {design.kernel}": design.measured_as is not None,
        "a changed kernel (" + ", ".join(tuned) + ")": not tuned,
    }
    return [what for what, measured in checks.items() if not measured]
