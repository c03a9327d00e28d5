"""What the compiler made of a kernel: its resources, spills and loops, from cubin and PTX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fa4.inspect import loops, ptx_report, sass
from fa4.inspect.cubin import Resources, disassemble, read_resources
from fa4.inspect.flow import Function
from fa4.inspect.loops import LoopReport
from fa4.inspect.ptx_report import PtxReport

_LAUNCH = re.compile(r"llvm\.call @\w*cudaLaunchKernelEx\w*\(")
_KERNEL = re.compile(r"llvm\.mlir\.addressof @kernels_(\w+) ")
_LAUNCH_BYTES = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)


@dataclass(frozen=True)
class KernelCode:
    """One kernel. ptx: None if not given. dynamic_smem_bytes: of its launch, None if unknown.

    instructions (without NOP), loads and stores of spills, loops and ignored_budgets are of the
    machine code: None and empty if no disassembler is installed; `problem` then says what is
    missing. ignored_budgets: registers that the PTX asks for by setmaxnreg and the machine code
    never sets, as ptxas ignores the instruction where it cannot tell the CTAs of an SM.
    """

    resources: Resources
    ptx: PtxReport | None
    dynamic_smem_bytes: int | None
    instructions: int | None
    spill_loads: int | None
    spill_stores: int | None
    loops: tuple[LoopReport, ...]
    ignored_budgets: tuple[int, ...] = ()
    problem: str = ""

    @property
    def known_loops(self) -> tuple[LoopReport, ...]:
        """The loops that do the kernel's work; "other" ones are over work tiles, or retries."""
        return tuple(loop for loop in self.loops if loop.kind != loops.OTHER)

    @property
    def setmaxnreg(self) -> tuple[int, ...]:
        """The register budgets of the roles, each once, the largest first."""
        return _budgets(self.ptx)

    @property
    def tmem_columns(self) -> int | None:
        """Columns of the largest allocation, None if they are not a constant."""
        known = [columns for columns in self.ptx.tmem_columns if columns] if self.ptx else []
        return max(known, default=None)

    def with_smem(self, dynamic_smem_bytes: Mapping[str, int | None]) -> KernelCode:
        """The same with what its launch asks for, given by the names of kernels."""
        return replace(self, dynamic_smem_bytes=dynamic_smem_bytes.get(self.resources.name))

    def loop(self, kind: str) -> LoopReport | None:
        """The longest loop of a kind: two warpgroups may have a copy each."""
        found = [loop for loop in self.loops if loop.kind == kind]
        return max(found, key=lambda loop: loop.length, default=None)

    def describe(self) -> dict[str, object]:
        """Everything as plain data, for JSON."""
        return {
            "kernel": self.resources.name,
            "registers_at_launch": self.resources.registers,
            "frame_bytes": self.resources.frame_bytes,
            "static_smem_bytes": self.resources.smem_bytes,
            "dynamic_smem_bytes": self.dynamic_smem_bytes,
            "instructions": self.instructions,
            "spill_loads": self.spill_loads,
            "spill_stores": self.spill_stores,
            "ignored_budgets": list(self.ignored_budgets),
            "loops": [loop.describe() for loop in self.known_loops],
            "ptx": self.ptx.describe() if self.ptx else None,
            "problem": self.problem,
        }


def read_kernels(cubin: bytes, ptx: str = "") -> tuple[KernelCode, ...]:
    """The kernels of a module. Raises ValueError if the cubin is none, or if it has no code."""
    text, problem = disassemble(cubin)
    functions = sass.parse(text) if text else ()
    by_name = {function.name: function for function in functions}
    reports = {report.name: report for report in ptx_report.read(ptx)} if ptx else {}
    found = []
    for resources in read_resources(cubin):
        function = by_name.get(resources.name)
        callees = [one for one in functions if one.section == resources.name]
        found.append(
            KernelCode(
                resources,
                reports.get(resources.name),
                None,
                sum(one.count for one in callees) if function else None,
                _count(callees, "LDL") if function else None,
                _count(callees, "STL") if function else None,
                loops.classify(function) if function else (),
                _ignored(reports.get(resources.name), callees) if function else (),
                problem,
            )
        )
    return tuple(found)


def launch_smem_bytes(host_module: str) -> dict[str, int | None]:
    """Dynamic shared memory of every launch in a host module's MLIR text, by the kernel's name.

    None if it is not a constant. The launch record's type tells its fields: grid, block, bytes,
    stream, attributes.
    """
    found, start = {}, 0
    for launch in _LAUNCH.finditer(host_module):
        text, start = host_module[start : launch.start()], launch.end()
        if kernels := _KERNEL.findall(text):
            found[kernels[-1]] = _stored_bytes(text, host_module[: launch.start()])
    return found


def _stored_bytes(text: str, before: str) -> int | None:
    """What is stored as a launch's bytes in `text`, with the constants of all text before it."""
    stored = None
    for field in _LAUNCH_BYTES.finditer(text):
        stored = re.search(rf"llvm\.store (%\w+), {field[1]} : i64", text[field.end() :]) or stored
    if stored is None:
        return None
    constants = re.findall(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", before)
    return int(constants[-1]) if constants else None


def _count(functions: Iterable[Function], opcode: str) -> int:
    return sum(one.base == opcode for function in functions for one in function.instructions)


def _budgets(ptx: PtxReport | None) -> tuple[int, ...]:
    """What setmaxnreg asks for, each once, the largest first."""
    asked = {value for _, value in ptx.budgets} if ptx else set()
    return tuple(sorted(asked, reverse=True))


def _ignored(ptx: PtxReport | None, functions: Iterable[Function]) -> tuple[int, ...]:
    """What setmaxnreg asks for and no USETMAXREG sets."""
    kept = {one for function in functions for one in loops.budgets(function.instructions)}
    return tuple(budget for budget in _budgets(ptx) if budget not in kept)
