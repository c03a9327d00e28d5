"""Kernel parameters, and the arguments of calls: ld.param and st.param, PTX ISA 9.7.9.8, 9.7.9.12.

The parameter block lies behind the LLVM pointer %parameters. A parameter that the body declares
for a call is a hidden register. Parameters behind a register address are read by `ld` in `loads`.
"""

from __future__ import annotations

from fa4.emulator.isa.spaces import SPACES, TYPES, VECTORS
from fa4.emulator.ptx.syntax import Address, Operand, PtxInstruction, Register, Symbol, Vector
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed, width_of
from fa4.emulator.translate.layout import PARAMETER_WINDOW
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

_SPACES = tuple(space for space in SPACES if space.startswith("param"))


def hidden_register(name: str) -> Register:
    """The 64-bit register that holds a call's parameter or result of this name."""
    return Register(f"param:{name}")


def is_direct(instruction: PtxInstruction) -> bool:
    """Whether the address is that of a parameter by name."""
    addresses = [o for o in instruction.operands if isinstance(o, Address)]
    return len(addresses) == 1 and isinstance(addresses[0].base, Symbol)


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _hidden(b: SegmentBuilder, address: Operand) -> Register | None:
    """The hidden register behind an address, None for a parameter of the kernel."""
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise Unsupported(f"address {address}")
    register = hidden_register(address.base.name)
    if register.name not in b.layout:
        return None
    if address.offset or address.base.offset:
        raise Unsupported("a part of a call's parameter")
    return register


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
    """A kernel parameter, or what a call returned."""
    _, _, kind = modifiers(i, "ld", _SPACES, VECTORS, TYPES)
    target, address = i.operands
    hidden = _hidden(b, address)
    if hidden is not None:
        if isinstance(target, Vector):
            raise Unsupported("a vector of a call's result")
        b.write(target, b.read(hidden, kind), is_signed(kind))
        return
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    start = b.symbols(address.base.name) - PARAMETER_WINDOW + address.base.offset + address.offset
    bits = width_of(kind)
    for k, element in enumerate(_elements(target)):
        b.write(element, _load(b, start + k * bits // 8, bits), is_signed(kind))


@ROWS.lane(
    "st.param", "9.7.9.12", "{::func} .b8-.b64 .u .s .f: the arguments of vprintf, __assertfail"
)
@ROWS.lane("st.param::func", "9.7.9.12", "as st.param")
def emit_store_parameter(b: SegmentBuilder, i: PtxInstruction) -> None:
    """An argument of a call."""
    _, kind = modifiers(i, "st", _SPACES, TYPES)
    address, source = i.operands
    hidden = _hidden(b, address)
    if hidden is None:
        raise Unsupported("st.param to a parameter of the kernel")
    b.write(hidden, b.read(source, kind))
