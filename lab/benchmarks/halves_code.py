"""What the compiler makes of the kernel with halves: beside its plan and the other forward kernel.

    python -m lab.benchmarks.codegen --install     once: the compiler, CuTe-DSL 4.8.1 for CUDA 13
    python -m lab.benchmarks.halves_code

Registers, spills and the loop of a softmax thread over whole KV tiles: its instructions by kind on
the way that rescales nothing, beside the plan's amounts; and what the simulator says of a call at
head dim 128 with either, by all sets of constants. Nothing runs on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from fa4.compiled.variants import tuned_halves_spec, tuned_spec
from fa4.config import Problem
from fa4.inspect.loops import SOFTMAX, LoopReport
from fa4.plan.counted_math import PIPES, loop_math, with_measured_math
from fa4.plan.schema import Math
from fa4.search.judge import all_constants
from fa4.sim.ensemble import speedup_interval
from fa4.sim.machine import find_machine
from fa4.sim.predict import Simulation, predict
from lab.records import record_path, write_record

KEYS, HEADS, BATCH = 16384, 16, 2
# Head dim, causal, CTAs of a pair.
CASES = {"d128": (128, False, 2), "d128 causal": (128, True, 1), "d64": (64, False, 1)}
KERNELS: dict[str, Callable[..., Any]] = {"halves": tuned_halves_spec, "blackwell": tuned_spec}
PREDICTED = "d128"
THERE = "--there"  # the half that runs where the compiler is


def spec_of(kernel: str, case: str) -> Any:
    """The tuned spec of a kernel."""
    head_dim, causal, ctas = CASES[case]
    scheduler = "lpt" if causal else "static"
    return KERNELS[kernel](head_dim, head_dim, causal=causal, cta_group=ctas, scheduler=scheduler)


def compiled(kernel: str, case: str) -> dict[str, Any]:
    """Registers, spills and the softmax loop of a kernel that is compiled now."""
    from fa4.compiled.build import compile_kernel
    from fa4.inspect.codegen import read_kernels

    spec = spec_of(kernel, case)
    made = compile_kernel(spec, "sm_100a").artifacts
    (code,) = read_kernels(made.CUBIN, str(made.PTX))
    loop, roles = code.loop(SOFTMAX), [role.name for role in spec.plan.roles]
    assert loop is not None, code.problem
    return {
        "launched_registers": code.resources.registers,
        "budgets": list(code.setmaxnreg),
        "spills": (code.spill_loads or 0) + (code.spill_stores or 0),
        "instructions": code.instructions,
        "elements": loop.elements,
        "slots": loop.shortest,
        "slots_with_rescale": loop.length,
        "highest_register": loop.highest_register,
        "amounts": amounts(loop, rescales="correction" not in roles),
        "planned": planned(spec),
    }


def amounts(loop: LoopReport, *, rescales: bool) -> dict[str, float]:
    """Instructions of a trip by pipe, of a packed one 2; rescales: O as well, which is left out."""
    count = loop.columns.get
    packed = count("FFMA2", 0) + count("FADD2", 0) + (0 if rescales else count("FMUL2", 0))
    comparisons = 4  # of the scalar ones: two selections and two comparisons of the reference
    scalar = count("scalar FP", 0) - comparisons
    alu = sum(count(name, 0) for name in ("FMNMX3", "FMNMX", "F2FP", "integer")) + comparisons
    return {
        "mufu": count("MUFU.EX2", 0), "fma": 2 * packed + scalar, "alu": alu,
        "other": count("MOV", 0) + count("uniform", 0),
    }  # fmt: skip


def planned(spec: Any) -> dict[str, float]:
    """The same of the plan."""
    role = next(role for role in spec.plan.roles if role.name.startswith("softmax"))
    parts = loop_math(role).values()
    return {pipe: sum(getattr(part, pipe) for part in parts) for pipe in PIPES}


def issued(found: dict[str, float]) -> float:
    """Issue slots of such amounts."""
    return sum(found.values()) - found["fma"] / 2


def predictions(found: dict[str, Any]) -> dict[str, Any]:
    """TFLOP/s of both kernels by all sets of constants, with the plans' amounts and compiled."""
    machine = find_machine("b200")
    machines = (machine, *all_constants(machine))
    problem = Problem(batch=BATCH, seqlen_q=KEYS, seqlen_k=KEYS, heads_q=HEADS, heads_k=HEADS,
                      head_dim=128)  # fmt: skip
    report: dict[str, Any] = {}
    for way in ("planned", "compiled"):
        seconds = {}
        for kernel in KERNELS:
            spec = spec_of(kernel, PREDICTED)
            plan = spec.plan
            if way == "compiled":
                math = Math(**found[kernel]["amounts"])
                roles = [role.name for role in plan.roles if role.name.startswith("softmax")]
                plan = with_measured_math(plan, dict.fromkeys(roles, math))
            made = [predict(problem, spec.pipeline, x, Simulation(), plan) for x in machines]
            seconds[kernel] = [x.seconds for x in made]
            rates = [x.tflops for x in made]
            powers = [x.sustained.tflops for x in made if x.sustained is not None]
            report[f"{kernel}, {way}"] = {
                "tflops": rates[0], "least_tflops": min(rates), "most_tflops": max(rates),
                "sustained_least_tflops": min(powers),
            }  # fmt: skip
        gain = speedup_interval(seconds["blackwell"], seconds["halves"])
        report[f"gain, {way}"] = None if gain is None else [gain.least, gain.most]
    return report


def main() -> None:
    """Writes the record, or with `THERE` prints what was compiled."""
    if THERE in sys.argv:
        both = {case: {kernel: compiled(kernel, case) for kernel in KERNELS} for case in CASES}
        print(json.dumps(both))
        return
    from lab.benchmarks.codegen_found import environment

    tools = os.pathsep.join(filter(None, (os.environ.get("PATH"), disassembler_folder())))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lab.benchmarks.halves_code", THERE],
        env=environment() | {"PATH": tools}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    cases = json.loads(done.stdout.splitlines()[-1])
    for case, kernels in cases.items():
        for kernel, found in kernels.items():
            print(f"{case}, {kernel}: {found['slots']} slots of {found['elements']} scores, "
                  f"{found['spills']} spills, plan {issued(found['planned']):.0f}, compiled "
                  f"{issued(found['amounts']):.0f} {found['amounts']}")  # fmt: skip
    told = predictions(cases[PREDICTED])
    print(json.dumps(told, indent=1))
    record = {"cases": cases, "predictions": told}
    write_record(record_path("halves_code"), record, ("nvidia-cutlass-dsl",))


def disassembler_folder() -> str:
    """Where `codegen --install` has put nvdisasm."""
    from lab.benchmarks.codegen_found import SITE

    found = next(SITE.glob("nvidia/*/bin/nvdisasm"), None)
    return str(found.parent) if found else ""


if __name__ == "__main__":
    main()
