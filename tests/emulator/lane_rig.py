"""Runs a few register instructions on 32 lanes, without a kernel around them."""

from __future__ import annotations

import numpy as np

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.ptx.syntax import Operand, PtxInstruction, Register
from fa4.emulator.translate.lanes import SegmentBuilder, width_of
from fa4.emulator.translate.native import compile_functions, function_text
from fa4.emulator.translate.table import find

INTEGERS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FULL = 0xFFFFFFFF


def instruction(
    opcode: str, *operands: Operand | str, guard: Register | None = None
) -> PtxInstruction:
    """A PtxInstruction; a string operand is the name of a register."""
    made = tuple(Register(o) if isinstance(o, str) else o for o in operands)
    return PtxInstruction(opcode, tuple(opcode.split(".")), made, guard, 1, opcode)


def run(
    program: list[PtxInstruction],
    registers: dict[str, str],
    inputs: dict[str, np.ndarray | int],
    mask: int = FULL,
) -> dict[str, np.ndarray | int]:
    """Executes the program. registers: name -> PTX type. inputs: 32 integers (bit patterns) a
    register, a predicate as a 32-bit mask. Returns the final bits of every register."""
    layout = {}
    for index, (name, kind) in enumerate(registers.items()):
        layout[name] = (index * 512, width_of(kind))
    memory = np.zeros(512 * (len(layout) + 1), np.uint8)
    start = -memory.ctypes.data % 64
    memory = memory[start:]
    for name, value in inputs.items():
        offset, bits = layout[name]
        if bits == 1:
            memory[offset : offset + 4].view(np.uint32)[0] = value
        else:
            memory[offset : offset + 4 * bits].view(INTEGERS[bits])[:] = value
    builder = SegmentBuilder(layout, lambda symbol: 0)
    for item in program:
        builder.guard = None
        if item.guard is not None:
            taken = builder.register(item.guard.name)
            builder.guard = ~taken if item.guard.negated else taken
        find(item, TABLE).function(builder, item)
    builder.store_back(set(layout))
    function = compile_functions({"f": function_text(builder)})["f"]
    function(memory.ctypes.data, mask, 0)
    result: dict[str, np.ndarray | int] = {}
    for name, (offset, bits) in layout.items():
        if bits == 1:
            result[name] = int(memory[offset : offset + 4].view(np.uint32)[0])
        else:
            result[name] = memory[offset : offset + 4 * bits].view(INTEGERS[bits]).copy()
    return result
