"""Turns a parsed kernel into a program: steps that the machine executes one after the other.

A step is either a run of register instructions, compiled to one function over 32 lanes, or one
instruction with a Python handler (memory, barriers, tensor operations), or a branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.ptx.syntax import (
    Address,
    Integer,
    Kernel,
    Module,
    Operand,
    Pair,
    PtxInstruction,
    Register,
    Symbol,
    Vector,
)
from fa4.emulator.translate.calls import BoundCall, CallFrame, bind_function_call, call_frames
from fa4.emulator.translate.context import Handler, KernelContext, ScalarReader
from fa4.emulator.translate.flow import live_out, postdominators
from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.layout import (
    SHARED_WINDOW,
    RegisterFile,
    Variables,
    lay_out_registers,
    lay_out_variables,
)
from fa4.emulator.translate.link import link
from fa4.emulator.translate.native import SegmentFunction, compile_functions, function_text
from fa4.emulator.translate.table import Operation, Table, Unsupported, find

RUN, MACHINE, BRANCH, JUMP, INDEXED, EXIT, CALL, RETURN = range(8)


@dataclass(slots=True, eq=False)
class Step:
    """One step of a program.

    kind: RUN, MACHINE, BRANCH (conditional), JUMP, INDEXED (brx.idx), EXIT, CALL (of a function
    of the module), RETURN (the end of one). call: of a CALL. function: the compiled registers
    part; a branch's returns the mask of lanes that take it. target: step of the branch; meet: step
    where its diverged lanes meet again (-1: never). converges: the lanes of the warp that
    `members` reads (None: all) wait for each other before it. reads, writes, touches: registers
    that it reads first, writes, either. guard: of a step that is not compiled, (word of the
    predicate in the register file, all bits set if it is negated). held: those of
    `Program.held_registers` that it touches, as bits; of what holds them itself none.
    """

    index: int
    kind: int
    instructions: tuple[PtxInstruction, ...]
    function: SegmentFunction | None = None
    handler: Callable[..., Any] | None = None
    operation: Operation | None = None
    target: int = -1
    targets: tuple[int, ...] = ()
    meet: int = -1
    converges: bool = False
    members: ScalarReader | None = None
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    touches: frozenset[str] = frozenset()
    guard: tuple[int, int] | None = None
    held: int = 0
    call: BoundCall | None = None

    @property
    def instruction(self) -> PtxInstruction:
        """Its last instruction: the branch, or the one with a handler."""
        return self.instructions[-1]


@dataclass(eq=False)
class Program:
    """An executable kernel, with the functions that it calls. frames: theirs, and its own first.

    instruction_of_line: by `PtxInstruction.line`. shared_lines: those with several instructions.
    held_registers: those that asynchronous instructions use after their issue (wgmma), name -> bit.
    """

    module: Module
    kernel: Kernel
    registers: RegisterFile
    variables: Variables
    steps: list[Step]
    frames: tuple[CallFrame, ...]
    instruction_of_line: dict[int, PtxInstruction] = field(default_factory=dict)
    held_registers: dict[str, int] = field(default_factory=dict)
    shared_lines: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @cached_property
    def step_of_line(self) -> dict[int, int]:
        """The step that an instruction is in, by `PtxInstruction.line`."""
        return {i.line: step.index for step in self.steps for i in step.instructions}

    @cached_property
    def most_named_registers(self) -> int:
        """The largest number that a setmaxnreg names; 256 without one."""
        named = [
            operand.value
            for instruction in self.instruction_of_line.values()
            if instruction.opcode.startswith("setmaxnreg")
            for operand in instruction.operands
            if isinstance(operand, Integer)
        ]
        return max(named, default=256)

    def held_bits(self, names: Iterable[str]) -> int:
        """The bits of those of the names that are among `held_registers`."""
        bits = 0
        for name in self.held_registers.keys() & set(names):
            bits |= self.held_registers[name]
        return bits

    def instruction_at(self, line: int) -> PtxInstruction | None:
        """The instruction of a `PtxInstruction.line`, or None."""
        return self.instruction_of_line.get(line)

    def describe_line(self, line: int) -> str:
        """ "PTX line 12: st.shared.b32" """
        instruction = self.instruction_at(line)
        if instruction is None:
            return f"PTX line {line}"
        return f"PTX line {instruction.written_line}: {instruction.opcode}"

    def written(self, message: str) -> str:
        """A message with lines of the text instead of numbers that stand for instructions."""

        def replace(found: re.Match[str]) -> str:
            instruction = self.instruction_at(int(found[1]))
            shares = instruction is not None and instruction.shared_line
            return self.describe_line(int(found[1])) if shares else found[0]

        return re.sub(r"PTX line (\d+)", replace, message)

    def source_of(self, line: int) -> str:
        """ "file.py:12" for a PTX line that has .loc information, else ""."""
        instruction = self.instruction_at(line)
        if instruction is None or instruction.location is None:
            return ""
        return f"{instruction.location[0]}:{instruction.location[1]}"


def build_program(module: Module, kernel: Kernel, table: Table) -> Program:
    """Translates a kernel by the rows of a table.

    Raises UnsupportedInstruction with all that cannot be executed.
    """
    linked, routines = link(module, kernel)
    registers = lay_out_registers(linked)
    variables = lay_out_variables(module, linked, routines)
    context = KernelContext(module, linked, registers, variables, routines)
    assembler = _Assembler(context, table)
    steps = assembler.assemble()
    frames = call_frames(context, assembler.entries)
    program = Program(module, linked, registers, variables, steps, frames)
    for step in steps:
        for instruction in step.instructions:
            program.instruction_of_line[instruction.line] = instruction
            if instruction.shared_line:
                program.shared_lines.add(instruction.shared_line)
    _find_held(program)
    return program


def _find_held(program: Program) -> None:
    """Numbers the registers that instructions hold, and notes which steps touch them."""
    names: set[str] = set()
    for step in program.steps:
        if step.operation is not None and step.operation.holds:
            names |= held_by(step.instruction)
    program.held_registers = {name: 1 << k for k, name in enumerate(sorted(names))}
    for step in program.steps if names else ():
        if step.operation is None or not step.operation.holds:
            step.held = program.held_bits(step.touches)


def held_by(instruction: PtxInstruction) -> set[str]:
    """The registers that an instruction with `Operation.holds` holds."""
    vectors = [operand for operand in instruction.operands if isinstance(operand, Vector)]
    return set().union(*(registers_of(vector) for vector in vectors))


def registers_of(operand: Operand) -> set[str]:
    """The names of all registers in an operand."""
    if isinstance(operand, Register):
        return {operand.name}
    if isinstance(operand, Vector):
        return set().union(*(registers_of(element) for element in operand.elements))
    if isinstance(operand, Pair):
        return registers_of(operand.first) | registers_of(operand.second)
    if isinstance(operand, Address):
        found = {c.name for c in operand.coordinates if isinstance(c, Register)}
        return found | ({operand.base.name} if isinstance(operand.base, Register) else set())
    return set()


def _watched(watch: Handler, step: Step, fragment: Any, mask: int) -> None:
    """Does a step of one register instruction after `watch` has seen its operands."""
    watch(fragment, mask)
    warp = fragment.warp
    if step.function is not None:
        step.function(warp.base, mask, warp.cta.grid.parameter_address)


class _Assembler:
    """Collects instructions into steps."""

    def __init__(self, context: KernelContext, table: Table) -> None:
        self.kernel = context.kernel
        self.registers = context.registers
        self.variables = context.variables
        self.context = context
        self.table = table
        self.steps: list[Step] = []
        self.builders: dict[int, tuple[SegmentBuilder, str]] = {}
        self.problems: list[tuple[int, str, str]] = []
        self.pending: list[PtxInstruction] = []
        self.builder = self._new_builder()
        self.converges = False
        self.number = 0  # of the routine, as these are
        self.entries: list[int] = []  # the first step of each
        self.ends: list[int] = []  # the last one
        self.returns: dict[int, int] = {}  # a step with a `ret` -> where it leads

    def _new_builder(self) -> SegmentBuilder:
        def address(name: str) -> int:
            if name == "%shared_window":
                return SHARED_WINDOW
            if name not in self.variables.addresses:
                raise Unsupported(f"the address of {name}")
            return self.variables.addresses[name]

        variables = self.variables
        return SegmentBuilder(self.registers.offsets, address, variables.shared, variables.framed)

    def assemble(self) -> list[Step]:
        """All steps, compiled."""
        step_of_label: dict[str, int] = {}
        for number, routine in enumerate(self.context.routines):
            self.number = number
            self.entries.append(len(self.steps))
            at_label: dict[int, list[str]] = {}
            for label, position in routine.labels.items():
                at_label.setdefault(position, []).append(label)
            for position in range(routine.begin, routine.end):
                if position in at_label:
                    self._finish(RUN)
                    step_of_label |= dict.fromkeys(at_label[position], len(self.steps))
                self._add(self.kernel.instructions[position])
            self._finish(RUN)
            step_of_label |= dict.fromkeys(at_label.get(routine.end, ()), len(self.steps))
            # Falling off the end is the same as ret.
            self.ends.append(len(self.steps))
            self.steps.append(Step(len(self.steps), RETURN if number else EXIT, ()))
        if self.problems:
            raise UnsupportedInstruction(self.kernel.name, self.problems)
        self._link(step_of_label)
        self._compile()
        return self.steps

    def _add(self, instruction: PtxInstruction) -> None:
        try:
            operation = find(instruction, self.table)
            if operation.kind == "control":
                self._add_control(instruction, operation)
            elif operation.kind == "machine":
                self._finish(RUN)
                self._add_machine(instruction, operation)
            else:
                watch = operation.watch and operation.watch(instruction, self.context)
                if operation.converges or watch is not None:
                    self._finish(RUN)
                    self.converges = operation.converges
                self.builder.guard = self._guard(instruction)
                operation.function(self.builder, instruction)
                self.pending.append(instruction)
                if watch is not None:
                    self._finish(RUN)
                    self.steps[-1].kind = MACHINE
                    self.steps[-1].handler = partial(_watched, watch, self.steps[-1])
        except Unsupported as problem:
            self._refuse(instruction, str(problem))
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError):
            # Whatever an entry of the table trips over: operands of another number or kind.
            self._refuse(instruction, "operands that do not fit")

    def _refuse(self, instruction: PtxInstruction, why: str) -> None:
        """Notes an instruction; what was collected with it is dropped, since nothing will run."""
        self.problems.append((instruction.written_line, instruction.text, why))
        self.pending, self.converges = [], False
        self.builder = self._new_builder()

    def _guard(self, instruction: PtxInstruction) -> Any:
        if instruction.guard is None:
            return None
        value = self.builder.register(instruction.guard.name)
        return ~value if instruction.guard.negated else value

    def _add_machine(self, instruction: PtxInstruction, operation: Operation) -> None:
        handler = operation.function(instruction, self.context)
        step = Step(len(self.steps), MACHINE, (instruction,), handler=handler, operation=operation)
        step.converges = operation.converges
        if step.converges:
            step.members = self._members(instruction)
        self._append_whole(step)

    def _append_whole(self, step: Step) -> None:
        """Adds a step of one instruction that is not compiled."""
        (instruction,) = step.instructions
        guard = instruction.guard
        if guard is not None:
            step.guard = self.registers.offsets[guard.name][0] // 4, -int(guard.negated)
        names = set().union(*(registers_of(o) for o in instruction.operands), set())
        step.reads = frozenset(names | ({guard.name} if guard is not None else set()))
        step.touches = step.reads
        self.steps.append(step)

    def _members(self, instruction: PtxInstruction) -> ScalarReader | None:
        """Reads the mask of lanes that a .sync instruction names; None: all of them."""
        if instruction.parts[0] in ("activemask", "movmatrix", "ldmatrix", "stmatrix", "tensormap"):
            return None
        position = 0 if instruction.parts[0] == "bar" else -1
        return self.context.scalar(instruction.operands[position], "b32")

    def _add_control(self, instruction: PtxInstruction, operation: Operation) -> None:
        if self.converges:  # lanes that met for a .sync instruction part again behind it
            self._finish(RUN)
        kind = operation.function(instruction)
        if kind == CALL:
            self._finish(RUN)
            call = bind_function_call(instruction, self.context)
            self._append_whole(Step(len(self.steps), CALL, (instruction,), call=call))
            return
        if instruction.parts[0] == "bra":
            (target,) = instruction.operands
            if not isinstance(target, Symbol) or target.name not in self.kernel.labels:
                raise Unsupported(f"{target} is not a label")
        guard = self._guard(instruction)
        if kind == RETURN:
            self.returns[len(self.steps)] = self.number
        if kind == RETURN or (kind == EXIT and guard is not None):
            kind = BRANCH
        self.pending.append(instruction)
        result = "0"
        if kind == BRANCH and guard is None:
            kind = JUMP
        if kind == BRANCH:
            self.builder.guard = guard
            result = self.builder.ballot(self.builder.active())
        if kind == INDEXED:
            self._listed_targets(instruction)
            self.builder.register(self._index_register(instruction))
        self._finish(kind, result)

    @staticmethod
    def _index_register(instruction: PtxInstruction) -> str:
        index = instruction.operands[0]
        if not isinstance(index, Register):
            raise Unsupported("brx.idx needs a register index")
        return index.name

    def _finish(self, kind: int, result: str = "0") -> None:
        """Closes the current run of register instructions as a step of `kind`."""
        if not self.pending:
            self.converges = False
            return
        step = Step(len(self.steps), kind, tuple(self.pending), converges=self.converges)
        self.builder.guard = None
        if self.builder.lines or self.builder.written:
            self.builders[step.index] = (self.builder, result)
        if self.converges:
            step.members = self._members(self.pending[0])
        step.reads = frozenset(self.builder.read_first)
        step.writes = frozenset(self.builder.written)
        step.touches = step.reads | step.writes
        self.steps.append(step)
        self.pending = []
        self.builder = self._new_builder()
        self.converges = False

    def _link(self, step_of_label: dict[str, int]) -> None:
        """Branch targets, and for each branch the step where diverged lanes meet."""
        successors: list[list[int]] = []
        for step in self.steps:
            after = [step.index + 1]
            if step.kind in (BRANCH, JUMP):
                target = step.instruction.operands[0] if step.instruction.operands else None
                step.target = (
                    step_of_label[target.name]
                    if isinstance(target, Symbol)
                    else self.ends[self.returns.get(step.index, 0)]
                )
                after = [step.target] + (after if step.kind == BRANCH else [])
            elif step.kind == INDEXED:
                step.targets = tuple(
                    step_of_label[name] for name in self._listed_targets(step.instruction)
                )
                after = list(dict.fromkeys(step.targets))
            elif step.kind in (EXIT, RETURN):
                after = []
            successors.append(after)
        self.successors = successors
        immediate = postdominators(successors)
        for step in self.steps:
            if step.kind in (BRANCH, INDEXED):
                step.meet = immediate[step.index]

    def _listed_targets(self, instruction: PtxInstruction) -> tuple[str, ...]:
        name = instruction.operands[1]
        if not isinstance(name, Symbol):
            raise Unsupported("brx.idx needs a target list")
        return self.kernel.branch_targets[name.name]

    def _compile(self) -> None:
        uses = [set(step.reads) for step in self.steps]
        defines = [set(step.writes) - set(step.reads) for step in self.steps]
        live = live_out(self.successors, uses, defines, [step.writes for step in self.steps])
        bodies = {}
        for index, (builder, result) in self.builders.items():
            kept = live[index]
            if self.steps[index].kind == INDEXED:  # the engine reads the index itself
                kept = kept | {self._index_register(self.steps[index].instruction)}
            builder.store_back(kept)
            bodies[str(index)] = function_text(builder, result)
        for key, function in compile_functions(bodies).items():
            self.steps[int(key)].function = function
