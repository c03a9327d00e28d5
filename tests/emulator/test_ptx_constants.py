"""Integer constant expressions in PTX: as ptxas, as NumPy's 64-bit integers, as C's precedence."""

from __future__ import annotations

import ast
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.parser import parse
from fa4.emulator.ptx.syntax import Integer, Operand
from tests.emulator.ptx_texts import HEAD


def operand_of(written: str) -> Operand:
    """The constant `written`, as the operand of an instruction."""
    kernel = parse(f"{HEAD}.entry k() {{ .reg .b64 x; mov.b64 x, {written}; }}").kernels["k"]
    return kernel.instructions[0].operands[1]


# What ptxas 13.0 stores for `.global .b64 x = ...;`, as a signed number.
CONSTANT_EXPRESSIONS = {
    **{"7/2": 3, "-7/2": -3, "-7/-2": 3, "(.s64)(5-6)/2": 0, "-7/2*2": -6, "2-3-4": -5},
    **{"-7/2U": 0x7FFFFFFFFFFFFFFC, "-7>>1": -4, "-7U>>1": 0x7FFFFFFFFFFFFFFC, "-8>>1U": -4},
    **{"0x8000000000000000>>1": 1 << 62, "1>>-1": 0, "1<<63>>63": -1, "1<<64": 1, "1<<65": 2},
    **{"(.u64)-8>>1": 0x7FFFFFFFFFFFFFFC, "(.s64)0xFFFFFFFFFFFFFFF8>>1": -4},
    **{"(-8+0U)>>1": 0x7FFFFFFFFFFFFFFC, "(-8|0)>>1": -4, "(-8|0U)>>1": 0x7FFFFFFFFFFFFFFC},
    **{"(~0)>>1": (1 << 63) - 1, "(.s64)~0>>1": -1, "5+ ~0": 4, "!3": 0, "-!0": -1, "!0-2>>1": -1},
    **{"-9223372036854775808/2": 1 << 62, "7-8>>1": -1, "1|2&3^4<<1+2*3": 0x203, "- - 5": 5},
    **{"(7U-8)/2": (1 << 63) - 1, "7U-8": -1, "5%(3)": 2, "-8 % (3)": 2, "5--3": 8},
    **{"(8 %(3))-3>>1": (1 << 63) - 1, "(1<<1U)-4>>1": -1, "(1U<<1)-4>>1": (1 << 63) - 1},
    **{"WARP_SZ-64>>1": -16, "64>>2>>1": 8, "0x7fffffffffffffff+1>>1": -(1 << 62), "+-8>>1": -4},
    **{"01777777777777777777777 >> 1": (1 << 63) - 1, "0xFFFFFFFFFFFFFFFF/-1": 1},
}


@pytest.mark.parametrize(("written", "value"), CONSTANT_EXPRESSIONS.items())
def test_constant_expressions_are_those_of_ptxas(written, value):
    assert (operand_of(written).value - value) % (1 << 64) == 0
    (variable,) = parse(f"{HEAD}.global .b64 x = {written};").variables
    assert variable.initial == (value % (1 << 64)).to_bytes(8, "little")


BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "|": operator.or_,
    "&": operator.and_,
    "^": operator.xor,
}


@st.composite
def int64_expressions(draw, depth: int = 4):
    """(text with parentheses everywhere, its value in NumPy's 64-bit arithmetic)."""
    if depth == 0 or draw(st.booleans()):
        value = draw(st.integers(0, (1 << 63) - 1) | st.integers(0, 9))
        return str(value), np.int64(value)
    left_text, left = draw(int64_expressions(depth - 1))
    name = draw(st.sampled_from([*BINARY, "<<", ">>"]))
    if name in BINARY:
        right_text, right = draw(int64_expressions(depth - 1))
        with np.errstate(over="ignore"):
            return f"({left_text}){name}({right_text})", BINARY[name](left, right)
    count = draw(st.integers(0, 63))
    shifted = left << np.int64(count) if name == "<<" else left >> np.int64(count)
    return f"({left_text}){name}{count}", shifted


@given(int64_expressions())
@settings(max_examples=100)
def test_signed_expressions_wrap_as_64_bit_integers(drawn):
    text, value = drawn
    assert operand_of(text) == Integer(int(value))


def outcome(written: str):
    try:
        return operand_of(written)
    except PtxError as error:
        return str(error)


PYTHON_OPERATORS = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%"},
    **{ast.BitOr: "|", ast.BitAnd: "&", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"},
}


def parenthesised(node: ast.expr) -> str:
    """A Python expression with the parentheses that its precedence implies."""
    if not isinstance(node, ast.BinOp):
        return ast.unparse(node)
    name = PYTHON_OPERATORS[type(node.op)]
    return f"({parenthesised(node.left)} {name} {parenthesised(node.right)})"


@given(
    st.integers(0, 99),
    st.lists(
        st.tuples(st.sampled_from([*PYTHON_OPERATORS.values()]), st.integers(0, 99)), max_size=6
    ),
)
@settings(max_examples=150)
def test_operators_bind_as_in_c(first, rest):
    """Python's precedence of these operators is that of C."""
    text = str(first) + "".join(f" {name} {number}" for name, number in rest)
    assert outcome(text) == outcome(parenthesised(ast.parse(text, mode="eval").body))
