"""What kinds of memory an instruction touches: only accesses of the same kind can conflict.

Two accesses conflict if they touch the same bytes. Bytes of one kind of memory are never those of
another; an mbarrier is a kind of its own: its bytes must not be used for anything else between
`mbarrier.init` and `mbarrier.inval` (PTX ISA, "mbarrier object"), and these two count as writes of
shared memory.
"""

from __future__ import annotations

from enum import IntFlag
from functools import cache

from fa4.emulator.ptx.syntax import Address, PtxInstruction


class Touched(IntFlag):
    """Kinds of memory. OPERANDS: shared memory as `wgmma` reads it, which nothing but a write of
    shared memory conflicts with."""

    NOTHING = 0
    BARRIER = 1
    SHARED = 2
    GLOBAL = 4
    TENSOR = 8
    OPERANDS = 16


KINDS = (Touched.BARRIER, Touched.SHARED, Touched.GLOBAL, Touched.TENSOR)
EVERYTHING = Touched.BARRIER | Touched.SHARED | Touched.GLOBAL | Touched.TENSOR | Touched.OPERANDS
_SHARED, _TENSOR = Touched.SHARED | Touched.OPERANDS, Touched.TENSOR
_GENERIC = _SHARED | Touched.GLOBAL

# Opcode, up to where the kind of memory is told -> what its threads touch when they execute it, and
# what they or the operation that they start do. The first that fits; what does not: everything.
_BY_OPCODE = (
    ("wgmma.mma_async", Touched.NOTHING, Touched.SHARED),
    # The pipe keeps the order of one thread's operations alone: that of several is by who issues.
    ("tcgen05.mma", _TENSOR, _SHARED | _TENSOR),
    ("tcgen05.cp", _TENSOR, _SHARED | _TENSOR),
    ("tcgen05.commit", Touched.BARRIER, Touched.BARRIER),
    ("mbarrier.init", Touched.BARRIER | Touched.SHARED, Touched.BARRIER | _SHARED),
    ("mbarrier.inval", Touched.BARRIER | Touched.SHARED, Touched.BARRIER | _SHARED),
    ("mbarrier.", Touched.BARRIER, Touched.BARRIER),
    ("cp.async.bulk.", Touched.BARRIER, EVERYTHING),
    ("cp.reduce.async.bulk.", Touched.BARRIER, EVERYTHING),
    ("ldmatrix.", Touched.SHARED, _SHARED),
    ("stmatrix.", Touched.SHARED, _SHARED),
)  # fmt: skip
_DIRECT = ("ld.", "st.", "atom.", "red.", "ldu.")  # also those with a state space in their opcode
_WITHOUT_ADDRESS = ("wgmma.", "tcgen05.", "call")  # may touch memory that no operand in [] names


def touched(instruction: PtxInstruction) -> tuple[Touched, Touched]:
    """(by its threads, by them and by the operation that it starts).

    What is not known touches everything; without an address, nothing.
    """
    opcode = instruction.opcode
    addressed = any(isinstance(operand, Address) for operand in instruction.operands)
    if not addressed and not opcode.startswith(_WITHOUT_ADDRESS):
        return Touched.NOTHING, Touched.NOTHING
    return _with_address(opcode)


@cache
def _with_address(opcode: str) -> tuple[Touched, Touched]:
    for prefix, threads, everyone in _BY_OPCODE:
        if opcode.startswith(prefix):
            return threads, everyone
    parts = opcode.split(".")
    if not opcode.startswith(_DIRECT) or "async" in parts:
        return EVERYTHING, EVERYTHING
    if any(part.startswith("shared") for part in parts):
        return Touched.SHARED, _SHARED
    if "global" in parts:
        return Touched.GLOBAL, Touched.GLOBAL
    return (Touched.NOTHING,) * 2 if "local" in parts or "param" in parts else (_GENERIC, _GENERIC)
