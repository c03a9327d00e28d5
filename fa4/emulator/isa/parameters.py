"""Kernel parameters by name: ld.param, PTX ISA 9.7.9.8.

The parameter block lies behind the LLVM pointer %parameters. Parameters behind a register address,
and what calls pass, which lies in frames, are read and written by `ld` and `st` in `loads`.
"""

from __future__ import annotations

from fa4.emulator.isa.spaces import SPACES, TYPES, VECTORS
from fa4.emulator.ptx.syntax import CALL_PARAMETER, Address, Operand, PtxInstruction, Symbol, Vector
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed, width_of
from fa4.emulator.translate.layout import PARAMETER_WINDOW
from fa4.emulator.translate.table import TableRows, modifiers

ROWS = TableRows()

_SPACES = tuple(space for space in SPACES if space.startswith("param"))


def is_direct(instruction: PtxInstruction) -> bool:
    """Whether the address is that of a parameter of the kernel by name."""
    bases = [o.base for o in instruction.operands if isinstance(o, Address)]
    names = [base.name for base in bases if isinstance(base, Symbol)]
    return len(bases) == len(names) == 1 and not names[0].startswith(CALL_PARAMETER)


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _load(b: SegmentBuilder, offset: int, bits: int) -> Lanes:
    """`bits` bits of the parameter block from byte `offset` on, the same in all lanes."""
    pointer = b.scalar(f"getelementptr i8, ptr %parameters, i64 {offset}")
    return b.splat(b.scalar(f"load i{bits}, ptr {pointer}, align 1"), f"i{bits}")


@ROWS.lane(
    "ld.param", "9.7.9.8", "{::entry ::func} {.v2 .v4 .v8} .b8-.b128 .u .s .f", accepts=is_direct
)
@ROWS.lane("ld.param::entry", "9.7.9.8", "as ld.param", accepts=is_direct)
@ROWS.lane("ld.param::func", "9.7.9.8", "as ld.param", accepts=is_direct)
def emit_load_parameter(b: SegmentBuilder, i: PtxInstruction) -> None:
    """A kernel parameter, the same in all lanes."""
    _, _, kind = modifiers(i, "ld", _SPACES, VECTORS, TYPES)
    target, address = i.operands
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    start = b.symbols(address.base.name) - PARAMETER_WINDOW + address.base.offset + address.offset
    bits = width_of(kind)
    for k, element in enumerate(_elements(target)):
        b.write(element, _load(b, start + k * bits // 8, bits), is_signed(kind))
