"""Roofline of a plan: cycles that each unit of an SM needs for one steady-state step, term by term.

A step is one KV tile (forward) or one query tile (backward) of one CTA. The plan's programs are
walked, so a term is a piece of work that some role does in its loop, charged with the simulator's
cost rules. By the rules of the FlashAttention-4 paper (tensor core, shared-memory port,
exponentials; the port is charged for neither bulk loads nor row statistics) this gives its budgets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from fa4.config import Problem
from fa4.designs import design_of, plan_of
from fa4.designs.tiles import clusters
from fa4.plan.schema import Copy, Mma, PipelinePlan, Work, steady_work
from fa4.sim.costs import MachineCosts
from fa4.sim.limits import modelled
from fa4.sim.machine import Machine

if TYPE_CHECKING:
    from fa4.sim.predict import AnyPipeline

PAPER_UNITS = ("tensor", "smem", "mufu")

# What tells two Q tiles, fragments of a row or parts of a product apart: "PV1 tail" -> "PV".
_INSTANCE = re.compile(r"(?<=[A-Za-z])[01]\b|\s(?:\d+|head|tail)\b")

NO_SHARES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class RooflineTerms:
    """Cycles of one steady-state step of one CTA: unit -> term -> cycles."""

    plan: str
    machine: str
    terms: Mapping[str, Mapping[str, float]]

    @property
    def totals(self) -> dict[str, float]:
        """Cycles of a step by unit."""
        return {unit: sum(terms.values()) for unit, terms in self.terms.items()}

    @property
    def bound(self) -> float:
        """Cycles below which no step can be: those of the busiest unit."""
        return max(self.totals.values(), default=0.0)

    @property
    def bound_by(self) -> str:
        """The busiest unit; of equally busy ones the first, and the tensor core is first."""
        totals = self.totals
        return max(totals, key=lambda unit: totals[unit]) if totals else ""

    @property
    def tensor_share(self) -> float:
        """The most that the tensor core can be busy: its cycles over the bound."""
        return self.totals.get("tensor", 0.0) / self.bound if self.bound else 0.0


@dataclass(frozen=True, kw_only=True)
class ProblemRoofline:
    """A whole call at its roofline.

    unit_seconds: the main kernel on each unit, with its steps spread evenly over the chip, and its
    traffic at the data sheet's HBM bandwidth. seconds: the longest of them, plus the traffic of
    the kernels around it.
    """

    step: RooflineTerms
    steps: int
    unit_seconds: Mapping[str, float]
    bound_by: str
    seconds: float
    tflops: float


def roofline_terms(
    plan: PipelinePlan,
    machine: Machine,
    *,
    units: tuple[str, ...] = PAPER_UNITS,
    shares: Mapping[str, float] = NO_SHARES,
    paper: bool = False,
) -> RooflineTerms:
    """Walk one step of the plan's loops.

    `shares` are the run-time fractions that the plan names; 0 where not given, since work that may
    never happen cannot be part of a bound. paper: by its rules, not by all that is simulated.
    """
    # The paper has no least time of an instruction.
    table = replace(machine.costs, mma_floor_cycles=0.0) if paper else machine.costs
    costs = MachineCosts(machine.gpu, table, plan=None if paper else plan)
    terms: dict[str, dict[str, float]] = {unit: {} for unit in units}
    for role in sorted(plan.roles, key=lambda role: role.name != "mma"):  # products first
        for work in steady_work(role.program):
            share = 1.0 if work.share is None else shares.get(work.share, 0.0)
            occupancy = costs.work(role, work).occupancy_cycles
            if paper and _not_charged(work):
                occupancy = {unit: occupancy[unit] for unit in occupancy if unit != "smem"}
            for unit, cycles in occupancy.items():
                if unit in terms and share * cycles > 0:
                    for name, part in _named_parts(work, unit):
                        sums = terms[unit]
                        sums[name] = sums.get(name, 0.0) + share * cycles * part
    return RooflineTerms(plan=plan.name, machine=machine.name, terms=terms)


def problem_roofline(problem: Problem, pipeline: AnyPipeline, machine: Machine) -> ProblemRoofline:
    """Roofline time of one call: all its steps, and HBM."""
    plan, work = plan_of(pipeline, machine.gpu), modelled(pipeline)
    trips = work.tiles(problem, pipeline).trips
    before, main_bytes, after = work.traffic(problem, pipeline)
    around = before + after
    flops = problem.backward_flops if design_of(pipeline).backward else problem.forward_flops
    step, steps = roofline_terms(plan, machine), int(trips[:, 0].sum())
    cycle = 1.0 / machine.clock_hz / clusters(machine.gpu, plan.cta_group)
    seconds = {unit: steps * cycles * cycle for unit, cycles in step.totals.items()}
    seconds["hbm"] = main_bytes / machine.gpu.hbm_bytes_per_s
    bound_by = max(seconds, key=lambda unit: seconds[unit])
    total = seconds[bound_by] + around / machine.gpu.hbm_bytes_per_s
    return ProblemRoofline(
        step=step,
        steps=steps,
        unit_seconds=seconds,
        bound_by=bound_by,
        seconds=total,
        tflops=flops / total / 1e12 if total else 0.0,
    )


def _not_charged(work: Work) -> bool:
    """Does the paper leave it out of what shared memory does?"""
    loads = isinstance(work.amount, Copy) and work.amount.kind == "load"
    return loads or any(place.startswith("row_stats") for place in work.writes)


def _named_parts(work: Work, unit: str) -> list[tuple[str, float]]:
    """(term, share of the cycles) of a piece of work; a product's operands apart on the port."""
    name, amount = _INSTANCE.sub("", work.what), work.amount
    if unit != "smem" or not isinstance(amount, Mma):
        return [(name, 1.0)]
    total = amount.a_bytes + amount.b_bytes
    operands = (("A", amount.a_bytes), ("B", amount.b_bytes))
    return [(f"{name} {operand}", size / total) for operand, size in operands if size]
