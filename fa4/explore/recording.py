"""Every point of the explorer's grid: predicted, or refused with the reason.

A point is a context (machine, pass, kernel, head dim, mask), a shape (how the kernel is built) and
a length. Points that are the same kernel on the same machine share one timeline, and those that are
also the same call share one prediction.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa4.base.role_styles import UNITS
from fa4.config import Problem
from fa4.designs import design_of, plan_of
from fa4.designs.design import Explored
from fa4.explore.controls import (
    Choice,
    Control,
    combinations,
    settings_of,
    shape_keys,
)
from fa4.explore.programs import Json, Touches, plan_data
from fa4.explore.steps import RECORDED_STEPS, StepWindow, pack_step, timing_of
from fa4.plan.schema import PipelinePlan
from fa4.sim.chain import critical_chain
from fa4.sim.chip import TileRunner
from fa4.sim.limits import modelled
from fa4.sim.machine import Machine
from fa4.sim.options import SimulationRequest, build
from fa4.sim.predict import (
    AnyPipeline,
    Prediction,
    Simulation,
    make_runner,
    predict,
    steps_rescaled,
)
from fa4.sim.roofline import roofline_terms
from fa4.sim.timeline import Timeline, record

CONTEXT = ("machine", "pass", "kernel", "head_dim", "mask")
RECORDED_TOKENS = 32 * 1024  # of the sequence that timelines are recorded of
STATIC_CAUSAL = (
    "not on this page: with persistent CTAs under a mask every CTA has another sequence of work "
    "tiles, which takes long to simulate; fa4 predict --causal --scheduler static does it"
)
BOUNDS = (*UNITS, "hbm")
SHARES = 65535  # what a share of 1 is stored as


@dataclass
class Interned:
    """Values that are stored once, by what they look like as JSON."""

    values: list[Any] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        """The number of a value, which is added if it is new."""
        text = json.dumps(value)
        if text not in self.known:
            self.known[text] = len(self.values)
            self.values.append(value)
        return self.known[text]


@dataclass
class SharedRunners:
    """Makes runners as `make_runner` does, one for all calls that run the same code.

    Most points differ from others in their work tiles only, which their runner then knows. A plan
    is told from others by which object it is, for which each is kept.
    """

    known: dict[Any, tuple[PipelinePlan, TileRunner]] = field(default_factory=dict)

    def __call__(
        self, plan: PipelinePlan, machine: Machine, simulation: Simulation, *,
        rescaling: float = 0.0, ctas: int | None = None,
    ) -> TileRunner:  # fmt: skip
        most = machine.gpu.sm_count  # that run side by side
        side_by_side = most if ctas is None else min(ctas, most)
        key = (id(plan), machine, simulation.exact, rescaling, side_by_side)
        if key not in self.known:
            runner = make_runner(plan, machine, simulation, rescaling=rescaling, ctas=ctas)
            self.known[key] = plan, runner
        return self.known[key][1]


@dataclass
class Recording:
    """What the page shows, as it is found, and by what it is found again."""

    controls: tuple[Control, ...]
    parts: dict[str, Interned] = field(default_factory=dict)
    plans: Interned = field(default_factory=Interned)
    reasons: Interned = field(default_factory=Interned)
    contexts: list[Json] = field(default_factory=list)
    steps: list[Json] = field(default_factory=list)
    blobs: list[np.ndarray] = field(default_factory=list)
    results: list[Prediction] = field(default_factory=list)
    shape_steps: list[int] = field(default_factory=list)
    point_results: list[int] = field(default_factory=list)
    _plan_keys: dict[Any, tuple[PipelinePlan, str]] = field(default_factory=dict)
    _step_keys: dict[Any, int] = field(default_factory=dict)
    _result_keys: dict[Any, int] = field(default_factory=dict)
    _chains: dict[Any, Json] = field(default_factory=dict)
    _runners: SharedRunners = field(default_factory=SharedRunners)

    def choices(self, key: str) -> tuple[Choice, ...]:
        """The choices of a control."""
        return next(control.choices for control in self.controls if control.key == key)

    def refuse(self, reason: str) -> int:
        """What stands for a refused point: -1 less the reason's number."""
        return -1 - self.reasons.number(reason)

    def add_context(self, context: Mapping[str, Choice], advance: Callable[[], None]) -> None:
        """All shapes and lengths of a context."""
        keys = shape_keys(context["pass"].key, context["kernel"].key)
        chosen = {key: choice.key for key, choice in context.items()}
        entry: Json = {"choices": chosen, "controls": list(keys), "first": len(self.shape_steps)}
        self.contexts.append(entry)
        problems = self._problems(context, entry)
        self._runners = SharedRunners()  # hardly any other context runs the same code
        for shape in combinations(self.controls, keys):
            if problems:
                self._add_shape({**context, **shape}, problems)
            advance()
        entry["shapes"] = len(self.shape_steps) - entry["first"]

    def _problems(self, context: Mapping[str, Choice], entry: Json) -> list[Problem]:
        """The calls of a context; none if it is refused whatever the shape."""
        problems = []
        try:
            for length in self.choices("seqlen"):
                request = build(settings_of({**context, "seqlen": length}))
                problems.append(request.problem)
            entry["auto"] = automatic(request)
        except ValueError as error:
            entry["reason"] = self.reasons.number(str(error))
            return []
        entry["flops"] = [
            p.backward_flops if context["pass"].key == "bwd" else p.forward_flops for p in problems
        ]
        return problems

    def _add_shape(self, chosen: Mapping[str, Choice], problems: list[Problem]) -> None:
        try:
            request = build(settings_of({**chosen, "seqlen": self.choices("seqlen")[-1]}))
            if "rescale_rate" not in chosen:  # that of random inputs depends on the length
                request = replace(
                    request, simulation=replace(request.simulation, rescale_rate=None)
                )
            plan, plan_key = self._plan(request.pipeline, request.machine, chosen["machine"].key)
            key = (chosen["machine"].key, plan_key, request.simulation.rescale_rate)
            if key not in self._step_keys:
                self._step_keys[key] = self._record(request, plan)
        except ValueError as error:
            number = self.refuse(str(error))
            self.shape_steps.append(number)
            self.point_results += [number] * len(problems)
            return
        self.shape_steps.append(self._step_keys[key])
        for problem in problems:
            self.point_results.append(self._result(key, problem, request, plan))

    def _plan(self, pipeline: AnyPipeline, machine: Machine, name: str) -> tuple[PipelinePlan, str]:
        """The plan and what tells it from others; most settings of a scheduler do not change it.

        Those that do: CTAs that ask for work, and Hopper's that stride over it and fetch ahead.
        """
        plain = modelled(pipeline).plain_scheduler
        as_it_is = plain is None or getattr(pipeline, "scheduler", "") == "clc"
        fixed = pipeline if as_it_is else replace(pipeline, scheduler=plain)
        if (fixed, name) not in self._plan_keys:
            plan = plan_of(pipeline, machine.gpu)
            self._plan_keys[fixed, name] = (plan, repr(plan))
        return self._plan_keys[fixed, name]

    def _record(self, request: SimulationRequest, plan: PipelinePlan) -> int:
        """Record a timeline; its number."""
        # Most steps under a mask are plain ones; without it every work tile has many of them.
        problem = replace(request.problem, batch=1, seqlen_q=RECORDED_TOKENS,
                          seqlen_k=RECORDED_TOKENS, causal=False,
                          window_size=(None, None))  # fmt: skip
        timeline = record(problem, request.pipeline, request.machine, request.simulation,
                          kv_tiles=RECORDED_STEPS)  # fmt: skip
        touches = Touches()
        window, blob = pack_step(timeline, touches)
        terms = roofline_terms(plan, request.machine, units=tuple(UNITS),
                               shares={"rescale_rate": 0.0})  # fmt: skip
        self.steps.append({
            "plan": self.plans.number(self._plan_parts(plan, request.machine, touches)),
            "step_cycles": window.step_cycles,
            "clock_hz": request.machine.clock_hz,
            "roofline_cycles": [round(terms.totals.get(unit, 0.0), 2) for unit in UNITS],
            "chain": self._chain(timeline, window, request.simulation),
        })  # fmt: skip
        self.blobs.append(blob)
        return len(self.steps) - 1

    def _chain(self, timeline: Timeline, window: StepWindow, simulation: Simulation) -> Json:
        """The critical chain, shared by equal steps: numbers of its rows' links, their cycles."""
        cta, plan = timeline.ctas[0], timeline.plan
        key = timing_of(cta, window)
        if key not in self._chains:
            runner = self._runners(plan, timeline.machine, simulation,
                                   rescaling=steps_rescaled(plan, simulation))  # fmt: skip
            chain = critical_chain(runner.code, np.array(cta.trips))
            links = [[row.role, row.what, row.unit, row.reason] for row in chain.rows]
            self._chains[key] = {
                "links": [self._part("links", link) for link in links],
                "cycles": [round(row.cycles, 2) for row in chain.rows],
                "steps": chain.steps,
                "settled": chain.settled,
            }
        return self._chains[key]

    def _plan_parts(self, plan: PipelinePlan, machine: Machine, touches: Touches) -> Json:
        """The plan's data, with what many plans share replaced by its number."""
        data = plan_data(plan, machine.gpu, touches)
        data["roles"] = [self._part("roles", role) for role in data["roles"]]
        for name in ("signals", "buffers", "regions", "touches"):
            data[name] = self._part(name, data[name])
        return data

    def _part(self, name: str, value: Any) -> int:
        return self.parts.setdefault(name, Interned()).number(value)

    def _result(
        self, key: Any, problem: Problem, request: SimulationRequest, plan: PipelinePlan
    ) -> int:
        """The number of a prediction, or a refusal."""
        pipeline = request.pipeline
        scheduler = getattr(pipeline, "scheduler", "")
        masked = problem.window_size != (None, None)
        if masked and scheduler == "static":
            return self.refuse(STATIC_CAUSAL)
        if not masked and scheduler == "lpt":
            scheduler = "naive"  # all work tiles are equally long
        whole = (key, problem, scheduler, getattr(pipeline, "deterministic", False))
        if whole not in self._result_keys:
            self._result_keys[whole] = self._predict(problem, request, plan)
        return self._result_keys[whole]

    def _predict(self, problem: Problem, request: SimulationRequest, plan: PipelinePlan) -> int:
        try:
            found = predict(problem, request.pipeline, request.machine, request.simulation,
                            plan=plan, make=self._runners)  # fmt: skip
        except ValueError as error:
            return self.refuse(str(error))
        self.results.append(found)
        return len(self.results) - 1

    def columns(self) -> dict[str, np.ndarray]:
        """The recording's numbers; names say the unit, shares are parts of SHARES."""
        results = self.results
        busy = [[result.unit_busy.get(unit, 0.0) for unit in UNITS] for result in results]
        sizes = [len(blob) for blob in self.blobs]
        return {
            "shape_steps": np.array(self.shape_steps, np.int32),
            "point_results": np.array(self.point_results, np.int32),
            "tflops": np.array([result.tflops for result in results], np.float32),
            "kernel_cycles": np.array([result.cycles for result in results], np.float32),
            "imbalance_share": _shares([result.imbalance for result in results]),
            "bound_share": _shares([r.bound_seconds / r.seconds for r in results]),
            "bound_by": np.array([BOUNDS.index(result.bound_by) for result in results], np.uint8),
            "busy_share": _shares(busy).T.copy(),
            "step_starts": np.cumsum([0, *sizes]).astype(np.int32),
            "step_numbers": np.concatenate([*self.blobs, np.zeros(0, np.uint16)]),
        }


