"""Prediction of a forward or backward call: simulate the plan on every SM and add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fa4.config import (
    DTYPE_BITS,
    WARP_ROWS,
    BackwardPipeline,
    Problem,
)
from fa4.designs import design_of, plan_of
from fa4.designs.amounts import output_bytes, partial_bytes
from fa4.designs.tiles import Lengths, clusters
from fa4.plan.schema import GROUP_WARPS, PipelinePlan
from fa4.sim.chip import ChipRun, TileRunner, mean_run, run_one_by_one, run_persistent
from fa4.sim.costs import MachineCosts
from fa4.sim.first_round import first_round_cycles
from fa4.sim.hbm_waits import run_at_pace
from fa4.sim.limits import check_work, modelled
from fa4.sim.lower import lower
from fa4.sim.machine import Machine
from fa4.sim.power import Activity, Sustained, clock_share, energy_joules
from fa4.sim.turns import run_in_turn

MOST_COUNTED = 1 << 16
MOST_PADDING = 31  # columns of head dims where products take whole steps of 32 bytes
HARDLY_EVER = 1e-6  # share of steps that change no printed digit
REAL_RESCALE_RATE = 0.08  # of a real model's attention (fa4 demo, tiles of 32 keys)

AnyPipeline: TypeAlias = Any  # of a kernel in `fa4.designs`


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a call: its time, and the time that memory traffic alone would take."""

    name: str
    seconds: float
    hbm_seconds: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a call costs on a machine, and why.

    unit_busy: share of the main kernel's time in which each unit of an average SM works; hbm_busy:
    share of the call in which HBM does. clock_hz: of the SMs in the main kernel. role_stalls: role
    -> signal -> share of the main kernel's time spent waiting on it. imbalance: share of the time
    that an average SM has nothing to do.
    bound_seconds: no faster than this, by the busiest unit or by HBM, which `bound_by` names.
    sustained: the call repeated for long; None where nobody has measured what that takes.
    """

    problem: Problem
    machine: str
    plan: str
    seconds: float
    cycles: float
    clock_hz: float
    tflops: float
    peak_share: float
    unit_busy: Mapping[str, float]
    hbm_busy: float
    role_stalls: Mapping[str, Mapping[str, float]]
    imbalance: float
    bound_seconds: float
    bound_by: str
    kernels: tuple[KernelTime, ...]
    events: int
    work_tiles: int
    bottleneck: str = field(default="")
    sustained: Sustained | None = None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How to simulate: every step or by the periodic shortcut; run-time shares; lengths.

    rescale_rate: share of warps and KV tiles in which O is rescaled; None: as random inputs do,
    whose scores have the standard deviation `spread`.
    """

    lengths: tuple[Lengths, ...] | None = None
    rescale_rate: float | None = None
    spread: float = 1.0
    exact: bool = False


def predict(
    problem: Problem,
    pipeline: AnyPipeline,
    machine: Machine,
    simulation: Simulation | None = None,
    plan: PipelinePlan | None = None,
    make: Callable[..., TileRunner] | None = None,
) -> Prediction:
    """Time of one call. Raises ValueError if the pipeline does not fit the machine.

    plan: instead of the pipeline's own one, with the same roles and signals but other amounts.
    make: instead of `make_runner`, whose result it must equal; it may give again what it gave, as a
    runner remembers what it simulated.
    """
    call = _simulate(problem, pipeline, machine, simulation or Simulation(), plan, make)
    return _report(problem, machine, call)


def call_seconds(
    problem: Problem,
    pipeline: AnyPipeline,
    machine: Machine,
    simulation: Simulation | None = None,
) -> float:
    """The time of `predict` alone. Raises as it does."""
    call = _simulate(problem, pipeline, machine, simulation or Simulation(), None)
    return sum(kernel.seconds for kernel in call.kernels)


class _SimulatedCall(NamedTuple):
    """A simulated call. clock_hz: of its main kernel. run_on: simulates that on another machine."""

    plan: PipelinePlan
    run: ChipRun
    runner: TileRunner
    work_tiles: int
    flops: int
    kernels: tuple[KernelTime, ...]
    main: KernelTime
    clock_hz: float
    run_on: Callable[[Machine], ChipRun]


