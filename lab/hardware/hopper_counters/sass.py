"""A kernel's instructions as ncu lists them: roles, loops, pipes, what their warps waited for."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

BRANCHES = ("BRA", "BRX", "JMP", "CALL", "BSYNC", "BREAK")
ENDS = ("EXIT", "RET")
# Opcodes of each pipe (what stands before the first dot); the counters of six kernels hold this
# table to the hardware.
PIPES: Mapping[str, tuple[str, ...]] = {
    "xu": ("MUFU", "I2F", "F2I"),
    "tensor_op_gmma": ("HGMMA", "QGMMA", "IGMMA"),
    "fma": ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2", "VIADD"),
    "alu": (
        "FMNMX", "FSETP", "FSEL", "FCHK", "F2FP", "IADD3", "LEA", "LOP3", "SHF", "ISETP",
        "SEL", "PRMT", "IMNMX", "VIMNMX", "VIADDMNMX", "VIMNMX3", "PLOP3", "MOV", "SGXT", "IABS",
        "P2R", "R2P", "R2UR", "CS2R", "VOTE", "LEPC", "NOP", "FLO", "POPC", "BREV",
    ),
}  # fmt: skip
MOST_OF_A_WAIT = 16  # instructions
FEW_REGISTERS = 64  # per thread, of warps that only start copies


@dataclass(frozen=True)
class Instruction:
    """One line: where, what, how many warps executed it, and samples by reason of waiting."""

    address: int
    text: str
    executed: int
    samples: int
    stalls: Mapping[str, int]

    @property
    def opcode(self) -> str:
        """With its modifiers, without predicate and operands."""
        return re.sub(r"^\s*@!?U?P\w+\s*", "", self.text).split()[0].rstrip(";")

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def is_predicated(self) -> bool:
        """Whether it may be passed over."""
        return self.text.lstrip().startswith("@")

    @property
    def target(self) -> int | None:
        """Where a branch goes, as an address."""
        if self.name not in (*BRANCHES, "BSSY"):
            return None
        found = re.findall(r"\b0x([0-9a-f]+)\b", self.text)
        return int(found[-1], 16) if found else None


def kernels(text: str) -> Iterator[list[Instruction]]:
    """The kernels of ncu's source page (CSV), in order. Raises ValueError for another form."""
    parts = re.split(r'(?m)^"Kernel Name".*\n', text)[1:]
    if not parts:
        raise ValueError('no kernel in the source page: no line begins with "Kernel Name"')
    for part in parts:
        rows = csv.DictReader(io.StringIO(part))
        if not {"Address", "Source", "# Samples", "Instructions Executed"} <= set(
            rows.fieldnames or ()
        ):
            raise ValueError(f"the source page lacks columns; it has {rows.fieldnames}")
        stalls = [name for name in rows.fieldnames or () if re.fullmatch(r"stall_\w+", name)]
        yield [
            Instruction(
                address=int(row["Address"], 16),
                text=row["Source"],
                executed=int(row["Instructions Executed"]),
                samples=int(row["# Samples"]),
                stalls={
                    name.removeprefix("stall_"): int(row[name]) for name in stalls if int(row[name])
                },
            )
            for row in rows
        ]


class Code:
    """Instructions with their flow of control."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        """Instructions in the order of their addresses."""
        self.instructions = instructions
        self._at = {item.address: i for i, item in enumerate(instructions)}

    def successors(self, index: int) -> list[int]:
        """Where control may go after an instruction. A reconvergence counts as going on."""
        item = self.instructions[index]
        found = []
        if item.name in BRANCHES and item.target in self._at:
            found.append(self._at[item.target])
        goes_on = item.is_predicated or item.name not in ("BRA", "JMP", *ENDS)
        if goes_on and index + 1 < len(self.instructions):
            found.append(index + 1)
        return found

    def reached(self, starts: Iterable[int], stops: Collection[int]) -> set[int]:
        """Instructions that control can reach from these without passing others."""
        seen: set[int] = set()
        waiting = list(starts)
        while waiting:
            index = waiting.pop()
            if index not in seen and index not in stops:
                seen.add(index)
                waiting += self.successors(index)
        return seen

    def roles(self) -> list[str]:
        """Of each instruction. The producer's part begins where `setmaxnreg` leaves few registers,
        the consumers' where it leaves or takes many; what comes before both is the prologue."""
        entries: dict[str, set[int]] = {"producer": set(), "consumer": set()}
        for i, item in enumerate(self.instructions):
            if item.name == "USETMAXREG":
                registers = int(item.text.split()[-1].rstrip(";"), 16)
                entries["producer" if registers < FEW_REGISTERS else "consumer"].add(i)
        others = {"producer": "consumer", "consumer": "producer"}
        reached = {role: self.reached(entries[role], entries[others[role]]) for role in entries}
        return [
            "all" if i in reached["producer"] and i in reached["consumer"]
            else next((role for role in entries if i in reached[role]), "prologue")
            for i in range(len(self.instructions))
        ]  # fmt: skip

    def loops(self) -> list[range]:
        """Innermost loops that do work: from the target of a backward branch to the branch. Loops
        that only wait, alone or within one of these, are none."""
        spans = [
            range(self._at[item.target], i + 1)
            for i, item in enumerate(self.instructions)
            if item.name == "BRA" and item.target in self._at and self._at[item.target] < i
        ]
        spans = [span for span in spans if not self._is_wait(span)]
        # A branch back from a wait behind the code ends no loop: what it spans cuts through loops.
        spans = [
            span
            for span in spans
            if self.instructions[span[-1]].is_predicated
            or not any(x.start < span.start < x.stop < span.stop for x in spans)
        ]
        return [
            span
            for span in spans
            if not any(x != span and x.start in span and x[-1] in span for x in spans)
        ]

    def passed_over(self, loop: range) -> set[int]:
        """Instructions of a loop that a branch within it may pass over, or that wait."""
        found: set[int] = set()
        for i in loop:
            item = self.instructions[i]
            if item.name == "BRA" and item.target in self._at:
                target = self._at[item.target]
                if target in loop:
                    span = range(i + 1, target) if target > i else range(target, i + 1)
                    if span != loop:
                        found |= set(span)
        return found

    def _is_wait(self, span: range) -> bool:
        names = {self.instructions[i].name for i in span}
        return len(span) < MOST_OF_A_WAIT and bool(names & {"SYNCS", "NANOSLEEP", "USETMAXREG"})


def pipe_of(name: str) -> str | None:
    """The pipe of an opcode, where the table has it."""
    return next((pipe for pipe, names in PIPES.items() if name in names), None)


def by_name(instructions: Iterable[Instruction]) -> Counter[str]:
    """Executions of each opcode without modifiers."""
    found: Counter[str] = Counter()
    for item in instructions:
        found[item.name] += item.executed
    return found
