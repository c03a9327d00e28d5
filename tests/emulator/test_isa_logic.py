"""Logic and shift instructions against the manual's definitions (PTX ISA 9.7.8)."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.ptx.syntax import Integer, Pair, Register, Sink
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator.isa_rows import (
    Compiled,
    Row,
    check_corners,
    check_row,
    lane_values,
    masks,
    row_inputs,
    signed,
)
from tests.emulator.lane_rig import FULL, instruction

OPERATORS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def bitwise_rows():
    for w in (16, 32, 64):
        b = f"b{w}"
        for name, meaning in OPERATORS.items():
            yield Row(f"{name}.{b}", b, (b, b), meaning)
        yield Row(f"not.{b}", b, (b,), lambda a, w=w: 2**w - 1 - a)
        yield Row(f"cnot.{b}", b, (b,), lambda a: int(a == 0))


def shift_rows():
    for w in (16, 32, 64):
        b = f"b{w}"
        # A shift amount is huge at times: 1 << 2**32 would not end.
        yield Row(f"shl.{b}", b, (b, "u32"), lambda a, n, w=w: a << n if n < w else 0)
        for sign in "bu":
            yield Row(f"shr.{sign}{w}", b, (b, "u32"), lambda a, n: a >> n)
        yield Row(f"shr.s{w}", b, (b, "u32"), lambda a, n, w=w: signed(a, w) >> n)


def funnel(way, mode):
    def meaning(a, b, c):
        n = min(c, 32) if mode == "clamp" else c % 32
        whole = b << 32 | a
        return whole << n >> 32 if way == "l" else whole >> n

    return Row(f"shf.{way}.{mode}.b32", "b32", ("b32", "b32", "u32"), meaning)


def table_look_up(a, b, c, table):
    bits = 0
    for k in range(32):
        row = (a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)
        bits |= (table >> row & 1) << k
    return bits


TABLES = (0x00, 0x01, 0x1A, 0x40, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF)

ROWS = [
    *bitwise_rows(),
    *shift_rows(),
    *(funnel(way, mode) for way in "lr" for mode in ("clamp", "wrap")),
    *(Row("lop3.b32", "b32", ("b32",) * 3, table_look_up, (table,)) for table in TABLES),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_corner_values(row):
    check_corners(row)


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@settings(max_examples=4)
def test_any_values_under_guard_and_mask(row, data):
    check_row(row, *data.draw(row_inputs(row)))


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("amount", [0, 1, 15, 16, 31, 32, 33, 63, 64, 255, 2**31, 2**32 - 1])
def test_constant_shift_amounts(width, amount):
    """Amounts that the optimiser sees: LLVM calls them undefined from the width on."""
    value = 0x8765_4321_8765_8765 % 2**width
    rows = {
        f"shl.b{width}": value << amount if amount < width else 0,
        f"shr.u{width}": value >> amount,
        f"shr.s{width}": signed(value, width) >> amount,
    }
    for opcode, meant in rows.items():
        program = Compiled(
            [instruction(opcode, "d", "a", Integer(amount))], dict.fromkeys("da", f"b{width}")
        )
        assert set(program({"a": [value] * LANES})["d"]) == {meant % 2**width}


def test_all_tables_of_lop3():
    """The manual's rule: the table is the function applied to 0xF0, 0xCC and 0xAA."""
    for table in range(256):
        assert table_look_up(0xF0, 0xCC, 0xAA, table) & 0xFF == table
    constants = {"a": [0xF0] * LANES, "b": [0xCC] * LANES, "c": [0xAA] * LANES}
    for first in range(0, 256, 32):
        tables = range(first, first + 32)
        program = Compiled(
            [instruction("lop3.b32", f"d{t}", "a", "b", "c", Integer(t)) for t in tables],
            dict.fromkeys(["a", "b", "c", *(f"d{t}" for t in tables)], "b32"),
        )
        after = program(constants)
        assert [after[f"d{t}"][0] & 0xFF for t in tables] == list(tables)


@pytest.mark.parametrize("boolean", ["or", "and"])
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("keeps", [True, False])
@given(a=lane_values(32), b=lane_values(32), q=masks, guard=masks, mask=masks)
@settings(max_examples=5)
def test_lop3_with_predicate(boolean, negated, keeps, a, b, q, guard, mask):
    """p = (d != 0) op q; d may be the sink."""
    target = Register("d") if keeps else Sink()
    item = instruction(
        f"lop3.{boolean}.b32",
        Pair(target, Register("p")),
        "a",
        "b",
        "b",
        Integer(0xC0),
        Register("q", negated),
        guard=Register("g"),
    )
    registers = {"d": "b32", "a": "b32", "b": "b32", "p": "pred", "q": "pred", "g": "pred"}
    zeros = {"d": [0] * LANES, "p": 0}
    after = Compiled([item], registers)({"a": a, "b": b, "q": q, "g": guard} | zeros, mask)
    for lane in range(LANES):
        runs = mask & guard & 1 << lane
        d, second = a[lane] & b[lane], bool(q >> lane & 1) != negated
        p = (d != 0 or second) if boolean == "or" else (d != 0 and second)
        assert after["p"] >> lane & 1 == bool(runs and p)
        assert after["d"][lane] == (d if runs and keeps else 0)


@pytest.mark.parametrize("name", [*OPERATORS, "not"])
@given(a=masks, b=masks, guard=masks, mask=masks)
@settings(max_examples=10)
def test_predicates(name, a, b, guard, mask):
    """.pred forms; the first source is negated and also the destination."""
    sources = [Register("a", negated=True)] + ([Register("b")] if name in OPERATORS else [])
    program = Compiled(
        [instruction(f"{name}.pred", "a", *sources, guard=Register("g"))],
        dict.fromkeys("abg", "pred"),
    )
    meant = OPERATORS[name](~a, b) if name in OPERATORS else a
    runs = mask & guard
    assert program({"a": a, "b": b, "g": guard}, mask)["a"] == (meant & runs | a & ~runs) & FULL


@pytest.mark.parametrize(
    "opcode",
    ["shl.u32", "shl.b8", "and.s32", "shf.l.b32", "shf.l.clamp.b64", "lop3.xor.b32", "not.f32"],
)
def test_unknown_forms_are_refused(opcode):
    with pytest.raises(Unsupported):
        Compiled([instruction(opcode, "d", "a", "a")], dict.fromkeys("da", "b32"))


def test_table_of_lop3_must_be_a_constant():
    item = instruction("lop3.b32", "d", "a", "a", "a", "a")
    with pytest.raises(Unsupported, match="constant"):
        Compiled([item], dict.fromkeys("da", "b32"))


def test_operand_narrower_than_the_type_is_refused():
    with pytest.raises(Unsupported, match="32 bits"):
        Compiled([instruction("and.b64", "d", "a", "a")], {"d": "b64", "a": "b32"})