def _simulate(
    problem: Problem,
    pipeline: AnyPipeline,
    machine: Machine,
    simulation: Simulation,
    plan: PipelinePlan | None,
    make: Callable[..., TileRunner] | None = None,
) -> _SimulatedCall:
    check_work(problem, pipeline, simulation.lengths)
    parts = _parts(problem, simulation.lengths)
    padding = MOST_PADDING if hasattr(pipeline, "widths") else 0
    if not (
        problem.head_dim <= pipeline.head_dim <= problem.head_dim + padding
        and problem.head_dim_v <= pipeline.head_dim_v <= problem.head_dim_v + padding
    ):
        raise ValueError(
            f"problem and pipeline must agree on head dims; got {problem.head_dim}, "
            f"{problem.head_dim_v} and {pipeline.head_dim}, {pipeline.head_dim_v}"
        )
    plan = _same_shape(plan, plan_of(pipeline, machine.gpu))
    traffic = modelled(pipeline).traffic
    simulation = with_rescale_rate(simulation, problem, pipeline)
    if not design_of(pipeline).backward:
        again = partial(_run_forward, problem, pipeline, plan, simulation=simulation,
                        make=make or make_runner)  # fmt: skip
        run, runner, count = again(machine=machine)
        flops = sum(part.forward_flops for part in parts)
        moved = sum(traffic(part, pipeline)[1] for part in parts)
        split = sum(partial_bytes(part, pipeline) for part in parts)
        clock_hz = machine.clock_under(tensor_share(runner, run))
        main = _timed("forward", run.cycles, moved + split, machine, clock_hz)
        kernels = [main]
        beside = [modelled(pipeline).beside(part, pipeline) for part in parts]
        if split:
            out = sum(output_bytes(part, pipeline) for part in parts)
            combine = _timed("combine", 0.0, split + out, machine)
            least = sum(one.get("combine", 0.0) for one in beside)
            kernels.append(replace(combine, seconds=max(combine.seconds, least)))
        if beside and "counter" in beside[0]:
            kernels.insert(0, KernelTime("counter", beside[0]["counter"], 0.0))
    else:
        again = partial(_run_backward, problem, pipeline, plan, simulation=simulation,
                        make=make or make_runner)  # fmt: skip
        run, runner, count = again(machine=machine)
        flops = sum(part.backward_flops for part in parts)
        each = [traffic(part, pipeline) for part in parts]
        before, moved, after = (sum(kind) for kind in zip(*each, strict=True))
        clock_hz = machine.clock_under(tensor_share(runner, run))
        main = _timed("backward", run.cycles, moved, machine, clock_hz)
        kernels = [
            _timed("preprocess", 0.0, before, machine),
            main,
            _timed("postprocess", 0.0, after, machine),
        ]
    return _SimulatedCall(plan, run, runner, count, flops, tuple(kernels), main, clock_hz,
                 lambda other: again(machine=other)[0])  # fmt: skip


def tensor_share(runner: TileRunner, run: ChipRun) -> float:
    """Share of a run's time in which an average SM's tensor core is at work."""
    units = runner.code.unit_names
    busy = float(run.busy[units.index("tensor")]) if "tensor" in units else 0.0
    return busy / max(run.cycles, 1.0)


def with_rescale_rate(
    simulation: Simulation, problem: Problem, pipeline: AnyPipeline
) -> Simulation:
    """The simulation with the rescale rate of random inputs unless it has one."""
    if simulation.rescale_rate is not None:
        return simulation
    rate, tau = 0.0, modelled(pipeline).rescale_tau
    if tau is not None:
        rate = random_rescale_rate(
            tau(pipeline), problem.seqlen_k, pipeline.tile_n, simulation.spread
        )
    return replace(simulation, rescale_rate=rate)


