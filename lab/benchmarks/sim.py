"""Speed of the simulator: events per second, a whole chip, start-up, and a sweep.

The compiled engine against its plain-Python twin and, if SimPy is installed, a SimPy model of the
same programs; B4 H32 S16384 D128 forward with every step of every SM, and by the periodic shortcut;
fresh processes of `fa4 predict`; a sweep of 1,000 points. One core throughout.
Usage: python -m lab.benchmarks.sim [--output FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fa4.cli import COMMANDS
from fa4.config import BackwardPipeline, ForwardConfig, ForwardPipeline, Problem
from fa4.designs import plan_of
from fa4.designs.forward import default_forward
from fa4.designs.tiles import clusters, forward_tiles
from fa4.plan.schema import PipelinePlan
from fa4.sim import engine, engine_python
from fa4.sim.costs import MachineCosts
from fa4.sim.lower import lower
from fa4.sim.machine import find_machine
from fa4.sim.predict import Simulation, predict
from lab import ROOT
from lab.benchmarks.common import parse_output, write_record

MACHINE = find_machine("b200")
COSTS = MachineCosts(MACHINE.gpu, MACHINE.costs)
SHARES = {"rescale_rate": 0.1}
TUNED = ForwardConfig.tuned("bf16", 128, causal=False)
FORWARD, PAIR = ForwardPipeline(numerics=TUNED), ForwardPipeline(numerics=TUNED, cta_group=2)
PROBLEM = Problem(batch=4, seqlen_q=16384, seqlen_k=16384, heads_q=32, heads_k=32, head_dim=128)

SWEEP_SEQLENS = range(512, 25_601, 512)
SWEEP_HEADS = range(1, 21)

ENGINE_SCRIPT = """
from fa4.config import Problem
from fa4.designs.forward import default_forward
from fa4.sim.machine import find_machine
from fa4.sim.predict import predict
machine = find_machine("b200")
problem = Problem(seqlen_q=32768, seqlen_k=32768, heads_q=16, heads_k=16, head_dim=128)
predict(problem, default_forward(problem, machine.gpu), machine)
"""


def seconds_of(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_engine(name: str, pipeline: ForwardPipeline | BackwardPipeline) -> dict[str, Any]:
    """Events per second of the engine and of its peers on one CTA's work."""
    plan = plan_of(pipeline, MACHINE.gpu)
    code = lower(plan, COSTS.work, COSTS.signal, SHARES)
    long, short = np.array([[128, 0, 128]] * 56), np.array([[64, 0, 64]])
    events, few = (engine.execute(code, trips).events for trips in (long, short))
    rate = events / seconds_of(lambda: engine.execute(code, long))
    python_rate = few / seconds_of(lambda: engine_python.execute(code, short), repeats=3)
    row = {
        "plan": name,
        "events": events,
        "events_per_s": rate,
        "python_events_per_s": python_rate,
        "ratio_to_python": rate / python_rate,
    }
    return row | measure_simpy(plan, few, engine.execute(code, short).end, rate)


def measure_simpy(plan: PipelinePlan, events: int, cycles: float, rate: float) -> dict[str, Any]:
    """The same short run as a SimPy model; nothing if SimPy is missing."""
    try:
        import simpy  # noqa: F401
    except ImportError:
        return {"simpy": None}
    from lab.benchmarks.simpy_twin import Model

    tile = dict(zip(plan.trips, (64, 0, 64), strict=True))
    results: list[float] = []

    def simulate() -> None:
        results.append(Model(plan, COSTS.work, COSTS.signal, SHARES).run([tile]))

    simpy_rate = events / seconds_of(simulate, repeats=3)
    return {
        "simpy_events_per_s": simpy_rate,
        "ratio_to_simpy": rate / simpy_rate,
        "simpy_makespan_error": abs(results[0] / cycles - 1),
    }


