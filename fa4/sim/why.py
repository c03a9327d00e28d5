"""Why a call takes as long as it does: what its time depends on, not what is busy most.

`explain_why` joins the elasticities of units and constants, the critical chain of one step and the
neighbouring kernels. `limited_by` is the one meaning of that word in this package: the unit or
constant with the largest elasticity, if that stands out of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fa4.designs import plan_of
from fa4.sim.chain import CriticalChain, critical_chain
from fa4.sim.elasticity import RATES, Elasticities, Progress, measure
from fa4.sim.ensemble import Interval, seconds_of, speedup_interval
from fa4.sim.neighbours import Neighbour, neighbours
from fa4.sim.options import build
from fa4.sim.predict import call_seconds, make_runner, steps_rescaled
from fa4.sim.timeline import launch_order
from fa4.sim.validation import known_accuracy

if TYPE_CHECKING:
    from fa4.sim.options import SimulationRequest

MOST_WORK_TILES = 2**14  # above which an answer takes more than some seconds: only if asked for
TOP = 5
ALIKE = 0.001  # relative difference of times that are called equal


@dataclass(frozen=True, kw_only=True)
class Why:
    """neighbours: the fastest first. chain: None for a call without work.

    error: of the ratio of two predictions, `Comparison.ratio_error` of what was measured on this
    machine; None where nothing was. interval: of the best one's speedup, by all sets of constants.
    """

    elasticities: Elasticities
    chain: CriticalChain | None
    neighbours: tuple[Neighbour, ...]
    error: float | None
    interval: Interval | None = None

    @property
    def best(self) -> Neighbour | None:
        """The neighbour that gains most, if one gains anything."""
        first = next((found for found in self.neighbours if found.speedup), None)
        return first if first and first.speedup and first.speedup > 1 + ALIKE else None

    @property
    def gain(self) -> float:
        """How much faster `best` is, relatively; 0 without one."""
        return (self.best.speedup or 1.0) - 1.0 if self.best else 0.0

    @property
    def refused(self) -> tuple[Neighbour, ...]:
        """Neighbours that cannot run."""
        return tuple(found for found in self.neighbours if found.speedup is None)


def explain_why(
    request: SimulationRequest, progress: Progress | None = None, times: Sequence[float] = ()
) -> Why:
    """Some 100 simulations of the call. Raises as its prediction does.

    times: `seconds_of` the request where it is known.
    """
    request = replace(request, simulation=replace(request.simulation, exact=False))
    seconds = call_seconds(request.problem, request.pipeline, request.machine, request.simulation)
    found = Why(
        elasticities=elasticities(request, progress),
        chain=step_chain(request),
        neighbours=neighbours(request, seconds),
        error=ratio_error(request),
    )
    if found.best is None:
        return found
    changed = build({**request.given, found.best.setting: found.best.value})
    before = times or seconds_of(request)
    return replace(found, interval=speedup_interval(before, seconds_of(changed)))


def elasticities(request: SimulationRequest, progress: Progress | None = None) -> Elasticities:
    """Of the call's time."""
    problem, pipeline, simulation = request.problem, request.pipeline, request.simulation
    return measure(
        lambda machine: call_seconds(problem, pipeline, machine, simulation),
        request.machine, progress,
    )  # fmt: skip


def step_chain(request: SimulationRequest) -> CriticalChain | None:
    """Of one CTA in the middle of its longest work tile; None if there is no work."""
    work = launch_order(request.problem, request.pipeline, request.simulation)
    if not len(work.trips) or not work.trips[:, 0].max():
        return None
    plan = plan_of(request.pipeline, request.machine.gpu)
    runner = make_runner(
        plan, request.machine, request.simulation,
        rescaling=steps_rescaled(plan, request.simulation), ctas=plan.cta_group * len(work.trips),
    )  # fmt: skip
    return critical_chain(runner.code, work.trips)


def ratio_error(request: SimulationRequest) -> float | None:
    """Of the ratio of two predictions; None where nothing was measured."""
    ratio = known_accuracy(request).get("ratio")
    return ratio if isinstance(ratio, float) else None


def limited_by(found: Elasticities) -> str:
    """The unit or constant that the time depends on most; "" if none stands out of the noise."""
    return found.felt[0].name if found.felt else ""


def say_limit(found: Elasticities) -> str:
    """The limit in words, with what comes next."""
    name = limited_by(found)
    if not name:
        return f"nothing that stands out of the noise, {found.noise / 10:.1%} per 10%"
    first = f"{name}: 10% more of its cycles make the call {found.felt[0].value / 10:.1%} longer"
    if not found.felt[0].is_unit:
        way = "less" if name.endswith(RATES) else "more"
        first = f"{name}: 10% {way} of it makes the call {found.felt[0].value / 10:.1%} longer"
    units, others = found.shares
    return (
        f"{first}; all units together {units / 10:.1%}, latencies and constants {others / 10:.1%}"
    )
