"""What a call of a device function passes, and where its frame lies (PTX ISA 9.7.12.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from fa4.emulator.ptx.syntax import CALL_PARAMETER, Operand, PtxInstruction, Register, Symbol
from fa4.emulator.translate.context import KernelContext, Reader
from fa4.emulator.translate.layout import FUNCTION_BYTES, FUNCTION_WINDOW, LOCAL_WINDOW
from fa4.emulator.translate.link import callee, passed
from fa4.emulator.translate.table import Unsupported

# (byte offset in a frame, bytes) of each argument or result, in order.
Places: TypeAlias = tuple[tuple[int, int], ...]

# Functions without a body that the driver provides: `isa.calls` does them.
DRIVER_FUNCTIONS = frozenset({"vprintf", "__assertfail"})


@dataclass(frozen=True, eq=False)
class BoundCall:
    """A bound call. routine: the number of the function, -1 where `address` reads it."""

    routine: int
    address: Reader | None
    arguments: Places
    results: Places


@dataclass(frozen=True, eq=False)
class CallFrame:
    """What the machine needs of a routine.

    entry: its first step. registers: (byte offset, bits) of each of its registers.
    """

    name: str
    entry: int
    size_bytes: int
    parameters: Places
    results: Places
    registers: tuple[tuple[int, int], ...]


def call_frames(context: KernelContext, entries: Iterable[int]) -> tuple[CallFrame, ...]:
    """Of each routine, the kernel first, by its first step."""
    sizes = context.variables.frame_bytes
    return tuple(
        CallFrame(
            routine.name,
            entry,
            size,
            _places(context, (v.name for v in routine.parameters)),
            _places(context, (v.name for v in routine.results)),
            tuple(context.registers.offsets[name] for name in routine.registers),
        )
        for routine, entry, size in zip(context.routines, entries, sizes, strict=True)
    )


def calls_function(instruction: PtxInstruction) -> bool:
    """Whether a call is none of a driver's function."""
    target = callee(instruction)
    return not isinstance(target, Symbol) or target.name not in DRIVER_FUNCTIONS


def bind_function_call(instruction: PtxInstruction, context: KernelContext) -> BoundCall:
    """The call, of a function by name or by the address in a register. Raises Unsupported."""
    target, given = callee(instruction), places(instruction, context)
    if isinstance(target, Register):
        return BoundCall(-1, context.reader(target, "b64"), *given)
    name = target.name if isinstance(target, Symbol) else str(target)
    numbers = {routine.name: number for number, routine in enumerate(context.routines) if number}
    if name not in numbers:
        raise Unsupported(f"a call of {name}, of which the module has no body")
    routine = context.routines[numbers[name]]
    for what, had, wanted in zip(
        ("arguments", "results"), given, (routine.parameters, routine.results), strict=True
    ):
        if [size for _, size in had] != [v.size_bytes for v in wanted]:
            raise Unsupported(f"{what} of {_sizes(had)} bytes, where {name} has others")
    return BoundCall(numbers[name], None, *given)


def places(instruction: PtxInstruction, context: KernelContext) -> tuple[Places, Places]:
    """Where the caller has the arguments and the results of a call."""
    arguments, results = passed(instruction)
    return _places(context, map(_name, arguments)), _places(context, map(_name, results))


def routine_at(address: int) -> int:
    """The number of the routine with an address; 0 or a number of none if it is not one's."""
    number, rest = divmod(address - FUNCTION_WINDOW, FUNCTION_BYTES)
    return 0 if rest else number


def _name(operand: Operand) -> str:
    if not isinstance(operand, Symbol) or not operand.name.startswith(CALL_PARAMETER):
        raise Unsupported(f"{operand} as an argument: only .param variables are passed")
    return operand.name


def _places(context: KernelContext, names: Iterable[str]) -> Places:
    addresses, sizes = context.variables.addresses, context.sizes
    return tuple((addresses[name] - LOCAL_WINDOW, sizes[name]) for name in names)


def _sizes(places: Places) -> str:
    return ", ".join(str(size) for _, size in places) or "no"
