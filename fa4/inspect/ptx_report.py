"""What the PTX of a kernel tells without any tool: budgets, barriers, tensor memory, loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fa4.inspect.flow import CodeInstruction, Function

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_MARK = re.compile(r"[;{}:]")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")
_CONSTANT = re.compile(r"(-?(?:0[xX][0-9a-fA-F]+|\d+))U?")
_IN_LOOP = 8  # instructions: shorter loops are waits


@dataclass(frozen=True)
class PtxLoop:
    """A loop. line: instruction number of its header. opcodes: instructions by opcode, without
    types, such as "ex2.approx" or "tcgen05.ld". registers: budget of its role, None if none is set.
    parent: `line` of the loop around it."""

    line: int
    length: int
    registers: int | None
    opcodes: Mapping[str, int]
    parent: int | None


@dataclass(frozen=True)
class PtxReport:
    """One kernel. threads: of a CTA (.reqntid), 0 if it is not given. budgets: of setmaxnreg in
    order, each ("inc" | "dec", registers). mbarrier_counts: arrivals each mbarrier is initialised
    for, in order; None where the count is computed. tmem_columns: of each allocation."""

    name: str
    instructions: int
    threads: int
    budgets: tuple[tuple[str, int], ...]
    mbarrier_counts: tuple[int | None, ...]
    tmem_columns: tuple[int | None, ...]
    loops: tuple[PtxLoop, ...]

    def describe(self) -> dict[str, object]:
        """Everything as plain data, for JSON."""
        return {
            "instructions": self.instructions,
            "threads": self.threads,
            "budgets": [list(pair) for pair in self.budgets],
            "mbarrier_counts": list(self.mbarrier_counts),
            "tmem_columns": list(self.tmem_columns),
            "loops": [
                {
                    "line": loop.line,
                    "length": loop.length,
                    "registers": loop.registers,
                    "parent": loop.parent,
                    "opcodes": dict(loop.opcodes),
                }
                for loop in self.loops
            ],
        }


def read(text: str) -> tuple[PtxReport, ...]:
    """The kernels of a PTX module. Raises ValueError if it has none."""
    text = _COMMENT.sub(" ", text)
    entries = list(_ENTRY.finditer(text))
    if not entries:
        raise ValueError(f"no .entry in {text.strip()[:60]!r}; expected the PTX of a kernel")
    found = []
    for entry in entries:
        start = text.index("{", entry.end())
        found.append(_report(entry[1], text[entry.end() : start], text, start))
    return tuple(found)


def _report(name: str, header: str, text: str, start: int) -> PtxReport:
    function = _function(name, text, start)
    code = function.instructions
    values = _constants(code)
    threads = 1
    sizes = re.search(r"\.reqntid\s+([\d,\s]+)", header)
    for size in sizes[1].split(",") if sizes else ("0",):
        threads *= int(size)
    budgets = [
        (one.opcode.split(".")[1], int(one.operands)) for one in code if one.base == "setmaxnreg"
    ]
    return PtxReport(
        name,
        len(code),
        threads,
        tuple(budgets),
        tuple(_last(one, values) for one in code if one.opcode.startswith("mbarrier.init")),
        tuple(_last(one, values) for one in code if one.opcode.startswith("tcgen05.alloc")),
        tuple(_loops(function)),
    )


def _loops(function: Function) -> Iterator[PtxLoop]:
    graph = function.graph
    budgets = {
        start: int(one.operands)
        for start, body in graph.blocks.items()
        for one in body
        if one.base == "setmaxnreg"
    }
    for loop in graph.loops:
        if loop.length >= _IN_LOOP:
            chain = graph.dominators(loop.header)
            counts = Counter(_short(one.opcode) for one in loop.inline)
            yield PtxLoop(
                loop.header,
                loop.length,
                next((budgets[block] for block in chain if block in budgets), None),
                MappingProxyType(dict(sorted(counts.items(), key=lambda x: (-x[1], x[0])))),
                loop.parent,
            )


def _short(opcode: str) -> str:
    """The opcode up to what tells operations apart: "fma.f32x2", "tcgen05.ld", "ex2.approx"."""
    parts = opcode.split(".")
    if parts[0] in ("tcgen05", "mbarrier", "setmaxnreg", "fence", "ex2", "bar", "barrier", "cp"):
        return ".".join(parts[:2])
    packed = [part for part in parts[1:] if part.endswith("x2")]
    return ".".join([parts[0], *packed]) if packed else parts[0]


def _constants(code: tuple[CodeInstruction, ...]) -> dict[str, int]:
    """Registers that a single instruction sets, to a constant."""
    values: dict[str, int] = {}
    written = Counter(one.operands.partition(",")[0].strip() for one in code)
    for one in code:
        target, _, source = one.operands.partition(",")
        constant = _CONSTANT.fullmatch(source.strip())
        if one.base == "mov" and constant and written[target.strip()] == 1:
            values[target.strip()] = int(constant[1], 0)
    return values


def _last(one: CodeInstruction, values: Mapping[str, int]) -> int | None:
    """Value of the last operand, if it is known."""
    operand = one.operands.rpartition(",")[2].strip()
    constant = _CONSTANT.fullmatch(operand)
    return int(constant[1], 0) if constant else values.get(operand)


def _function(name: str, text: str, start: int) -> Function:
    """The body that opens at `start`. Labels of inner scopes get the scope's number in front."""
    instructions: list[CodeInstruction] = []
    labels: dict[str, int] = {}
    tables: dict[str, tuple[str, ...]] = {}
    scopes: list[int] = []
    count, begin = 0, start
    for mark in _MARK.finditer(text, start):
        written = text[begin : mark.start()].strip()
        if mark[0] == "{" and not written:
            scopes.append(count)
            count += 1
        elif mark[0] == "}" and not written:
            scopes.pop()
        elif mark[0] == ":" and _NAME.fullmatch(written):
            labels[f"{scopes[-1]}:{written}"] = len(instructions)
        elif mark[0] == ";":
            if written.startswith(".branchtargets"):
                last = max(labels, key=lambda label: labels[label])
                tables[last] = _qualified(written.removeprefix(".branchtargets"), scopes)
            elif written and not written.startswith("."):
                instructions.append(_instruction(len(instructions), written, scopes))
        else:
            continue
        begin = mark.end()
        if not scopes:
            break
    code = tuple(_resolved(one, labels, tables) for one in instructions)
    return Function(name, name, code, labels)


