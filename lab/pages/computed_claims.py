"""Numbers of sentences that the code computes: what is predicted, planned, or an error of that.

A claim's name says what it is; its value is the text that stands in a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from fa4.config import BackwardConfig, BackwardPipeline, ForwardPipeline
from fa4.figures.accuracy import H100_FILE
from fa4.figures.ideas import collect_ablation, collect_roofline
from fa4.figures.kernels import collect_smem
from fa4.hardware import B200
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.plan.schema import PipelinePlan
from fa4.sim.ablate import ablate
from fa4.sim.machine import COSTS, find_machine
from fa4.sim.measurements import read_measurements, select_rows
from fa4.sim.options import build
from fa4.sim.power import H200_POWER
from fa4.sim.predict import REAL_RESCALE_RATE, Prediction
from fa4.sim.roofline import roofline_terms
from fa4.sim.validation import Comparison, compare
from lab.pages.distributed_tables import earlier_rings, eight_gpus, ring_errors
from lab.pages.simulator_tables import (
    apart,
    counted_kernels,
    measured,
    published,
    simulated,
    sustained_calls,
)

REAL: Mapping[str, object] = {"rescale_rate": REAL_RESCALE_RATE}
ONE_CTA: Mapping[str, object] = {"cta_group": 1}
TILE_KEYS = 128
SWIZZLE_BYTES = 128  # the widest box of TMA: a row of the swizzle (PTX ISA, tensor maps)


def predicted(**settings: object) -> Prediction:
    """What `fa4 predict` predicts with these settings."""
    return _predicted(tuple(sorted(settings.items())))


@cache
def _predicted(settings: tuple[tuple[str, object], ...]) -> Prediction:
    return build(dict(settings)).predict()


def worth(idea: str, **settings: object) -> float:
    """Time without an idea over the time with it, as `fa4 ablate` has it."""
    return _worth(tuple(sorted(settings.items())))[idea]


@cache
def _worth(settings: tuple[tuple[str, object], ...]) -> dict[str, float]:
    return {x.idea.name: x.speedup for x in ablate(dict(settings)).outcomes if x.speedup}


def added(idea: str) -> float:
    """TFLOP/s that an idea adds in the waterfall of `fa4 figures ablation`."""
    rows = {name: after - before for name, before, after in waterfall()["rows"]}
    found: float = rows[idea]
    return found


@cache
def waterfall() -> dict[str, Any]:
    """The numbers of that figure."""
    return collect_ablation()


def forward_step(**changes: Any) -> dict[str, float]:
    """Cycles of a forward step on each unit, as `fa4 roofline` has them."""
    plan = forward_plan(ForwardPipeline(head_dim=128, **changes), B200)
    return dict(roofline_terms(plan, find_machine("b200"), paper=True).totals)


def backward_step(cta_group: int, published: bool = False) -> dict[str, float]:
    """The same of a backward step."""
    tiles = BackwardConfig(cta_group=cta_group)
    pipeline = BackwardPipeline(head_dim=128, numerics=tiles, published=published)
    plan = backward_plan(pipeline, B200)
    return dict(roofline_terms(plan, find_machine("b200"), paper=True).totals)


def operand_cycles() -> float:
    """Cycles that shared memory takes for the operands of a forward step of one Q tile alone."""
    plan = forward_plan(ForwardPipeline(head_dim=128), B200)
    terms = roofline_terms(plan, find_machine("b200")).terms["smem"]
    return sum(cycles for name, cycles in terms.items() if name.endswith((" A", " B"))) / 2


@cache
def tile_cycles(machine: str, unit: str) -> float:
    """Cycles of a tile in the figure `fa4 figures roofline`."""
    rows = {(row[0], row[1]): row[2] for row in collect_roofline()["rows"]}
    found: float = rows[machine, unit]
    return found


@cache
def plan() -> PipelinePlan:
    """Of the tile that docs/tile.md follows."""
    return forward_plan(ForwardPipeline(head_dim=128), B200)


@cache
def h100() -> Comparison:
    """FlashAttention-3's published throughput on an H100, as bursts."""
    machine = find_machine("h100")
    rows, _ = select_rows(read_measurements(H100_FILE), machine, "FA3")
    return compare(rows, machine)


@cache
def sustained_errors() -> tuple[float, ...]:
    """Of the share of the clock that is left in each call that was repeated for long."""
    found = []
    for call in sustained_calls():
        assert call.prediction.sustained is not None
        share = call.sustained / call.burst
        found.append(abs(call.prediction.sustained.clock_share / share - 1))
    return tuple(found)


@cache
def within_five_points() -> dict[str, tuple[int, int]]:
    """Shares of time beside hardware counters: how many are close, and of how many."""
    near = {"tensor": [0, 0], "waits": [0, 0]}
    for _, kernel in counted_kernels():
        there, here = measured(kernel), simulated(kernel["configuration"])
        far = apart(there, here)
        for name in there:
            kind = near["waits" if "waits" in name else "tensor"]
            kind[0] += name not in far
            kind[1] += 1
    return {name: (kind[0], kind[1]) for name, kind in near.items()}


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def saved_with_loads() -> float:
    """Share of a lone backward CTA's bytes that a pair does not move (`fa4 figures smem`)."""
    rows = collect_smem()["rows"]
    alone, pair = (sum(row[2] for row in rows if row[0] == group) for group in (1, 2))
    saved: float = 1 - pair / alone
    return saved


def loads_of_a_step() -> float:
    """Cycles of the shared-memory port that a forward step's copies of K and V take."""
    terms = roofline_terms(plan(), find_machine("b200")).terms["smem"]
    return sum(cycles for name, cycles in terms.items() if name.startswith("load"))


