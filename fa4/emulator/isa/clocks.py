"""mov of a clock, which is read anew at every use (PTX ISA 10.20 - 10.24): the executed steps."""

from __future__ import annotations

import numpy as np

from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import PtxInstruction, Register
from fa4.emulator.translate.context import UNSIGNED, Handler, KernelContext
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.table import TableRows

ROWS = TableRows()

CLOCKS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


def reads_clock(instruction: PtxInstruction) -> bool:
    """Whether the source of a mov is a clock."""
    source = instruction.operands[-1]
    return isinstance(source, Register) and source.name in CLOCKS


# Its forms are those of the other mov.
@ROWS.machine("mov", "9.7.9.3", "", accepts=reads_clock)
def bind_clock(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """All lanes read the same count."""
    target, source = instruction.operands
    kind = instruction.parts[-1]
    write = context.writer(target, kind)
    high = isinstance(source, Register) and source.name.endswith("_hi")
    bits = width_of(kind)

    def handler(fragment: Fragment, mask: int) -> None:
        now = fragment.warp.cta.machine.ticks >> (32 if high else 0)
        write(fragment.warp, np.full(32, now & ((1 << bits) - 1), UNSIGNED[bits]), mask)

    return handler
