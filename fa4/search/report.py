"""What a search found, as plain data: leaders, what was pruned, why the first leads, and what
measurement would decide between it and the best of another kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa4.designs import design_of
from fa4.search.judge import GOOD, Judge, Verdict, moved_figures
from fa4.search.run import Judged, SearchOutcome
from fa4.sim.elasticity import measure
from fa4.sim.ensemble import ALIKE, speedup_interval
from fa4.sim.options import SimulationRequest
from fa4.sim.predict import REAL_RESCALE_RATE, AnyPipeline, Simulation, call_seconds, predict
from fa4.sim.why import limited_by, say_limit, step_chain

MOST_KINDS = 6  # of other shapes that are compared in full
CHAIN_ROWS = 5
NEAR_TODAY = 0.9  # of today's least rate


@dataclass(frozen=True, kw_only=True)
class Today:
    """The pipeline that a call gets, and its rates by every set of constants."""

    pipeline: AnyPipeline
    rates: tuple[float, ...]

    @property
    def floor(self) -> float:
        """What a design must reach by every set of constants to be of interest."""
        return NEAR_TODAY * min(self.rates)


def build_report(outcome: SearchOutcome, judge: Judge, today: Today) -> dict[str, Any]:
    """The keys are what `--json` prints."""
    leaders = [describe(outcome, x, judge, today) for x in outcome.leaders]
    others = [describe(outcome, x, judge, today) for x in other_kinds(outcome, judge)]
    first = outcome.leaders[0] if outcome.leaders else None
    rival = others[0] if others else leaders[1] if len(leaders) > 1 else None
    return {
        "machine": judge.machines[0].name,
        "sets": len(judge.machines) - 1,
        "designs": len(outcome.space),
        "judged": outcome.judged,
        "from_journal": outcome.reused,
        "ended": outcome.ended,
        "cpu_seconds": outcome.cpu_seconds,
        "can_run": outcome.counts[GOOD] + outcome.counts["behind"],
        "pruned": {
            kind: {"count": count, "example": outcome.examples.get(kind, "")}
            for kind, count in sorted(outcome.counts.items(), key=lambda x: -x[1])
            if kind not in (GOOD, "behind")
        },
        "today": rates_report(today.rates)
        | {"sustained_least_tflops": least_at_its_power(today.pipeline, judge)},
        "leaders": leaders,
        "other_shapes": others,
        "why": None if first is None else why_first(first, judge),
        "deciding": None
        if first is None or rival is None
        else deciding(judge, first.pipeline, pipeline_of(outcome, rival)),
    }


def rates_report(rates: Sequence[float]) -> dict[str, float]:
    """A machine's own rate and what all sets of constants span, in TFLOP/s."""
    return {"tflops": rates[0], "least_tflops": min(rates), "most_tflops": max(rates)}


def pipeline_of(outcome: SearchOutcome, row: Mapping[str, Any]) -> AnyPipeline:
    """The pipeline of a described design."""
    return outcome.space.make(outcome.space.settings(row["number"]))


def describe(outcome: SearchOutcome, found: Judged, judge: Judge, today: Today) -> dict[str, Any]:
    """A design that can run: rates, what binds it, how it does where the maximum often rises.

    built: the name of the kernel that has it, for `--kernel`; None if there is none.
    """
    rates = judge.rates(found.pipeline)
    gain = speedup_interval([1 / x for x in today.rates], [1 / x for x in rates])
    said = predict(judge.problem, found.pipeline, judge.machines[0], judge.simulation)
    often = replace(judge.simulation, rescale_rate=REAL_RESCALE_RATE)
    design = design_of(found.pipeline)
    return {
        "number": found.number,
        "settings": outcome.space.settings(found.number),
        **rates_report(rates),
        "gain": rates[0] / today.rates[0],
        "gain_interval": None if gain is None else [gain.least, gain.most],
        "undecided": None if gain is None else gain.undecided,
        "sustained_least_tflops": least_at_its_power(found.pipeline, judge),
        "often_rescaled_tflops": judge.rate(found.pipeline, judge.machines[0], often),
        "built": None if design.compiled is None else design.kernel,
        "bound_by": said.bound_by,
        "bottleneck": said.bottleneck,
    }