def _instruction(number: int, text: str, scopes: list[int]) -> CodeInstruction:
    guard = ""
    if text.startswith("@"):
        guard, _, text = text[1:].partition(" ") if " " in text else text[1:].partition("\t")
    opcode, _, operands = text.strip().replace("\t", " ").partition(" ")
    operands = operands.strip()
    base = opcode.partition(".")[0]
    if base in ("bra", "brx"):
        label = operands.rpartition(",")[2]
        targets = _qualified(label, scopes)
        return CodeInstruction(number, opcode, operands, guard, targets, True, bool(guard))
    if base in ("ret", "exit", "trap"):
        return CodeInstruction(number, opcode, operands, guard, (), True, bool(guard))
    return CodeInstruction(number, opcode, operands, guard)


def _qualified(listed: str, scopes: list[int]) -> tuple[str, ...]:
    """Each label with every scope that it may be in, innermost first."""
    names = [name.strip() for name in listed.split(",")]
    return tuple(f"{scope}:{name}" for name in names for scope in reversed(scopes))


def _resolved(
    one: CodeInstruction, labels: Mapping[str, int], tables: Mapping[str, tuple[str, ...]]
) -> CodeInstruction:
    """With the targets that exist: the innermost label of a name."""
    if not one.targets:
        return one
    found: dict[str, str] = {}
    for target in one.targets:
        for label in tables.get(target, (target,)):
            if label in labels:
                found.setdefault(label.partition(":")[2], label)
    return CodeInstruction(
        one.address, one.opcode, one.operands, one.guard, tuple(found.values()), True, one.falls
    )
