"""Which instructions of a kernel a run has reached: what "no findings" is said of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fa4.emulator.machine.state import Grid

# What orders warps, or waits: a finding about one that never ran cannot be made.
_SYNCHRONISES = (
    "bar", "barrier", "mbarrier", "fence", "membar", "wgmma.wait_group", "wgmma.fence",
    "tcgen05.wait", "tcgen05.commit", "tcgen05.fence", "cp.async.wait_group", "cp.async.wait_all",
    "cp.async.bulk.wait_group", "griddepcontrol", "setmaxnreg",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MissedInstruction:
    """One that no warp reached. line: of the PTX. source: "file.py:12", or ""."""

    line: int
    text: str
    source: str
    synchronises: bool


@dataclass(frozen=True, kw_only=True)
class KernelCoverage:
    """What the launches of a kernel have reached.

    instructions: how many it has. missed: those that no warp of any launch reached. One whose
    predicate was false for all lanes counts as reached.
    """

    kernel: str
    ptx: str = field(repr=False)
    instructions: int
    missed: tuple[MissedInstruction, ...]

    @property
    def reached(self) -> int:
        """How many instructions a warp has reached."""
        return self.instructions - len(self.missed)


def coverage_of(grid: Grid) -> KernelCoverage:
    """Of a launch that is over."""
    program = grid.program
    totals = [0] * len(program.steps)
    for counts in grid.warp_step_counts.values():
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    missed = [
        MissedInstruction(
            line=instruction.written_line,
            text=instruction.text,
            source=program.source_of(instruction.line),
            synchronises=f"{instruction.opcode}.".startswith(
                tuple(f"{name}." for name in _SYNCHRONISES)
            ),
        )
        for step, total in zip(program.steps, totals, strict=True)
        if not total
        for instruction in step.instructions
    ]
    return KernelCoverage(
        kernel=program.name,
        ptx=grid.launch.ptx,
        instructions=sum(len(step.instructions) for step in program.steps),
        missed=tuple(missed),
    )


def merge_coverages(coverages: Iterable[KernelCoverage]) -> list[KernelCoverage]:
    """One for each kernel: what none of its launches reached, in the order of the first ones."""
    merged: dict[tuple[str, str], KernelCoverage] = {}
    for coverage in coverages:
        key = coverage.kernel, coverage.ptx
        before = merged.get(key)
        if before is None:
            merged[key] = coverage
        else:
            still = set(coverage.missed)
            left = tuple(one for one in before.missed if one in still)
            merged[key] = replace(before, missed=left)
    return list(merged.values())