def shown(pipeline: AnyPipeline) -> Explored:
    """What the page shows of a pipeline's kernel."""
    design = design_of(pipeline)
    if design.explored is None:
        raise ValueError(f"not on this page: {design.name}; fa4 predict does it")
    return design.explored


def _shares(values: Any) -> np.ndarray:
    return np.round(np.clip(np.array(values, np.float64), 0.0, 1.0) * SHARES).astype(np.uint16)


def automatic(request: SimulationRequest) -> dict[str, str]:
    """What FlashAttention chooses in a context: a choice of each control of its shape."""
    return shown(request.pipeline).chosen(request.pipeline)


def contexts(controls: tuple[Control, ...]) -> Iterator[dict[str, Choice]]:
    """Every context of a grid."""
    yield from combinations(controls, CONTEXT)


def count_shapes(controls: tuple[Control, ...]) -> int:
    """Shapes of all contexts, refused ones included: what a progress bar counts to."""
    named = {control.key: len(control.choices) for control in controls}
    total = 0
    for context in contexts(controls):
        count = 1
        for key in shape_keys(context["pass"].key, context["kernel"].key):
            count *= named[key]
        total += count
    return total


def record_grid(controls: tuple[Control, ...], advance: Callable[[], None]) -> Recording:
    """Record all contexts; `advance` is called for every shape."""
    recording = Recording(controls)
    with _uncollected():
        for context in contexts(controls):
            recording.add_context(context, advance)
    return recording


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for circles of objects: it is a third of the time, and there are none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
