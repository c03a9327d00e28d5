"""Hints to the caches, which change no value: PTX ISA 9.7.9.15 to 9.7.9.18."""

from __future__ import annotations

import numpy as np

from fa4.emulator.isa.spaces import Space
from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.table import TableRows, modifiers
from fa4.emulator.warp_lanes import lanes_of

ROWS = TableRows()

_DISCARDED_BYTES = 128


def _nothing(fragment: Fragment, mask: int) -> None:
    return None


@ROWS.machine(
    "prefetch", "9.7.9.15", "prefetch{.global .local}.L1 .L2{::evict_last ::evict_normal}"
)
@ROWS.machine("prefetchu", "9.7.9.15", "prefetchu.L1")
@ROWS.machine("prefetch.tensormap", "9.7.9.15", "prefetch{.const .param}.tensormap")
@ROWS.machine("applypriority", "9.7.9.16", "applypriority{.global}.L2::evict_normal")
def bind_hint(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Does nothing: hardware also ignores prefetches of addresses that it cannot read."""
    return _nothing


@ROWS.machine("discard", "9.7.9.17", "discard{.global}.L2 [a], 128")
def bind_discard(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Only checks the address: what the discarded bytes hold is undefined, here they stay."""
    modifiers(instruction, "discard", ("global",), ("L2",))
    address = context.address(instruction.operands[0])

    def handler(fragment: Fragment, mask: int) -> None:
        lanes = lanes_of(mask)
        places = address(fragment.warp)[lanes].astype(np.uint64)
        list(Space("global").pieces(fragment.warp, places, lanes, _DISCARDED_BYTES, write=True))

    return handler


@ROWS.lane("createpolicy", "9.7.9.18", "createpolicy.{fractional range cvt}.L2...b64: gives 0")
def emit_create_policy(b: SegmentBuilder, i: PtxInstruction) -> None:
    """A cache policy is opaque and only a hint."""
    b.write(i.operands[0], b.constant(0, "i64"))
