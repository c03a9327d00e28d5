"""An activation of a device function: what a return needs to know of its call."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.emulator.translate.calls import CallFrame, Places
from fa4.emulator.warp_lanes import Array


@dataclass(frozen=True, eq=False)
class Activation:
    """A function that lanes are in. caller: None for the kernel.

    frame: of the function, bytes from the kernel's. resume: the step behind the call. results:
    where the caller wants them. saved: the register file before a recursive call.
    """

    caller: Activation | None
    routine: CallFrame
    frame: int
    resume: int
    results: Places
    saved: Array | None

    @property
    def depth(self) -> int:
        """How many functions are active, this one included."""
        return 1 + (self.caller.depth if self.caller is not None else 0)