COMPUTED: dict[str, Callable[[], str]] = {
    "largest error, earlier rings": lambda: (
        f"{max(abs(row.predicted / row.value - 1) for row in earlier_rings()):.1%}"
    ),
    "rings of two H200s": lambda: f"{len(ring_errors())}",
    "mean error, rings of two H200s": lambda: f"{fmean(map(abs, ring_errors())):.1%}",
    "largest error, rings of two H200s": lambda: f"{max(map(abs, ring_errors())):.0%}",
    "largest error, 8 H800": lambda: (
        f"{100 * max(abs(row.predicted - row.value) for row in eight_gpus()):.1f}"
    ),
    "headline TFLOP/s": lambda: f"{predicted().tflops:.0f}",
    "headline TFLOP/s, one CTA": lambda: f"{predicted(**ONE_CTA).tflops:.0f}",
    "a real model's rescales": lambda: f"{REAL_RESCALE_RATE:.0%}",
    "without ping-pong": lambda: f"{worth('ping-pong'):.2f}",
    "without correction warpgroup": lambda: f"{worth('correction warpgroup'):.2f}",
    "without correction warpgroup, 8% rescale": lambda: (
        f"{worth('correction warpgroup', **REAL):.2f}"
    ),
    "without P in tensor memory": lambda: f"{worth('P in tensor memory'):.2f}",
    "without P in tensor memory, 8% rescale": lambda: f"{worth('P in tensor memory', **REAL):.2f}",
    "without correction warpgroup, one CTA": lambda: (
        f"{worth('correction warpgroup', **ONE_CTA):.2f}"
    ),
    "without software exp2, one CTA": lambda: f"{worth('software exp2', **ONE_CTA):.2f}",
    "without software exp2, one CTA, 8% rescale": lambda: (
        f"{worth('software exp2', **ONE_CTA, **REAL):.2f}"
    ),
    "correction warpgroup in the waterfall": lambda: f"{added('correction warpgroup'):+.0f}",
    "cost of a forward pair": lambda: f"{1 - worth('CTA pairs'):.0%}",
    "cost of a forward pair that rescales": lambda: f"{1 - worth('CTA pairs', **REAL):.0%}",
    "mean error, published B200": lambda: f"{published().mape:.1%}",
    "points, published B200": lambda: f"{len(published().points)}",
    "mean error, published H100": lambda: f"{h100().mape:.1%}",
    "points, published H100": lambda: f"{len(h100().points)}",
    "mean error, sustained clock": lambda: f"{mean(sustained_errors()):.1%}",
    "worst error, sustained clock": lambda: f"{100 * max(sustained_errors()):.1f}%",
    "kernels near the counters, tensor core": lambda: f"{within_five_points()['tensor'][0]}",
    "shares near the counters, waits": lambda: f"{within_five_points()['waits'][0]}",
    "shares compared, waits": lambda: f"{within_five_points()['waits'][1]}",
    "forward step, loads": lambda: f"{loads_of_a_step():.0f}",
    "forward step, shared memory with loads": lambda: (
        f"{roofline_terms(plan(), find_machine('b200')).totals['smem']:.0f}"
    ),
    "a Q tile, tensor core": lambda: f"{forward_step()['tensor'] / 2:.0f}",
    "a Q tile, shared memory": lambda: f"{forward_step()['smem'] / 2:.0f}",
    "a Q tile, operands": lambda: f"{operand_cycles():.0f}",
    "a tile in the figure, shared memory": lambda: f"{tile_cycles('B200', 'smem'):.0f}",
    "backward step, tensor core": lambda: f"{backward_step(1)['tensor']:,.0f}",
    "backward product": lambda: f"{backward_step(1)['tensor'] / 5:.0f}",
    "backward step, exponentials": lambda: f"{backward_step(1)['mufu']:,.0f}",
    "backward step, shared memory": lambda: f"{backward_step(1)['smem']:,.0f}",
    "backward step, shared memory, pair": lambda: f"{backward_step(2)['smem']:,.0f}",
    "backward step, shared memory, published pair": lambda: (
        f"{backward_step(2, published=True)['smem']:,.0f}"
    ),
    "bytes saved by a backward pair, with loads": lambda: f"{saved_with_loads():.0%}",
    "KiB of a K tile": lambda: f"{plan().buffer('kv').size / 1024:g}",
    "KiB of the Q tiles": lambda: f"{2 * plan().buffer('q').size / 1024:g}",
    "KiB of the K and V ring": lambda: (
        f"{plan().buffer('kv').stages * plan().buffer('kv').size / 1024:g}"
    ),
    "KiB of a box": lambda: f"{TILE_KEYS * SWIZZLE_BYTES / 1024:g}",
    "elements of a box": lambda: f"{SWIZZLE_BYTES // 2}",
    "pJ of a product's FLOP": lambda: f"{H200_POWER.product_pj:.0f}",
    "pJ of an exponential": lambda: f"{H200_POWER.exp_pj:.0f}",
    "pJ of a byte from L2": lambda: f"{H200_POWER.l2_byte_pj:.0f}",
    "pJ of a byte from device memory": lambda: (
        f"{H200_POWER.l2_byte_pj + H200_POWER.hbm_byte_pj:.0f}"
    ),
    "power's exponent of the clock": lambda: f"{H200_POWER.exponent:.1f}",
    "H200's power limit": lambda: f"{H200_POWER.limit_w:.0f}",
    "contention of registers, fitted": lambda: f"{COSTS['h200'].register_contention:.1f}",
}
