"""Register instructions whose operands are looked at before they execute: divisions by zero."""

from __future__ import annotations

from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.warp_lanes import lane_flags


def watch_divisor(instruction: PtxInstruction, context: KernelContext) -> Handler | None:
    """Reports lanes that divide by zero, whose result the manual leaves open (PTX ISA 9.7.1.8).

    None for a divisor that is a constant.
    """
    if len(instruction.operands) != 3:
        return None
    divisor = instruction.operands[2]
    if isinstance(divisor, Integer) and divisor.value:
        return None
    read = context.reader(instruction.operands[2], instruction.parts[-1])
    guard = None if instruction.guard is None else context.reader(instruction.guard, "pred")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        zero = lane_flags[mask] & (read(warp) == 0)
        if guard is not None:
            zero = zero & guard(warp)
        if zero.any() and warp.cta.machine.options.checks:
            lane = int(zero.argmax())
            fragment.fault("division", f"lane {lane} divides by zero: the result is undefined")

    return handler
