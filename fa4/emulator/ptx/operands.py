"""Reads the operands of an instruction."""

from __future__ import annotations

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.constants import plain_literal, read_constant
from fa4.emulator.ptx.lexer import Cursor, is_name
from fa4.emulator.ptx.names import Names
from fa4.emulator.ptx.syntax import (
    Address,
    Integer,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)

_SINK = Sink()
_NEVER_FIRST = frozenset(["", ",", ";", ")", "]", "}", "|", "[", "{"])


def read_operands(
    cursor: Cursor, names: Names, closing: str, calls: bool = False
) -> tuple[Operand, ...]:
    """The operands up to the token `closing`, separated by commas; moves past `closing`.

    calls: a parenthesis begins a list of arguments, not a constant expression.
    PtxError if an operand cannot be read or uses a name that is not declared.
    """
    tokens = cursor.tokens
    meaning = names.meaning
    operands: list[Operand] = []
    while True:
        token = tokens[cursor.index]
        following = tokens[cursor.index + 1]
        operand: Operand | None = None
        if following in (",", closing):  # most operands are one token: a register or a number
            operand = meaning.get(token) or plain_literal(token)
        if operand is None:
            operand = _read_operand(cursor, names, calls)
            following = cursor.token
        else:
            cursor.index += 1
        operands.append(operand)
        if following == closing:
            cursor.index += 1
            return tuple(operands)
        if following != ",":
            cursor.fail(f"',' or '{closing}'")
        cursor.index += 1


def read_register(cursor: Cursor, names: Names) -> Register:
    """A register, with "!" before it or not. PtxError if there is none."""
    negated = cursor.accept("!")
    register = _lookup(cursor, names)
    if not isinstance(register, Register):
        cursor.fail("a register")
    cursor.index += 1
    return Register(register.name, negated=True) if negated else register


def read_label(cursor: Cursor, names: Names) -> str:
    """The unique name of a label. PtxError if there is none, or it is not declared."""
    label = _lookup(cursor, names)
    if not isinstance(label, Symbol):
        cursor.fail("a label")
    cursor.index += 1
    return label.name


def _read_operand(cursor: Cursor, names: Names, calls: bool) -> Operand:
    if cursor.accept("["):
        return _read_address(cursor, names)
    if cursor.accept("{"):
        return _read_vector(cursor, names)
    if calls and cursor.accept("("):
        return Vector(() if cursor.accept(")") else read_operands(cursor, names, ")"))
    first = _read_simple(cursor, names)
    if cursor.token == "|" and isinstance(first, Register | Sink):
        cursor.index += 1
        second = _read_simple(cursor, names)
        if not isinstance(second, Register | Sink):
            raise PtxError("the second half of a pair is no register", cursor.line)
        return Pair(first, second)
    return first


def _read_simple(cursor: Cursor, names: Names) -> Operand:
    """A register, a symbol with or without offset, a constant or "_"."""
    token = cursor.token
    if token == "!" and is_name(cursor.tokens[cursor.index + 1]):
        return read_register(cursor, names)
    if not is_name(token):
        if token in _NEVER_FIRST:
            cursor.fail("an operand")
        return read_constant(cursor)
    named = _lookup(cursor, names)
    if named is None:
        return read_constant(cursor)
    cursor.index += 1
    if isinstance(named, Symbol) and cursor.token == "+":
        return Symbol(named.name, _read_offset(cursor))
    return named


def _lookup(cursor: Cursor, names: Names) -> Register | Symbol | Vector | Sink | None:
    """What the next token names; None for the constant WARP_SZ and for what is not a name."""
    token = cursor.token
    named = names.meaning.get(token)
    if named is not None:
        return named
    if token == "_":
        return _SINK
    if is_name(token) and token != "WARP_SZ":
        raise PtxError(
            f"{token} is not declared: no register, variable, function or label in this scope",
            cursor.line,
        )
    return None


def _read_offset(cursor: Cursor) -> int:
    """The bytes of "+ expression", 0 if no "+" comes next."""
    if not cursor.accept("+"):
        return 0
    line = cursor.line
    offset = read_constant(cursor)
    if not isinstance(offset, Integer):
        raise PtxError("an address offset must be an integer", line)
    return offset.value


def _read_address(cursor: Cursor, names: Names) -> Address:
    line = cursor.line
    base = _read_simple(cursor, names)
    if isinstance(base, Symbol):
        base, offset = Symbol(base.name), base.offset
    elif isinstance(base, Register | Integer) and not getattr(base, "negated", False):
        offset = _read_offset(cursor)
    else:
        raise PtxError("an address must begin with a register, a symbol or an integer", line)
    coordinates = _read_coordinates(cursor, names) if cursor.accept(",") else ()
    cursor.expect("]")
    return Address(base, offset, coordinates)


def _read_coordinates(cursor: Cursor, names: Names) -> tuple[Register | Integer, ...]:
    """The {coordinates} of a tensor operand."""
    line = cursor.line
    cursor.expect("{")
    coordinates = []
    for operand in read_operands(cursor, names, "}"):
        if not isinstance(operand, Register | Integer):
            raise PtxError("tensor coordinates must be registers or integers", line)
        coordinates.append(operand)
    return tuple(coordinates)


def _read_vector(cursor: Cursor, names: Names) -> Vector:
    line = cursor.line
    elements = read_operands(cursor, names, "}")
    if any(isinstance(element, Address | Vector | Pair) for element in elements):
        raise PtxError("the elements of a vector must be registers or constants", line)
    return Vector(elements)
