"""Random plans, costs, pipelines and machines for the simulator's tests.

Costs are multiples of a quarter cycle, so that sums and scaling by powers of two are exact and
tests can ask for equality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from fa4.config import (
    BackwardConfig,
    BackwardPipeline,
    Exp2Split,
    ForwardConfig,
    ForwardPipeline,
)
from fa4.hardware import B200, Gpu
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Program, Role, Signal, Sync, Wait, Work
from fa4.sim.code import EventCode
from fa4.sim.cost_table import CostTable
from fa4.sim.lower import SignalCost, WorkCost, lower
from fa4.sim.machine import BLACKWELL_COSTS, Machine

UNITS = ("tensor", "smem", "tma")
TRIPS = ("outer", "inner")

CYCLES = st.integers(0, 400).map(lambda quarters: quarters / 4)


@dataclass(frozen=True)
class Drawn:
    """A plan with costs by name of work and of signal, and the work tiles to run."""

    plan: PipelinePlan
    works: Mapping[str, WorkCost]
    signals: Mapping[str, SignalCost]
    trips: np.ndarray

    @property
    def code(self) -> EventCode:
        """What the engines execute."""
        return lower(self.plan, lambda _, work: self.works[work.what],
                     lambda signal: self.signals[signal.name])  # fmt: skip


@dataclass
class _Builder:
    """Roles' steps by level: 0 once per tile, 1 in the outer loop, 2 in the inner one."""

    draw: st.DrawFn
    works: dict[str, WorkCost]
    steps: dict[str, tuple[list[list], list[list], list[list]]]

    def work(self) -> Work:
        """Some work on up to three units, or none; asynchronous half of the time."""
        units = self.draw(st.lists(st.sampled_from(UNITS), unique=True, max_size=3))
        name = f"w{len(self.works)}"
        self.works[name] = WorkCost(
            occupancy_cycles={unit: self.draw(CYCLES) for unit in units},
            latency_cycles=self.draw(CYCLES),
            issue_cycles=self.draw(CYCLES),
            passes=frozenset(self.draw(st.sets(st.sampled_from(UNITS)))),
            under=self.draw(st.none() | st.sampled_from(UNITS)),
            stretch={unit: self.draw(CYCLES) / 50 for unit in units},
        )
        return Work(name, Sync(), asynchronous=self.draw(st.booleans()))

    def place(self, role: str, level: int, fragment: list) -> None:
        """Put some consecutive steps of a role before, between or behind what is there."""
        blocks = self.steps[role][level]
        blocks.insert(self.draw(st.integers(0, len(blocks))), fragment)

    def arrive(self, signal: str) -> list:
        """Work, and an arrival at once or when a unit is done."""
        after = self.draw(st.sampled_from((None, *UNITS)))
        return [*(self.work() for _ in range(self.draw(st.integers(0, 2)))), Arrive(signal, after)]

    def program(self, role: str, peel: bool) -> Program:
        """The steps with their loops; `peel` takes one outer iteration out of the loop."""
        once, outer, inner = ([x for block in part for x in block] for part in self.steps[role])
        body = (*outer, Loop("inner", tuple(inner), offset=self.draw(st.integers(0, 1))))
        head: Program = body if peel else ()
        return (*head, *once, Loop("outer", body, offset=-1 if peel else 0))


@st.composite
def drawn_plans(draw: st.DrawFn) -> Drawn:
    """Rings and signals with several arrivers between a few roles; most run to the end."""
    roles = [f"r{i}" for i in range(draw(st.integers(1, 4)))]
    build = _Builder(draw, {}, {role: ([], [], []) for role in roles})
    signals: list[Signal] = []
    for number in range(draw(st.integers(0, 5))):
        level = draw(st.sampled_from((1, 1, 2, 0)))
        arrivers = draw(st.lists(st.sampled_from(roles), min_size=1, max_size=3, unique=True))
        waiters = draw(st.lists(st.sampled_from(roles), min_size=1, max_size=2, unique=True))
        free = draw(st.integers(0, 2))
        full = f"s{number}_full"
        signals.append(Signal(name=full, arrivals=dict.fromkeys(arrivers, 1),
                              waiters=tuple(waiters), free=free))  # fmt: skip
        for role in arrivers:
            build.place(role, level, build.arrive(full))
        for role in waiters:
            build.place(role, level, [Wait(full), build.work()])
        if draw(st.booleans()):  # the way back of a ring
            empty, slots = f"s{number}_empty", draw(st.integers(0, 3))
            signals.append(Signal(name=empty, arrivals=dict.fromkeys(waiters, 1),
                                  waiters=tuple(arrivers), free=slots))  # fmt: skip
            for role in waiters:
                build.place(role, level, build.arrive(empty))
            for role in arrivers:
                build.place(role, level, [Wait(empty)])
    for role in roles:
        build.place(role, draw(st.integers(0, 2)), [build.work()])
    peel = draw(st.booleans())
    plan = PipelinePlan(
        name="random",
        roles=tuple(_role(build, role, index, peel, signals) for index, role in enumerate(roles)),
        signals=tuple(signals),
        buffers=(),
        trips=TRIPS,
    )
    costs = {s.name: SignalCost(latency_cycles=draw(CYCLES), wait_cycles=draw(CYCLES))
             for s in signals}  # fmt: skip
    tiles = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4))
    return Drawn(plan, build.works, costs, np.array(tiles, np.int64).reshape(-1, 2))


