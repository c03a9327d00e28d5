"""Joins a kernel with the device functions that it may call (PTX ISA 7.1, 7.3).

All of them become one list of instructions, each function's behind a label with its name. A call
is a step that the machine executes (`fa4.emulator.machine.calls`): nothing is inlined, so that a
line of a function stays one instruction, and recursion works. Arguments, results and local
variables of an activation lie in its frame, a part of each thread's local memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fa4.emulator.ptx.syntax import (
    CALL_PARAMETER,
    Address,
    Kernel,
    Module,
    Operand,
    Pair,
    PtxInstruction,
    Register,
    Symbol,
    Variable,
    Vector,
)


@dataclass(frozen=True)
class Routine:
    """A function of a linked kernel, or the kernel itself.

    begin, end: its instructions. parameters, results, frame: the variables of its frame by their
    names in the linked kernel; `frame` holds all of them, and what else lies there. labels: by
    the instruction that each stands before.
    """

    name: str
    begin: int
    end: int
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    frame: tuple[Variable, ...]
    registers: tuple[str, ...]
    labels: dict[str, int]


def link(module: Module, kernel: Kernel) -> tuple[Kernel, tuple[Routine, ...]]:
    """The kernel with all that it may call, and its routines, itself first.

    Names of a function's registers, variables and labels get its name behind "@". Variables in
    frames that calls pass on begin with `CALL_PARAMETER`.
    """
    routines: list[Routine] = []
    registers: dict[str, str] = {}
    variables: list[Variable] = []
    instructions: list[PtxInstruction] = []
    labels: dict[str, int] = {}
    targets: dict[str, tuple[str, ...]] = {}
    for part in (kernel, *_reachable(module, kernel)):
        rename = _renaming(part)
        begin = len(instructions)
        if part.is_entry and not any(v.space == "param" for v in part.variables):
            instructions += part.instructions  # every name stays
        else:
            instructions += [_renamed(instruction, rename) for instruction in part.instructions]
        own = {rename(name): kind for name, kind in part.registers.items()}
        registers |= own
        placed = {rename(name): begin + at for name, at in part.labels.items()}
        labels |= placed
        for name, listed in part.branch_targets.items():
            targets[rename(name)] = tuple(map(rename, listed))
        passed = () if part.is_entry else (*part.parameters, *part.results)
        declared = [replace(v, name=rename(v.name)) for v in (*passed, *part.variables)]
        framed = [replace(v, space="local") for v in declared if v.space in ("param", "local")]
        variables += [v for v in declared if v.space not in ("param", "local")]
        count = 0 if part.is_entry else len(part.parameters)
        routines.append(
            Routine(
                part.name,
                begin,
                len(instructions),
                tuple(framed[:count]),
                tuple(framed[count : len(passed)]),
                tuple(framed),
                tuple(own),
                placed,
            )
        )
    linked = replace(
        kernel,
        registers=registers,
        variables=tuple(variables),
        instructions=tuple(instructions),
        labels=labels,
        branch_targets=targets,
    )
    return linked, tuple(routines)


def callee(instruction: PtxInstruction) -> Operand:
    """The function that a call names, or the register with its address."""
    first, *rest = instruction.operands
    return rest[0] if isinstance(first, Vector) else first


def passed(instruction: PtxInstruction) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """(the arguments, the results) of a call."""
    operands = instruction.operands
    results = operands[0].elements if isinstance(operands[0], Vector) else ()
    behind = operands[1 + isinstance(operands[0], Vector) :]
    arguments = behind[0].elements if behind and isinstance(behind[0], Vector) else ()
    return arguments, results


def _reachable(module: Module, kernel: Kernel) -> list[Kernel]:
    """The functions with a body that the kernel names, or a variable, or one of these."""
    named = {name for variable in module.variables for _, name in variable.addresses}
    found: dict[str, Kernel] = {}
    waiting = [kernel, *(module.functions[name] for name in named & module.functions.keys())]
    while waiting:
        part = waiting.pop()
        if not part.is_entry:
            if part.name in found or not part.has_body:
                continue
            found[part.name] = part
        for instruction in part.instructions:
            names = _symbols(instruction.operands)
            waiting += [module.functions[name] for name in names if name in module.functions]
    return [found[name] for name in module.functions if name in found]


def _symbols(operands: Iterable[Operand]) -> Iterable[str]:
    for operand in operands:
        if isinstance(operand, Symbol):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from _symbols(operand.elements)


def _renaming(part: Kernel) -> Callable[[str], str]:
    """From a name in the kernel or function to the one in the linked kernel."""
    of_calls = {v.name for v in part.variables if v.space == "param"}
    own = set(part.registers) | set(part.labels) | set(part.branch_targets)
    own |= {v.name for v in part.variables}
    if not part.is_entry:
        of_calls |= {v.name for v in (*part.parameters, *part.results)}
        own |= of_calls

    def rename(name: str) -> str:
        if name not in own:
            return name
        new = name if part.is_entry else f"{name}@{part.name}"
        return CALL_PARAMETER + new if name in of_calls else new

    return rename


def _renamed(instruction: PtxInstruction, rename: Callable[[str], str]) -> PtxInstruction:
    def new(operand: Operand) -> Operand:
        if isinstance(operand, Register | Symbol):
            return replace(operand, name=rename(operand.name))
        if isinstance(operand, Address):
            coordinates = tuple(map(new, operand.coordinates))
            return Address(new(operand.base), operand.offset, coordinates)  # type: ignore[arg-type]
        if isinstance(operand, Vector):
            return Vector(tuple(map(new, operand.elements)))
        if isinstance(operand, Pair):
            return Pair(new(operand.first), new(operand.second))
        return operand

    guard = instruction.guard
    if guard is not None:
        guard = replace(guard, name=rename(guard.name))
    return replace(instruction, operands=tuple(map(new, instruction.operands)), guard=guard)
