"""What a design is worth: the least that any set of constants predicts, and why it is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa4.config import Problem
from fa4.designs import design_of, plan_of
from fa4.plan.checks import check_plan
from fa4.sim.cost_table import HopperCosts
from fa4.sim.ensemble import ensemble_of
from fa4.sim.machine import Machine
from fa4.sim.predict import AnyPipeline, Simulation, call_seconds

GOOD, BEHIND = "good", "behind"
TENTH = 0.1  # by which Hopper's fitted and least certain constants move
MOVED = ("register_contention", "fetch_stall_cycles", "mbarrier_wait_cycles")
SPREAD = 7  # steps between values of a figure that the sets do not hold; prime to their number


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one design. status: GOOD; BEHIND, as soon as it is known to be behind the leaders; or why
    it is none: "contradiction", "registers", "tensor memory", "shared memory", "machine",
    "deadlock", "unsound" or "refused", with the reason in words.

    tflops: by the machine's own constants; least, most: by all sets of constants, of BEHIND by
    those that were asked. sets: how many were asked.
    """

    status: str
    reason: str = ""
    tflops: float = 0.0
    least: float = 0.0
    most: float = 0.0
    sets: int = 0

    @property
    def fits(self) -> bool:
        """Can it run?"""
        return self.status in (GOOD, BEHIND)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A problem and a machine with each set of constants, its own first."""

    problem: Problem
    machines: tuple[Machine, ...]
    simulation: Simulation

    @classmethod
    def of(cls, problem: Problem, machine: Machine, simulation: Simulation | None = None) -> Judge:
        """With all sets of constants that there are for the machine."""
        machines = (machine, *all_constants(machine))
        return cls(problem=problem, machines=machines, simulation=simulation or Simulation())

    def rate(self, pipeline: AnyPipeline, machine: Machine, simulation: Simulation) -> float:
        """TFLOP/s. Raises as `predict` does."""
        seconds = call_seconds(self.problem, pipeline, machine, simulation)
        return self.flops(pipeline) / seconds / 1e12

    def flops(self, pipeline: AnyPipeline) -> int:
        """Of the pass that the pipeline is for."""
        backward = design_of(pipeline).backward
        return self.problem.backward_flops if backward else self.problem.forward_flops

    def rates(self, pipeline: AnyPipeline) -> tuple[float, ...]:
        """By every set of constants, the machine's own first. Raises as `predict` does."""
        return tuple(self.rate(pipeline, x, self.simulation) for x in self.machines)

    def judge(self, pipeline: AnyPipeline, at_least: float = 0.0) -> Verdict:
        """Its verdict; BEHIND once a set of constants gives it less than `at_least`."""
        found: list[float] = []
        try:
            for machine in self.machines:
                found.append(self.rate(pipeline, machine, self.simulation))
                if found[-1] < at_least:
                    return _of(BEHIND, found)
            findings = check_plan(plan_of(pipeline, self.machines[0].gpu), self.machines[0].gpu)
        except (ValueError, TypeError, RuntimeError) as error:
            return refusal(error)
        if findings:
            return Verdict(status="unsound", reason=str(findings[0]))
        return _of(GOOD, found)


def _of(status: str, rates: Sequence[float]) -> Verdict:
    return Verdict(status=status, tflops=rates[0], least=min(rates), most=max(rates),
                   sets=len(rates))  # fmt: skip


# What a reason is counted under: the first whose words it has.
KINDS = (
    ("registers", "registers"), ("TMEM plan", "tensor memory"), ("shared memory", "shared memory"),
    ("tcgen05", "machine"), ("has none", "machine"), ("waits on", "deadlock"),
    ("cycle", "deadlock"),
)  # fmt: skip


def refusal(error: Exception) -> Verdict:
    """Of a design that cannot be simulated, in the error's words."""
    text = " ".join(str(error).split())
    kind = next((kind for words, kind in KINDS if words in text), "refused")
    if isinstance(error, RuntimeError):
        kind = "deadlock"
    return Verdict(status=kind, reason=text)


def all_constants(machine: Machine) -> tuple[Machine, ...]:
    """Every set of constants that fits what was measured as well as the machine's own.

    On Blackwell the recorded sets, among which figures with an interval that they do not hold are
    spread evenly; on Hopper the constants that were fitted or are uncertain, a tenth up and down.
    """
    costs = machine.costs
    if isinstance(costs, HopperCosts):
        return tuple(
            replace(machine, costs=replace(costs, **{name: getattr(costs, name) * factor}))
            for name in MOVED
            for factor in (1.0 - TENTH, 1.0 + TENTH)
        )
    found = ensemble_of(machine)
    low, high = type(costs).intervals()["mma_floor_cycles"]
    count = max(1, len(found) - 1)
    return tuple(
        replace(x, costs=replace(x.costs, mma_floor_cycles=low + (high - low) * place / count))
        for place, x in (((n * SPREAD) % len(found), x) for n, x in enumerate(found))
    )


def moved_figures(machines: Sequence[Machine]) -> dict[str, tuple[float, float]]:
    """Figure -> the least and most that the sets of constants hold, where they differ."""
    own = machines[0].costs
    values: dict[str, list[float]] = {}
    for name in own.sources():
        held = [float(getattr(x.costs, name)) for x in machines]
        if min(held) < max(held):
            values[name] = held
    return {name: (min(held), max(held)) for name, held in values.items()}


def timed(judge: Judge, pipeline: AnyPipeline, at_least: float) -> tuple[Verdict, float]:
    """The verdict, and the CPU seconds that it took."""
    start = time.process_time()
    return judge.judge(pipeline, at_least), time.process_time() - start


def plain_settings(settings: Any) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {str(name): value for name, value in sorted(settings.items())}