def _role(build: _Builder, name: str, index: int, peel: bool, signals: list[Signal]) -> Role:
    """A role, in whose prologue it may do work and arrive once more."""
    prologue: Program = ()
    if build.draw(st.integers(0, 4)) == 0:
        prologue = (build.work(),)
        mine = [signal.name for signal in signals if name in signal.arrivals]
        if mine:
            prologue += (Arrive(build.draw(st.sampled_from(mine))),)
    return Role(name=name, warps=(index,), registers=32, prologue=prologue,
                program=build.program(name, peel))  # fmt: skip


RATES = st.sampled_from((0.5, 1.0, 2.0, 4.0))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """B200 with other rates and latencies."""
    gpu = replace(
        B200,
        sm_count=draw(st.integers(2, 200)),
        mma_flops_per_clk=int(B200.mma_flops_per_clk * draw(RATES)),
        exp_per_clk=int(B200.exp_per_clk * draw(RATES)),
        smem_bytes_per_clk=int(B200.smem_bytes_per_clk * draw(RATES)),
    )
    return Machine(gpu=gpu, costs=draw(cost_tables()))


@st.composite
def cost_tables(draw: st.DrawFn) -> CostTable:
    """B200's table with some figures between nothing and four times as much."""
    table = BLACKWELL_COSTS
    for name in (
        "mma_latency_cycles",
        "mma_issue_cycles",
        "tmem_load_latency_cycles",
        "tma_load_latency_cycles",
        "reduce_latency_cycles",
        "mbarrier_wait_cycles",
        "mbarrier_arrive_cycles",
        "sync_cycles",
        "hbm_latency_cycles",
    ):
        factor = draw(st.sampled_from((0.0, 0.5, 1.0, 1.0, 4.0)))
        table = replace(table, **{name: getattr(table, name) * factor})
    return replace(table, vector_efficiency=draw(st.sampled_from((0.4, 0.608, 1.0))))


def fits(plan: object, pipeline: object, gpu: Gpu) -> bool:
    """Does the pipeline's plan fit the machine's memories?"""
    try:
        plan(pipeline, gpu)  # type: ignore[operator]
    except ValueError:
        return False
    return True


@st.composite
def _any_forward(draw: st.DrawFn) -> ForwardPipeline:
    head_dim, head_dim_v = draw(st.sampled_from(((64, 64), (96, 96), (128, 128), (192, 128))))
    correction, p_space = draw(st.sampled_from((("warpgroup", "tmem"), ("inline", "tmem"),
                                                ("warpgroup", "smem"))))  # fmt: skip
    numerics = ForwardConfig(
        tile_n=draw(st.sampled_from((64, 128))),
        q_tiles=draw(st.integers(1, 2)),
        exp2=Exp2Split(frequency=draw(st.sampled_from((0, 8, 16)))),
    )
    return ForwardPipeline(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        element_bytes=draw(st.sampled_from((2, 2, 1))),
        numerics=numerics,
        cta_group=draw(st.integers(1, 2)),
        kv_stages=draw(st.sampled_from((None, None, 2, 3, 5))),
        ping_pong=draw(st.booleans()),
        correction=correction,
        p_space=p_space,
        split_p=draw(st.sampled_from((0.5, 0.75, 1.0))),
    )


@st.composite
def _any_backward(draw: st.DrawFn) -> BackwardPipeline:
    return BackwardPipeline(
        head_dim=draw(st.sampled_from((64, 96, 128))),
        numerics=BackwardConfig(cta_group=draw(st.integers(1, 2))),
        deterministic=draw(st.booleans()),
        causal=draw(st.booleans()),
        published=draw(st.booleans()),
    )


def forward_pipelines() -> st.SearchStrategy[ForwardPipeline]:
    """Forward pipelines that fit a B200."""
    return _any_forward().filter(lambda pipeline: fits(forward_plan, pipeline, B200))


def backward_pipelines() -> st.SearchStrategy[BackwardPipeline]:
    """Backward pipelines that fit a B200."""
    return _any_backward().filter(lambda pipeline: fits(backward_plan, pipeline, B200))
