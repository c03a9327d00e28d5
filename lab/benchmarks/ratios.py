"""Ratios of two calls that pull requests published, by all sets of constants.

Of kernels without a mask whose CTAs stay for the next work tile, one of them tells what the
simulator leaves out, whatever it is: `staying_us` for each work tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa4.config import Problem
from fa4.designs.tiles import clusters
from fa4.sim.ensemble import seconds_of, speedup_interval
from fa4.sim.limits import count_tiles
from fa4.sim.machine import Machine, find_machine
from fa4.sim.measurements import pipeline_for
from fa4.sim.options import SimulationRequest, build
from fa4.sim.validation import Point
from lab.benchmarks.baselines import flops_of

TOKENS, LENGTHS = 32768, (1024, 2048, 4096, 8192, 16384)
MOST_US = 20.0


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast the second call was as the first, and how much it should be at least
    by every set of constants."""

    published: float
    at_least: float
    first: Mapping[str, object]
    second: Mapping[str, object]
    both: Mapping[str, object] = field(default_factory=dict)

    def calls(self, length: int) -> tuple[SimulationRequest, SimulationRequest]:
        """Both, of as many tokens in all."""
        asked = {"kernel": "published", "seqlen": length, "batch": TOKENS // length, **self.both}
        return build({**asked, **self.first}), build({**asked, **self.second})


STAYS = "FA PR#2738, GB300, head dim 64: a CTA for each work tile over one that stays"
RATIOS: Mapping[str, Ratio] = {
    "FA PR#2741, B200: one CTA over a pair": Ratio(
        published=1.205, at_least=1.10, first={"cta_group": 2}, second={"cta_group": 1}
    ),
    STAYS: Ratio(
        published=1.058, at_least=1.0, first={"scheduler": "static"}, second={"scheduler": "naive"},
        both={"machine": "gb300", "head_dim": 64, "heads": 32},
    ),
}  # fmt: skip


def ratio(asked: Ratio) -> dict[str, Any]:
    """Of each length by all sets of constants; and what the first call would have to take beyond
    its prediction for each work tile of an SM for the two to be as fast."""
    calls = {}
    for length in LENGTHS:
        first, second = asked.calls(length)
        before, after = seconds_of(first), seconds_of(second)
        found = speedup_interval(before, after)
        assert found is not None
        short = (after[0] - before[0]) / in_a_row(first.problem, first.pipeline, first.machine)
        calls[str(length)] = {
            "shipped": round(before[0] / after[0], 4), "least": round(found.least, 4),
            "most": round(found.most, 4), "short_us": round(1e6 * short, 3),
        }  # fmt: skip
    print(asked.published, calls)
    return {"published": asked.published, "at_least": asked.at_least, "calls": calls}


def in_a_row(problem: Problem, pipeline: Any, machine: Machine) -> int:
    """Work tiles of the SM, or pair, that has most of them."""
    tiles = problem.batch * count_tiles(problem, pipeline, problem.seqlen_q, problem.seqlen_k)
    return -(-tiles // clusters(machine.gpu, pipeline.cta_group))


def staying_us(asked: Ratio) -> float:
    """How much more for each work tile of the first call gives the ratio that was published, in the
    geometric mean over the lengths."""
    more_us = np.linspace(0.0, MOST_US, 2001)
    logs = np.zeros_like(more_us)
    for length in LENGTHS:
        first, second = asked.calls(length)
        tiles = in_a_row(first.problem, first.pipeline, first.machine)
        seconds = first.predict().seconds + 1e-6 * more_us * tiles
        logs += np.log(seconds / second.predict().seconds)
    return float(np.interp(math.log(asked.published), logs / len(LENGTHS), more_us))


def with_more(point: Point, more_us: float) -> float:
    """TFLOP/s of a point if each work tile of CTAs that stay takes so much more."""
    row, machine = point.row, find_machine(point.row.gpu.lower())
    pipeline = pipeline_for(row, machine)
    if getattr(pipeline, "scheduler", None) != "static":
        return point.predicted_tflops
    seconds = flops_of(row) / point.predicted_tflops / 1e12
    seconds += 1e-6 * more_us * in_a_row(row.problem, pipeline, machine)
    return flops_of(row) / seconds / 1e12
