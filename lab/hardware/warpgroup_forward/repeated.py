"""The calls of lab/hardware/results/hopper_sustained.json, with their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa4.config import Problem, WarpgroupPipeline
from fa4.sim.machine import find_machine
from fa4.sim.predict import Prediction, predict
from lab.records import read_record

BURST, LATE = "5 to 20", "400 to 800"  # ms since a call was first made


@dataclass(frozen=True)
class RepeatedCall:
    """A call as it was measured, TFLOP/s, and as it is predicted."""

    problem: Problem
    tile: str
    burst: float
    sustained: float
    steady_w: float
    prediction: Prediction


def sustained_calls() -> Iterator[RepeatedCall]:
    """All of them."""
    machine = find_machine("h200")
    for call in read_record("hopper_sustained")["calls"]:
        kernel, sizes = call["kernel"], call["problem"]
        problem = Problem(
            batch=sizes["batch"], seqlen_q=sizes["seqlen"], seqlen_k=sizes["seqlen"],
            heads_q=sizes["heads"], heads_k=sizes["heads"], head_dim=kernel["head_dim"],
            head_dim_v=kernel["head_dim_v"], causal=kernel.get("causal", False),
        )  # fmt: skip
        pipeline = WarpgroupPipeline(**{"scheduler": "static", **kernel})
        yield RepeatedCall(
            problem=problem,
            tile=f"{64 * pipeline.consumers} x {pipeline.tile_n}"
            + ("" if pipeline.overlap else ", no overlap"),
            burst=call["tflops"][BURST],
            sustained=call["tflops"][LATE],
            steady_w=call["steady_w"],
            prediction=predict(problem, pipeline, machine),
        )
