"""Moving rows between registers and tensor memory: a thread owns the lane of its row."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.units import WARP, WARPGROUP

LANE = 1 << 16  # addresses from one lane of tensor memory to the next (PTX ISA 9.7.16.1)


def warp_lanes() -> Int32:
    """Address of this warp's 32 lanes: warp w of a warpgroup may access lanes 32 w and up.

    The same in all threads of the warp, so that addresses stay in uniform registers.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return (warp % (WARPGROUP // WARP)) * (WARP * LANE)


def read_columns(address: Int32, width: int, step: int) -> list[Float32]:
    """`width` columns of this thread's lane, `step` of them per instruction, the last ones first.

    In this order ptxas gives the first columns, which are used up first, the low registers, from
    which it stores the first words of P.
    """
    code = PtxBlock()
    start = code.read(address)
    values: list[str] = []
    for first in reversed(range(0, width, step)):
        place = code.do("add.s32", start, str(first), kind="b32") if first else start
        part = code.load(f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32", step, place)
        values = part + values
    return code.trace(*values, effects=True)


def write_columns(words: list[Any], address: Int32) -> None:
    """32-bit registers to as many columns of this thread's lane, by one instruction."""
    code = PtxBlock()
    operands = ", ".join(code.read_all(words))
    code.effect(
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{code.read(address)}], {{{operands}}};"
    )
    code.trace(effects=True)
