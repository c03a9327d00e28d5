"""Register instructions whose operands are looked at before they execute: divisions by zero."""

from __future__ import annotations

from fa4.emulator.machine.context import Handler, KernelContext, lanes_of
from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import Instruction, Integer

_DIVISIONS = ("div", "rem")
_INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64))


def find_watch(instruction: Instruction, context: KernelContext) -> Handler | None:
    """What looks at the operands of an instruction; None for those that nothing looks at."""
    if instruction.parts[0] not in _DIVISIONS or instruction.parts[-1] not in _INTEGERS:
        return None
    if len(instruction.operands) != 3:
        return None
    divisor = instruction.operands[2]
    if isinstance(divisor, Integer) and divisor.value:
        return None
    return _watch_divisor(instruction, context)


def _watch_divisor(instruction: Instruction, context: KernelContext) -> Handler:
    """Reports lanes that divide by zero, whose result the manual leaves open (PTX ISA 9.7.1.8)."""
    read = context.reader(instruction.operands[2], instruction.parts[-1])
    guard = None if instruction.guard is None else context.reader(instruction.guard, "pred")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        zero = lanes_of[mask] & (read(warp) == 0)
        if guard is not None:
            zero = zero & guard(warp)
        if zero.any():
            lane = int(zero.argmax())
            warp.cta.machine.fault(
                fragment, "division", f"lane {lane} divides by zero: the result is undefined"
            )

    return handler