def least_at_its_power(pipeline: AnyPipeline, judge: Judge) -> float | None:
    """Of the call repeated for long, by every set of constants; None where power is not known."""
    found = [predict(judge.problem, pipeline, machine, judge.simulation).sustained
             for machine in judge.machines]  # fmt: skip
    return min((x.tflops for x in found if x is not None), default=None)


def other_kinds(outcome: SearchOutcome, judge: Judge) -> list[Judged]:
    """The best designs of other shapes than the first leader's, compared in full."""
    if not outcome.leaders:
        return []
    own = outcome.space.kind(outcome.leaders[0].number)
    rivals = [found for kind, found in outcome.best.items() if kind != own]
    rivals.sort(key=lambda x: (-x.verdict.least, x.number))
    full: list[Judged] = []
    for found in rivals[: 2 * MOST_KINDS]:
        verdict: Verdict = judge.judge(found.pipeline)
        if verdict.status == GOOD:
            full.append(found._replace(verdict=verdict))
    full.sort(key=lambda x: (-x.verdict.least, x.number))
    return full[:MOST_KINDS]


def why_first(found: Judged, judge: Judge) -> dict[str, Any]:
    """What the time of a design depends on, and its critical chain."""
    machine, simulation = judge.machines[0], judge.simulation
    request = SimulationRequest(
        problem=judge.problem, pipeline=found.pipeline, machine=machine,
        simulation=simulation, given={},
    )  # fmt: skip
    felt = measure(lambda x: call_seconds(judge.problem, found.pipeline, x, simulation), machine)
    chain = step_chain(request)
    rows = sorted(chain.rows, key=lambda row: -row.cycles)[:CHAIN_ROWS] if chain else []
    return {
        "limited_by": limited_by(felt),
        "limit": say_limit(felt),
        "step_cycles": chain.step_cycles if chain else None,
        "chain": [
            {"role": row.role, "what": row.what, "unit": row.unit, "cycles": row.cycles}
            for row in rows
        ],
    }


def deciding(judge: Judge, first: AnyPipeline, second: AnyPipeline) -> dict[str, Any] | None:
    """The figure on whose value it depends most which of two designs is faster, by how much.

    Each figure that the sets of constants differ in is moved to its ends, the others as they come.
    """
    own = judge.machines[0]
    found: list[dict[str, Any]] = []
    for name, ends in moved_figures(judge.machines).items():
        ratios = []
        for end in ends:
            machine = replace(own, costs=replace(own.costs, **{name: end}))
            rates = [judge.rate(x, machine, judge.simulation) for x in (first, second)]
            ratios.append(rates[0] / rates[1])
        found.append({"figure": name, "ends": list(ends), "first_over_second": ratios})
    largest = max(found, key=lambda row: abs(_swing(row)), default=None)
    return largest if largest is not None and abs(_swing(largest)) > ALIKE else None


def _swing(row: Mapping[str, Any]) -> float:
    low, high = row["first_over_second"]
    return math.log(high / low)


def about(judge: Judge, settings: Mapping[str, Any], version: str) -> dict[str, Any]:
    """What a journal says that it is of."""
    machine = judge.machines[0]
    return {
        "machine": machine.name,
        "problem": str(judge.problem),
        "simulation": str(judge.simulation),
        "model": version,
        "settings": str(sorted(settings.items())),
        "sets": len(judge.machines),
    }


def simulation_of(rescale_rate: float | None) -> Simulation:
    """As random inputs, or with a given share of steps that rescale. ValueError out of 0 to 1."""
    if rescale_rate is not None and not 0.0 <= rescale_rate <= 1.0:
        raise ValueError(f"rescale_rate must be between 0 and 1; got {rescale_rate!r}")
    return Simulation(rescale_rate=rescale_rate)