def random_rescale_rate(tau: float, seqlen_k: int, tile_n: int, spread: float = 1.0) -> float:
    """Share of warps and KV tiles that rescale O if scores are normal with deviation `spread`.

    Maxima of m normal numbers are spread like a Gumbel variable of scale 1 / sqrt(2 ln m), so that
    the next of j + 1 tiles exceeds the maximum of j by tau with odds of exp(-tau / scale) to j. A
    warp rescales if any of its 32 rows does. The paper's benchmarks run on such inputs, for which
    the reference counts none at tau 8 and 66% to 99% at tau 0.
    """
    tiles = -(-seqlen_k // tile_n)
    if tiles < 2:
        return 0.0
    counted = min(tiles - 1, MOST_COUNTED)  # beyond, next to no tile has a new maximum
    seen = np.arange(1, counted + 1)
    numbers = np.maximum(tile_n * seen, 2)  # one has no spread
    scale_log2 = spread * math.log2(math.e) / np.sqrt(2.0 * np.log(numbers))
    kept = -np.log1p(np.exp(-np.minimum(tau / scale_log2, 700.0)) / seen)  # log of the odds' share
    return float(np.sum(-np.expm1(WARP_ROWS * kept))) / (tiles - 1)


def _same_shape(plan: PipelinePlan | None, own: PipelinePlan) -> PipelinePlan:
    """The given plan, or the pipeline's own. Raises ValueError if they are of two kernels."""
    if plan is None:
        return own
    for name in ("roles", "signals"):
        given, wanted = ([x.name for x in getattr(p, name)] for p in (plan, own))
        if given != wanted:
            raise ValueError(
                f"plan must have the {name} of {own.name}, {', '.join(wanted)}; "
                f"got {', '.join(given)}"
            )
    return plan


def _run_forward(
    problem: Problem,
    pipeline: Any,
    plan: PipelinePlan,
    machine: Machine,
    simulation: Simulation,
    make: Callable[..., TileRunner],
) -> tuple[ChipRun, TileRunner, int]:
    work = modelled(pipeline)
    tiles = work.order(work.tiles(problem, pipeline, simulation.lengths), problem, pipeline)
    slots = clusters(machine.gpu, pipeline.cta_group)
    start, ctas = machine.costs.cta_start_cycles, pipeline.cta_group * len(tiles.trips)

    def run(runner: TileRunner) -> ChipRun:
        if pipeline.scheduler == "static":
            return run_persistent(runner, tiles, slots, start)
        # A persistent CTA that steals work (CLC) or draws it starts once, and asks early.
        once = pipeline.scheduler in ("clc", "queue")
        return run_one_by_one(runner, tiles, slots, start, starts_once=once)

    share = steps_rescaled(plan, simulation)
    made = partial(make, plan, machine, simulation, ctas=ctas)
    found, used = _over_rescales(share, made, run)
    parts = _parts(problem, simulation.lengths)
    rows = sum(part.batch * part.seqlen_q * part.heads_q for part in parts)
    num_bytes = rows * problem.head_dim * pipeline.element_bytes
    late = first_round_cycles(plan, machine, ctas, num_bytes)
    return replace(found, cycles=found.cycles + late), used, len(tiles.trips)


def steps_rescaled(plan: PipelinePlan, simulation: Simulation) -> float:
    """Share of the steps in which a warp rescales O, as the pipeline feels it; the rate is set."""
    if "rescale_rate" not in plan.shares:
        return 0.0
    share = slowest_warp_share(simulation.rescale_rate or 0.0, GROUP_WARPS * plan.cta_group)
    return 0.0 if share < HARDLY_EVER else share


def _over_rescales(
    share: float, made: Callable[..., TileRunner], run: Callable[[TileRunner], ChipRun]
) -> tuple[ChipRun, TileRunner]:
    """A run in which some steps rescale O and the others do not: their mean.

    A step pays for it all or nothing; the pipeline returns to its pace within a step or two.
    """
    if share in (0.0, 1.0):
        runner = made(rescaling=share)
        return run(runner), runner
    runners = [made(rescaling=x) for x in (0.0, 1.0)]
    never, always = (run(runner) for runner in runners)
    return mean_run(never, always, share), runners[1]


def _run_backward(
    problem: Problem,
    pipeline: BackwardPipeline,
    plan: PipelinePlan,
    machine: Machine,
    simulation: Simulation,
    make: Callable[..., TileRunner],
) -> tuple[ChipRun, TileRunner, int]:
    work = modelled(pipeline)
    tiles = work.order(work.tiles(problem, pipeline, simulation.lengths), problem, pipeline)
    ctas = plan.cta_group * len(tiles.trips)
    runner = make(plan, machine, simulation, ctas=ctas)
    slots, costs = clusters(machine.gpu, pipeline.numerics.cta_group), machine.costs
    if pipeline.deterministic:
        start, hop = costs.cta_start_cycles, costs.semaphore_cycles
        last_first = work.last_first(problem, pipeline)
        run = run_in_turn(runner, tiles, slots, start, hop, last_first=last_first)
        return run, runner, len(tiles.trips)
    run = run_one_by_one(runner, tiles, slots, costs.cta_start_cycles)
    return run, runner, len(tiles.trips)


def make_runner(
    plan: PipelinePlan,
    machine: Machine,
    simulation: Simulation,
    *,
    rescaling: float = 0.0,
    ctas: int | None = None,
) -> TileRunner:
    """The plan, lowered to event code for this machine, of which `ctas` run side by side.

    rescaling: share of the steps that rescale O.
    """
    costs = MachineCosts(machine.gpu, machine.costs, plan=plan, ctas=ctas)
    code = lower(plan, costs.work, costs.signal, {"rescale_rate": rescaling})
    return TileRunner(code, exact=simulation.exact)


def slowest_warp_share(rate: float, warps: int) -> float:
    """Share of steps in which at least one of the warps that arrive together has to rescale.

    The next product waits for all of them, so a step takes as long as its slowest warp; warps are
    taken as independent.
    """
    return 1.0 - (1.0 - rate) ** warps


def _parts(problem: Problem, lengths: Seq[Lengths] | None) -> list[Problem]:
    """The call as problems of equal lengths: itself, or one per sequence of different lengths."""
    if lengths is None:
        return [problem]
    return [replace(problem, batch=1, seqlen_q=x.q, seqlen_k=x.k) for x in lengths]


def _timed(
    name: str, cycles: float, num_bytes: int, machine: Machine, clock_hz: float = math.inf
) -> KernelTime:
    hbm = num_bytes / (machine.costs.hbm_efficiency * machine.gpu.hbm_bytes_per_s)
    seconds = max(cycles / clock_hz, hbm) + machine.costs.launch_ns * 1e-9
    return KernelTime(name, seconds, hbm)


def _sustained(machine: Machine, call: _SimulatedCall) -> Sustained | None:
    """The call at the clock that its main kernel's power leaves it."""
    if machine.power is None or not call.work_tiles:
        return None
    gpu, costs = machine.gpu, machine.costs
    busy = dict(zip(call.runner.code.unit_names, gpu.sm_count * call.run.busy, strict=True))
    l2_rate = gpu.l2_bytes_per_s / machine.clock_hz / gpu.sm_count
    did = Activity(
        tensor_cycles=float(busy.get("tensor", 0.0)),
        exponentials=float(busy.get("mufu", 0.0)) * gpu.exp_per_clk,
        l2_bytes=float(busy.get("tma", 0.0)) * min(costs.tma_bytes_per_clk, l2_rate),
        hbm_bytes=call.main.hbm_seconds * costs.hbm_efficiency * gpu.hbm_bytes_per_s,
    )
    launch = costs.launch_ns * 1e-9
    beyond_idle = energy_joules(did, machine.power, gpu) / (call.main.seconds - launch)
    share = clock_share(beyond_idle, machine.power)
    slower = max(call.run.cycles / (share * call.clock_hz), call.main.hbm_seconds) + launch
    seconds = sum(kernel.seconds for kernel in call.kernels) - call.main.seconds + slower
    return Sustained(
        limit_w=machine.power.limit_w,
        demand_w=beyond_idle + machine.power.idle_w,
        clock_share=share,
        seconds=seconds,
        tflops=call.flops / seconds / 1e12,
    )


def _report(problem: Problem, machine: Machine, call: _SimulatedCall) -> Prediction:
    """Shares and bounds of a simulated call; of the time that HBM takes, if that is longer."""
    run, code = call.run, call.runner.code
    seconds = sum(kernel.seconds for kernel in call.kernels)
    cycles, waits = max(run.cycles, 1.0), run
    hbm_cycles = call.main.hbm_seconds * call.clock_hz
    if hbm_cycles > cycles and call.work_tiles:
        cycles, waits = hbm_cycles, run_at_pace(call.run_on, machine, hbm_cycles)
    busy = {name: float(x) / cycles for name, x in zip(code.unit_names, run.busy, strict=True)}
    bounds = {name: float(x) / call.clock_hz
              for name, x in zip(code.unit_names, run.busy, strict=True)}  # fmt: skip
    bounds["hbm"] = sum(kernel.hbm_seconds for kernel in call.kernels)
    bound_by = max(bounds, key=lambda name: bounds[name])
    stalls = {
        role: {
            signal: float(x) / max(waits.cycles, 1.0)
            for signal, x in zip(code.signal_names, row, strict=True)
            if x > 0
        }
        for role, row in zip(code.role_names, waits.stalled, strict=True)
    }
    tflops = call.flops / seconds / 1e12
    faster = 2 if DTYPE_BITS[problem.dtype] == 8 else 1  # FP8 products run at twice the rate
    prediction = Prediction(
        problem=problem,
        machine=machine.name,
        plan=call.plan.name,
        seconds=seconds,
        cycles=run.cycles,
        clock_hz=call.clock_hz,
        tflops=tflops,
        peak_share=tflops * 1e12 / (machine.gpu.peak_bf16_flops * faster),
        unit_busy=busy,
        hbm_busy=bounds["hbm"] / seconds,
        role_stalls=stalls,
        imbalance=run.imbalance,
        bound_seconds=bounds[bound_by],
        bound_by=bound_by,
        kernels=call.kernels,
        events=run.events,
        work_tiles=call.work_tiles,
        sustained=_sustained(machine, call),
    )
    return replace(prediction, bottleneck=explain(prediction))


def explain(prediction: Prediction) -> str:
    """The bottleneck in words."""
    if prediction.work_tiles == 0:
        return "nothing to do: no work tile"
    share = prediction.bound_seconds / prediction.seconds
    words = [f"{prediction.bound_by} is the busiest ({share:.0%} of the time)"]
    if prediction.bound_by == "hbm":
        words = [f"HBM traffic takes {share:.0%} of the time"]
    mma = prediction.role_stalls.get("mma", {})
    if mma:
        signal = max(mma, key=lambda name: mma[name])
        words.append(f"the MMA warp waits most on {signal} ({mma[signal]:.0%})")
    if prediction.imbalance > 0.05:
        words.append(f"{prediction.imbalance:.0%} of the SM time is idle at the end")
    return "; ".join(words)
