"""Runs launches: from PTX text and real arguments to a report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from typing import Any

from threadpoolctl import ThreadpoolController

from fa4.emulator.errors import EmulationFailed, KernelFinding, LaunchError
from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.kinds import SEVERITIES
from fa4.emulator.machine.coverage import KernelCoverage, coverage_of, merge_coverages
from fa4.emulator.machine.engine import Engine
from fa4.emulator.machine.grid import count_running
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.launch_work import LaunchWork, work_of
from fa4.emulator.machine.machine_state import Stop
from fa4.emulator.machine.memory import GlobalBuffer, Memory, buffer_at
from fa4.emulator.machine.options import Options
from fa4.emulator.machine.shadows import Shadows
from fa4.emulator.machine.state import Grid
from fa4.emulator.ptx.parser import parse
from fa4.emulator.ptx.syntax import Module
from fa4.emulator.translate.layout import check_shared_bytes
from fa4.emulator.translate.program import Program, build_program

# sm_90a, and sm_100 with its family. Others have other instructions.
TARGETS = ("sm_90", "sm_100", "sm_103")
# CUDA programming guide, "Technical Specifications per Compute Capability", 9.0 and 10.0.
MAX_SHAPES = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}
MAX_THREADS = 1024
MAX_CLUSTER = 16


@dataclass
class Report:
    """What a run found and counted.

    findings: of the checks. accepted: findings that `Options.accepted` covers, with what covers
    each. ended_early: after a finding that the kernel could not go on from. instructions: executed
    thread-instructions by opcode; warp_instructions: the same per warp instruction. by_warp: warp
    index -> thread-instructions, for the roles of a warp-specialised kernel. work: of each launch.
    coverage: what each kernel's launches reached. seconds: of execution, without loading. output:
    what the kernel printed. steering: what `fa4.emulator.orders.steer` found, if it was asked.
    """

    kernels: list[str] = field(default_factory=list)
    findings: list[KernelFinding] = field(default_factory=list)
    accepted: list[tuple[KernelFinding, str]] = field(default_factory=list)
    ended_early: bool = False
    instructions: Counter[str] = field(default_factory=Counter)
    warp_instructions: Counter[str] = field(default_factory=Counter)
    by_warp: dict[int, Counter[str]] = field(default_factory=dict)
    work: list[LaunchWork] = field(default_factory=list)
    coverage: list[KernelCoverage] = field(default_factory=list)
    seconds: float = 0.0
    load_seconds: float = 0.0
    steps: int = 0
    output: list[str] = field(default_factory=list)
    steering: Any = None

    @property
    def ok(self) -> bool:
        """Whether the checks found nothing but style."""
        return all(finding.severity == "style" for finding in self.findings)

    def __str__(self) -> str:
        names = ", ".join(name if len(name) <= 60 else f"{name[:57]}..." for name in self.kernels)
        head = f"{names}: {len(self.findings)} finding(s)"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def failures(findings: Sequence[KernelFinding], fail_on: str) -> list[KernelFinding]:
    """The findings that are at least so severe."""
    least = SEVERITIES.index(fail_on)
    return [finding for finding in findings if SEVERITIES.index(finding.severity) >= least]


@lru_cache(maxsize=64)
def load_module(ptx: str) -> Module:
    """Parses PTX text and checks its target. Raises PtxError or LaunchError."""
    module = parse(ptx)
    if not module.target.startswith(TARGETS):
        raise LaunchError(
            f"PTX target {module.target}: the emulator runs {', '.join(TARGETS)} and their variants"
        )
    return module


@lru_cache(maxsize=64)
def load_program(ptx: str, kernel: str) -> Program:
    """The executable form of one kernel. Raises UnsupportedInstruction with all it cannot run."""
    module = load_module(ptx)
    if kernel not in module.kernels:
        raise LaunchError(
            f"no kernel {kernel!r}; the PTX has {', '.join(module.kernels) or 'none'}"
        )
    return build_program(module, module.kernels[kernel], TABLE)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


_next_cluster_number = 1


def run(
    launches: Sequence[Launch], allocations: Sequence[Allocation], options: Options | None = None
) -> Report:
    """Executes launches in stream order; programmatic ones may overlap the one before.

    Returns the report. Raises EmulationFailed if a check found something (unless
    options.collect), LaunchError for impossible launches, before anything runs.
    """
    global _next_cluster_number
    options = options or Options()
    began = time.perf_counter()
    programs = [load_program(launch.ptx, launch.kernel) for launch in launches]
    for launch, program in zip(launches, programs, strict=True):
        check_launch(launch, program)
    memory = Memory([buffer for a in allocations for buffer in _buffers(a)])
    shadows = Shadows(options.checks)
    for program in programs:
        shadows.add_program(program)
    machine = Engine(options, memory, shadows)
    report = Report(kernels=[launch.kernel for launch in launches])
    report.load_seconds = time.perf_counter() - began
    began = time.perf_counter()
    group: list[Grid] = []
    for index, (launch, program) in enumerate(zip(launches, programs, strict=True)):
        if group and not launch.programmatic:
            _run_group(machine, group)
            group = []
        prior = group[-1] if group else None
        grid = Grid(machine, launch, program, index, _next_cluster_number, prior)
        _next_cluster_number += grid.cluster_count
        group.append(grid)
        if failures(machine.findings, options.fail_on) and not options.collect:
            break
    _run_group(machine, group)
    report.seconds = time.perf_counter() - began
    _summarise(machine, report)
    if failures(report.findings, options.fail_on) and not options.collect:
        raise EmulationFailed(report)
    return report


def _buffers(allocation: Allocation) -> list[GlobalBuffer]:
    """Where kernels see it; and where it is, for pointers that the program made itself."""
    a = allocation
    here = buffer_at(a.name, a.address, a.size_bytes, a.writable)
    seen = GlobalBuffer(a.name, a.address + a.shift, here.data, a.writable)
    return [seen, here] if a.shift else [here]


def _run_group(machine: Engine, grids: list[Grid]) -> None:
    try:
        # The products of one tcgen05.mma are too small for BLAS to share among threads.
        with _blas().limit(limits=1):
            machine.run_group(grids)
    except Stop:
        machine.stopped = True
        machine.ready.clear()
        machine.operations.clear()


def _summarise(machine: Engine, report: Report) -> None:
    machine.judge()
    report.findings = list(machine.findings)
    report.accepted = list(machine.accepted)
    report.ended_early = machine.stopped
    report.output = list(machine.output)
    report.steps = machine.ticks
    covered: list[KernelCoverage] = []
    for grid in machine.grids:
        count_running(grid)
        report.work.append(work_of(grid))
        covered.append(coverage_of(grid))
        for warp, counts in grid.warp_step_counts.items():
            tally = report.by_warp.setdefault(warp, Counter())
            for step, count in zip(grid.program.steps, counts, strict=True):
                if count:
                    for instruction in step.instructions:
                        tally[instruction.opcode] += count
    report.coverage = merge_coverages(covered)
    for tally in report.by_warp.values():
        report.warp_instructions.update(tally)
    report.instructions = Counter(
        {opcode: 32 * count for opcode, count in report.warp_instructions.items()}
    )


def check_launch(launch: Launch, program: Program) -> None:
    """Raises LaunchError for a launch that the hardware would refuse."""
    name = launch.kernel
    try:
        for what in ("grid", "block", "cluster"):
            check_shape(what, getattr(launch, what))
    except LaunchError as error:
        raise LaunchError(f"{name}: {error}") from None
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(
            f"{name}: grid {launch.grid} is not a multiple of cluster {launch.cluster}"
        )
    static_bytes = program.variables.static_shared_bytes
    check_shared_bytes(name, static_bytes, launch.dynamic_smem_bytes)
    directives = program.kernel.directives
    needed = directives.get("reqntid")
    if needed and tuple(needed) + (1,) * (3 - len(needed)) != tuple(launch.block):
        raise LaunchError(f"{name}: block {launch.block}, but the kernel requires {needed}")
    threads = prod(launch.block)
    allowed = prod(directives.get("maxntid") or (MAX_THREADS,))
    if threads > allowed:
        raise LaunchError(f"{name}: {threads} threads, but the kernel allows {allowed}")
    expected = [p.size_bytes or 0 for p in program.kernel.parameters]
    given = [len(value) for value in launch.parameters]
    if expected != given:
        raise LaunchError(f"{name}: parameters of {given} bytes given, the kernel takes {expected}")


def check_shape(what: str, shape: tuple[int, ...]) -> None:
    """Raises LaunchError for a "grid", "block" or "cluster" that no launch may have."""
    if len(shape) != 3 or min(shape) < 1:
        raise LaunchError(f"{what} {shape}: three positive integers are needed")
    most = MAX_SHAPES.get(what, shape)
    if any(size > limit for size, limit in zip(shape, most, strict=True)):
        raise LaunchError(f"{what} {shape}: at most {', '.join(map(str, most))}")
    if what == "block" and prod(shape) > MAX_THREADS:
        raise LaunchError(f"block {shape} has {prod(shape)} threads, at most {MAX_THREADS}")
    if what == "cluster" and prod(shape) > MAX_CLUSTER:
        raise LaunchError(f"cluster {shape} has {prod(shape)} CTAs, at most {MAX_CLUSTER}")
