"""Prediction of Hopper's backward kernels: each plan simulated on every SM, and what is around it.

Up to head dim 128 one kernel adds dQ up in memory; above, one has the keys and one the queries
(`fa4.plan.warpgroup_backward`, `warpgroup_wide`). Nothing is fitted to their measured times: costs
are those of the forward kernels' machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fa4.config import Problem
from fa4.designs import design_of
from fa4.designs.gradients import MainKernel
from fa4.designs.tiles import Lengths
from fa4.hardware import Gpu
from fa4.kit.units import padded_dim
from fa4.plan.memory_rules import whole_runs
from fa4.plan.warpgroup_backward import WarpgroupBackwardPipeline, fastest_tile, fewest_dq_cols
from fa4.plan.warpgroup_wide import WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import deepest_rings
from fa4.plan.warpgroup_wide_queries import widest_tile
from fa4.sim.chip import ChipRun, run_drawn, run_one_by_one
from fa4.sim.machine import Machine
from fa4.sim.predict import Simulation, make_runner, tensor_share
from fa4.sim.turns import run_in_turn

MOST_NARROW, MOST_COLUMNS = 128, 256
HALF_SECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class GradientKernel:
    """A kernel of a backward pass.

    unit_busy: share of its cycles in which each unit of an SM works; empty where memory is the
    bound.
    """

    name: str
    cycles: float
    seconds: float
    hbm_seconds: float
    unit_busy: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class GradientPrediction:
    """A backward pass: its kernels one behind the other. clock_hz: of the first main one."""

    problem: Problem
    machine: str
    seconds: float
    tflops: float
    clock_hz: float
    kernels: tuple[GradientKernel, ...]


def backward_pipeline(
    problem: Problem, gpu: Gpu, *, deterministic: bool = False, ragged: bool = False
) -> WarpgroupBackwardPipeline | WideBackwardPipeline:
    """That of this package's kernels. Raises ValueError for head dims above 256.

    ragged: sequences have lengths of their own.
    """
    dims, masked = (problem.head_dim, problem.head_dim_v), problem.window_size != (None, None)
    if max(dims) > MOST_COLUMNS:
        raise ValueError(f"head dims are at most {MOST_COLUMNS}; got {max(dims)}")
    if max(dims) > MOST_NARROW:
        return replace(deepest_rings(widest_tile(*dims, gpu), gpu), causal=masked)
    cols, cols_v = map(padded_dim, dims)
    d, dv = map(whole_runs, dims)
    tile_m = fastest_tile(d, dv)
    last_first = deterministic and problem.window_size[1] is not None
    return WarpgroupBackwardPipeline(
        head_dim=d, head_dim_v=dv, cols=cols, cols_v=cols_v, causal=masked,
        deterministic=deterministic,
        tile_m=tile_m,
        dq_cols=fewest_dq_cols(problem.head_dim, tile_m, ragged=ragged),
        scheduler="spt" if last_first else "naive",
    )  # fmt: skip


def predict_hopper_backward(
    problem: Problem,
    machine: Machine,
    *,
    deterministic: bool = False,
    pipeline: WarpgroupBackwardPipeline | WideBackwardPipeline | None = None,
    lengths: tuple[Lengths, ...] | None = None,
) -> GradientPrediction:
    """Time of one backward pass; pipeline: instead of the kernels' own choice.

    Raises ValueError for what no kernel has: another machine, 8-bit types, head dims above 256.
    """
    if machine.gpu.arch != "sm_90a":
        raise ValueError(f"the machine must be an H100 or H200; got {machine.name}")
    if problem.dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype must be bf16 or fp16 for gradients; got {problem.dtype}")
    chosen = pipeline or backward_pipeline(
        problem, machine.gpu, deterministic=deterministic, ragged=lengths is not None
    )
    mains_of = design_of(chosen).mains
    assert mains_of is not None  # of both designs
    around = mains_of(problem, chosen, machine.gpu, lengths)
    loading = _with_half_sectors(machine, problem)
    reading, copying = machine.costs.hbm_efficiency, machine.costs.hbm_copy_efficiency
    # Sums that a kernel behind reads are set to zero by the one before, which writes little else.
    efficiency = copying if around.zeros else reading
    found, clocks = [_of_memory("preprocess", around.before, machine, efficiency)], []
    finish = None
    for main in around.mains:
        kernel, clock_hz, finish = _simulated(main, problem, chosen, loading, finish)
        found.append(kernel)
        clocks.append(clock_hz)
    for name, num_bytes in around.behind.items():
        found.append(_of_memory(name, num_bytes, machine, copying))
    seconds = sum(kernel.seconds for kernel in found)
    parts = [problem]
    if lengths is not None:
        parts = [replace(problem, batch=1, seqlen_q=x.q, seqlen_k=x.k) for x in lengths]
    return GradientPrediction(
        problem=problem, machine=machine.name, seconds=seconds, clock_hz=clocks[0],
        tflops=sum(part.backward_flops for part in parts) / seconds / 1e12, kernels=tuple(found),
    )  # fmt: skip


def _with_half_sectors(machine: Machine, problem: Problem) -> Machine:
    """The machine as it loads rows of head dims that are odd multiples of half a sector.

    Every other one begins in the middle of one, or those of every other head do.
    """
    halves = HALF_SECTOR_BYTES * 2
    if all(2 * dim % halves == 0 for dim in (problem.head_dim, problem.head_dim_v)):
        return machine
    rate = machine.costs.half_sector_share * machine.gpu.l2_bytes_per_s
    gpu = replace(machine.gpu, l2_bytes_per_s=rate)
    return replace(machine, gpu=gpu)


def _simulated(
    main: MainKernel,
    problem: Problem,
    pipeline: WarpgroupBackwardPipeline | WideBackwardPipeline,
    machine: Machine,
    behind: np.ndarray | None,
) -> tuple[GradientKernel, float, np.ndarray]:
    """A main kernel, the clock at which it runs, and when each SM is done.

    behind: when each is done with the kernel before, which this one does not wait for: it takes
    what it adds to that one's time.
    """
    simulation = Simulation(rescale_rate=0.0)
    runner = make_runner(main.plan, machine, simulation, ctas=len(main.tiles.trips))
    slots, costs = machine.gpu.sm_count, machine.costs
    run: ChipRun
    if getattr(pipeline, "deterministic", False):
        last_first = problem.window_size[1] is not None
        run = run_in_turn(runner, main.tiles, slots, costs.cta_start_cycles,
                          costs.semaphore_cycles, last_first=last_first)  # fmt: skip
    elif main.plan.persistent:
        run = run_drawn(runner, main.tiles, slots, costs.cta_start_cycles)
    else:
        run = run_one_by_one(runner, main.tiles, slots, costs.cta_start_cycles, behind=behind)
    begun = 0.0 if behind is None else float(behind.max(initial=0.0))
    clock_hz = machine.clock_under(tensor_share(runner, run))
    taken = max(run.cycles - begun, 0.0)
    # Gradients are a fifth of its bytes or more: streams of which that much is written take as
    # long as copies (`streams` of lab/hardware/results/hopper_beside.json).
    memory = _of_memory(main.name, main.num_bytes, machine, costs.hbm_copy_efficiency)
    launch = costs.launch_ns * 1e-9 if behind is None else 0.0
    seconds = max(taken / clock_hz, memory.hbm_seconds) + launch
    busy = {
        name: float(x) / max(taken, float(x), 1.0)
        for name, x in zip(runner.code.unit_names, run.busy, strict=True)
    }
    return replace(memory, cycles=taken, seconds=seconds, unit_busy=busy), clock_hz, run.finish


def _of_memory(name: str, num_bytes: int, machine: Machine, efficiency: float) -> GradientKernel:
    """A kernel that takes as long as its bytes; efficiency: of HBM's rate."""
    hbm = num_bytes / (efficiency * machine.gpu.hbm_bytes_per_s)
    seconds = hbm + machine.costs.launch_ns * 1e-9
    return GradientKernel(name=name, cycles=0.0, seconds=seconds, hbm_seconds=hbm, unit_busy={})