def measure_chip(name: str, pipeline: ForwardPipeline) -> dict[str, Any]:
    """Every SM (or pair) simulates all of its steps, equal or not, against the shortcut."""
    code = lower(plan_of(pipeline, MACHINE.gpu), COSTS.work, COSTS.signal,
                 {"rescale_rate": 0.0})  # fmt: skip
    tiles = forward_tiles(PROBLEM, pipeline)
    slots = clusters(MACHINE.gpu, pipeline.cta_group)
    start = time.perf_counter()
    runs = [engine.execute(code, tiles.trips[i::slots]) for i in range(slots)]
    exact_seconds = time.perf_counter() - start
    cycles = max(run.end for run in runs) + MACHINE.costs.cta_start_cycles
    quick = predict(PROBLEM, pipeline, MACHINE, Simulation(rescale_rate=0.0))
    shortcut = seconds_of(lambda: predict(PROBLEM, pipeline, MACHINE, Simulation(rescale_rate=0.0)))
    return {
        "pipeline": name,
        "machines": slots,
        "work_tiles": len(tiles.trips),
        "events": sum(run.events for run in runs),
        "exact_seconds": exact_seconds,
        "shortcut_seconds": shortcut,
        "shortcut_difference": abs(quick.cycles / cycles - 1),
    }


def run_process(arguments: list[str]) -> None:
    """A fresh Python process in the project's folder."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def command_line(*arguments: str) -> list[str]:
    """A Python command that runs `fa4 <arguments>`."""
    return ["-c", f"from fa4.cli import main; main({list(arguments)!r})"]


def measure_startup() -> Mapping[str, float]:
    """Seconds of fresh processes; compiled code comes from numba's cache after the first."""
    processes = {
        "python": ["-c", "pass"],
        "import numpy": ["-c", "import numpy"],
        "import fa4": ["-c", "import fa4"],
        "import fa4.cli": ["-c", "import fa4.cli"],
        "import numba": ["-c", "import numba"],
        "import fa4.sim.predict": ["-c", "import fa4.sim.predict"],
        "one run of the engine": ["-c", ENGINE_SCRIPT],
    }
    if "predict" in COMMANDS:
        processes["fa4 predict"] = command_line("predict", "--json")
    return {name: seconds_of(partial(run_process, given)) for name, given in processes.items()}


def measure_sweep() -> Mapping[str, Any]:
    """1,000 predictions, in this process and as `fa4 sweep`: 50 lengths times 20 head counts."""
    problems = [
        Problem(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_k=heads,
                head_dim=128)
        for seqlen in SWEEP_SEQLENS
        for heads in SWEEP_HEADS
    ]  # fmt: skip
    start = time.perf_counter()
    for problem in problems:
        predict(problem, default_forward(problem, MACHINE.gpu), MACHINE)
    report = {"points": len(problems), "seconds": time.perf_counter() - start}
    if "sweep" in COMMANDS:
        axes = {"seqlen": SWEEP_SEQLENS, "heads": SWEEP_HEADS}
        given = [f"{name}={','.join(map(str, values))}" for name, values in axes.items()]
        arguments = [part for axis in given for part in ("--set", axis)]
        start = time.perf_counter()
        run_process(command_line("sweep", *arguments, "--jobs", "1", "--json"))
        report["command_seconds"] = time.perf_counter() - start
    return report


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "sim")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    engines = [
        measure_engine("forward", FORWARD),
        measure_engine("backward", BackwardPipeline(published=True)),
    ]
    for row in engines:
        simpy_ratio = row.get("ratio_to_simpy")
        against = f", {simpy_ratio:.0f} x SimPy" if simpy_ratio else ", SimPy is not installed"
        print(f"{row['plan']}: {row['events_per_s'] / 1e6:.1f} M events/s, "
              f"{row['ratio_to_python']:.0f} x Python{against}")  # fmt: skip
    chips = [measure_chip("one CTA per SM", FORWARD), measure_chip("CTA pairs", PAIR)]
    for row in chips:
        print(f"{row['pipeline']}: {row['events'] / 1e6:.1f} M events exactly in "
              f"{row['exact_seconds']:.2f} s, by the shortcut in {row['shortcut_seconds']:.3f} s "
              f"({row['shortcut_difference']:.4%} off)")  # fmt: skip
    startup, sweep = measure_startup(), measure_sweep()
    print("fresh processes: " + ", ".join(f"{k} {v:.2f} s" for k, v in startup.items()))
    as_command = sweep.get("command_seconds")
    print(f"sweep: {sweep['points']} points in {sweep['seconds']:.1f} s"
          + (f", as a command {as_command:.1f} s" if as_command else ""))  # fmt: skip
    report = {
        "engines": engines,
        "chip": chips,
        "startup_seconds": startup,
        "sweep": sweep,
    }
    write_record(options.output, report, ("numpy", "numba"))


if __name__ == "__main__":
    main()
