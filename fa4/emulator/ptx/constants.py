"""Reads constants: integer expressions and floating-point literals (PTX ISA 4.5)."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.lexer import Cursor
from fa4.emulator.ptx.syntax import FloatBits, Integer

_MASK = (1 << 64) - 1
_WARP_SIZE = 32
_LONGEST_LITERAL = 66  # "0b" and 64 bits

_INTEGER = re.compile(r"0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*")
_FLOAT_BITS = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")
_DECIMAL = re.compile(r"(?=.*[.eE])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


class _Value(NamedTuple):
    """A 64-bit integer, in the range of its signedness."""

    value: int
    unsigned: bool


def _wrapped(value: int, unsigned: bool) -> _Value:
    value &= _MASK
    return _Value(value if unsigned or value < 1 << 63 else value - (1 << 64), unsigned)


def _quotient(dividend: int, divisor: int) -> int:
    """Division that rounds towards zero, as in C."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


# How tightly an operator binds, and what it does to two values of the same signedness. ptxas takes
# remainders of unsigned values and shifts by the count modulo 64; the parser does what it does.
_BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "|": (1, lambda a, b: a | b),
    "^": (2, lambda a, b: a ^ b),
    "&": (3, lambda a, b: a & b),
    "<<": (4, lambda a, b: a << (b & 63)),
    ">>": (4, lambda a, b: a >> (b & 63)),
    "+": (5, lambda a, b: a + b),
    "-": (5, lambda a, b: a - b),
    "*": (6, lambda a, b: a * b),
    "/": (6, _quotient),
    "%": (6, lambda a, b: a % b),
}
OPERATORS = frozenset(_BINARY)


def read_constant(cursor: Cursor) -> Integer | FloatBits:
    """A constant: a floating-point literal (its sign may come before) or an integer expression.

    PtxError if there is none, a literal does not fit 64 bits, or a divisor is zero.
    """
    sign = cursor.token if cursor.token in ("-", "+") else ""
    literal = _literal(cursor.tokens[cursor.index + len(sign)])
    if isinstance(literal, FloatBits):
        return _signed_float(cursor, sign, literal)
    return Integer(_read_binary(cursor, 1).value)


def plain_literal(token: str) -> Integer | FloatBits | None:
    """What one token stands for, or None if it is no constant of its own."""
    literal = _literal(token)
    return Integer(literal.value) if isinstance(literal, _Value) else literal


@lru_cache(maxsize=4096)
def _literal(token: str) -> _Value | FloatBits | None:
    if token == "WARP_SZ":
        return _Value(_WARP_SIZE, False)
    if _FLOAT_BITS.fullmatch(token):
        return FloatBits(int(token[2:], 16), 32 if token[1] in "fF" else 64)
    if _DECIMAL.fullmatch(token) and token[1:2] not in ("x", "X"):
        value = float(token)
        if math.isinf(value):
            return None
        return FloatBits(struct.unpack("<Q", struct.pack("<d", value))[0], 64)
    digits = token[:-1] if token.endswith("U") else token
    if len(digits) > _LONGEST_LITERAL or not _INTEGER.fullmatch(digits):
        return None
    octal = digits.isdigit() and digits[0] == "0"
    number = int(digits, 8 if octal else 0)
    if number > _MASK:
        return None
    return _Value(number, token.endswith("U") or number >= 1 << 63)


def _signed_float(cursor: Cursor, sign: str, literal: FloatBits) -> FloatBits:
    token = cursor.tokens[cursor.index + len(sign)]
    if sign and _FLOAT_BITS.fullmatch(token):
        raise PtxError(f"a sign before the bit pattern {token}", cursor.line)
    cursor.index += 1 + len(sign)
    if cursor.token in OPERATORS:
        raise PtxError("floating-point expressions are not supported", cursor.line)
    return FloatBits(literal.bits ^ (1 << 63), 64) if sign == "-" else literal


def _read_binary(cursor: Cursor, tightness: int) -> _Value:
    """An expression of operators that bind at least as tightly as `tightness`."""
    left = _read_unary(cursor)
    while cursor.token in _BINARY and _BINARY[cursor.token][0] >= tightness:
        line = cursor.line
        operator = cursor.take()
        binds, compute = _BINARY[operator]
        right = _read_binary(cursor, binds + 1)
        if operator in ("<<", ">>"):
            left = _wrapped(compute(left.value, right.value), left.unsigned)
            continue
        if operator in ("/", "%") and right.value == 0:
            raise PtxError("division by zero in a constant expression", line)
        unsigned = left.unsigned or right.unsigned or operator == "%"
        a, b = (_wrapped(side.value, unsigned).value for side in (left, right))
        left = _wrapped(compute(a, b), unsigned)
    return left


def _read_unary(cursor: Cursor) -> _Value:
    token = cursor.token
    if token in ("-", "+", "~", "!"):
        cursor.index += 1
        value, unsigned = _read_unary(cursor)
        if token == "!":
            return _Value(int(value == 0), False)
        if token == "~":
            return _wrapped(~value, True)
        return _wrapped(-value if token == "-" else value, unsigned)
    if cursor.accept("("):
        if cursor.token in (".s64", ".u64"):
            unsigned = cursor.take() == ".u64"
            cursor.expect(")")
            return _wrapped(_read_unary(cursor).value, unsigned)
        inner = _read_binary(cursor, 1)
        cursor.expect(")")
        return inner
    literal = _literal(token)
    if not isinstance(literal, _Value):
        cursor.fail("an integer constant" + (" of at most 64 bits" if token[:1].isdigit() else ""))
    cursor.index += 1
    return literal
