"""Which instructions of a kernel a run has reached: what "no findings" is said of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from fa4.emulator.machine.state import NOT_TAKEN, TAKEN, Grid
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.program import BRANCH, Program

# What orders warps, or waits: a finding about one that never ran cannot be made.
_SYNCHRONISES = (
    "bar", "barrier", "mbarrier", "fence", "membar", "wgmma.wait_group", "wgmma.fence",
    "tcgen05.wait", "tcgen05.commit", "tcgen05.fence", "cp.async.wait_group", "cp.async.wait_all",
    "cp.async.bulk.wait_group", "griddepcontrol", "setmaxnreg",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MissedInstruction:
    """One that no warp executed. line: of the PTX. source: "file.py:12", or "". skipped: warps
    reached it, and its predicate was false for all their lanes (of a launch; not compared)."""

    line: int
    text: str
    source: str
    synchronises: bool
    skipped: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class OneWayBranch:
    """A conditional branch of which lanes went one way only. taken: which; None: not reached."""

    line: int
    text: str
    source: str
    taken: bool | None


@dataclass(frozen=True, kw_only=True)
class KernelCoverage:
    """What the launches of a kernel have reached.

    instructions: how many it has. missed: those that no warp of any launch executed; of guarded
    ones on registers alone, reached. branches: those that did not go both ways.
    """

    kernel: str
    ptx: str = field(repr=False)
    instructions: int
    missed: tuple[MissedInstruction, ...]
    branches: tuple[OneWayBranch, ...] = ()

    @property
    def reached(self) -> int:
        """How many instructions a warp has executed."""
        return self.instructions - len(self.missed)

    def reaches(self, line: int) -> bool:
        """Whether all instructions on a line of the PTX were executed: could a fault there show?"""
        return all(missed.line != line for missed in self.missed)

    @property
    def one_way(self) -> list[OneWayBranch]:
        """The branches that were reached and went one way."""
        return [branch for branch in self.branches if branch.taken is not None]


def coverage_of(grid: Grid) -> KernelCoverage:
    """Of a launch that is over."""
    program = grid.program
    totals = [0] * len(program.steps)
    for counts in grid.warp_step_counts.values():
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    missed = []
    for step, total in zip(program.steps, totals, strict=True):
        skipped = bool(total) and grid.skipped[step.index] == total
        # The register instructions before one with a handler are steps of their own.
        if not total or skipped:
            missed += [
                _missed(program, instruction, skipped)
                for instruction in (step.instructions[-1:] if skipped else step.instructions)
            ]
    return KernelCoverage(
        kernel=program.name,
        ptx=grid.launch.ptx,
        instructions=sum(len(step.instructions) for step in program.steps),
        missed=tuple(missed),
        branches=tuple(_one_way(grid)),
    )


def _missed(program: Program, instruction: PtxInstruction, skipped: bool) -> MissedInstruction:
    return MissedInstruction(
        line=instruction.written_line,
        text=instruction.text,
        source=program.source_of(instruction.line),
        synchronises=f"{instruction.opcode}.".startswith(
            tuple(f"{name}." for name in _SYNCHRONISES)
        ),
        skipped=skipped,
    )


def _one_way(grid: Grid) -> Iterator[OneWayBranch]:
    for step in grid.program.steps:
        ways = grid.branch_ways[step.index]
        if step.kind == BRANCH and ways != TAKEN | NOT_TAKEN:
            instruction = step.instruction
            yield OneWayBranch(
                line=instruction.written_line,
                text=instruction.text,
                source=grid.program.source_of(instruction.line),
                taken=None if not ways else ways == TAKEN,
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
            branches = tuple(_merge_branches(before.branches, coverage.branches))
            merged[key] = replace(before, missed=left, branches=branches)
    return list(merged.values())


def _merge_branches(
    some: Iterable[OneWayBranch], others: Iterable[OneWayBranch]
) -> Iterator[OneWayBranch]:
    """Those that did not go both ways in either, nor one way in each."""
    found = {(branch.line, branch.text): branch for branch in others}
    for branch in some:
        other = found.get((branch.line, branch.text))
        if other is None or {branch.taken, other.taken} == {True, False}:
            continue
        yield other if branch.taken is None else branch


def number_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """ "3-5, 9" of 3, 4, 5, 9: ascending numbers in words, at most so many ranges of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{a}-{b}" if a != b else str(a) for a, b in runs[:most]]
    return ", ".join([*shown, "..."] if len(shown) < len(runs) else shown)
