"""Logic and shift instructions: PTX ISA 9.7.8."""

from __future__ import annotations

from fa4.emulator.isa.formula import (
    BITS,
    INTEGERS,
    define,
    destinations,
    like,
    shift_left,
    shift_right,
)
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()


def look_up(table: int, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Bit k of the result is bit 4*a[k] + 2*b[k] + c[k] of the 8-bit table."""
    result = like(a, 0)
    for row in range(8):
        if table >> row & 1:
            terms = [v if row >> (2 - k) & 1 else ~v for k, v in enumerate((a, b, c))]
            result = result | (terms[0] & terms[1] & terms[2])
    return result


@ROWS.lane(
    "lop3", "9.7.8.6", "{.or .and} .b32; d|p and a fifth source with .or .and", types=("b32",)
)
def emit_lop3(b: SegmentBuilder, i: PtxInstruction) -> None:
    """d = table(a, b, c) bit by bit; p = (d != 0) .or/.and the predicate in source 5."""
    boolean, _ = modifiers(i, "lop3", ("or", "and"), ("b32",))
    sources = [b.read(operand, "b32") for operand in i.operands[1:4]]
    table = i.operands[4]
    if not isinstance(table, Integer):
        raise Unsupported("a look-up table that is not a constant")
    result = look_up(table.value & 0xFF, *sources)
    target, predicate = destinations(i.operands[0])
    if boolean:
        other = b.read(i.operands[5], "pred")
        some = result.compare("ne", 0)
        b.write(predicate, some & other if boolean == "and" else some | other)
    b.write(target, result)


def funnel_left(clamp: bool, a: Lanes, b: Lanes, amount: Lanes) -> Lanes:
    """The high half of b:a << amount. Amounts above 32 count as 32 (clamp) or modulo 32."""
    return ((_joined(a, b) << _funnel_amount(clamp, amount)) >> 32).resize(32)


def funnel_right(clamp: bool, a: Lanes, b: Lanes, amount: Lanes) -> Lanes:
    """The low half of b:a >> amount."""
    return (_joined(a, b) >> _funnel_amount(clamp, amount)).resize(32)


def _joined(low: Lanes, high: Lanes) -> Lanes:
    return low.resize(64) | (high.resize(64) << 32)


def _funnel_amount(clamp: bool, amount: Lanes) -> Lanes:
    if clamp:
        return amount.compare("ult", 32).select(amount, like(amount, 32)).resize(64)
    return (amount & 31).resize(64)


def _define_all() -> None:
    with_predicates = ("pred", *BITS)
    define(ROWS, "and", "9.7.8.1", with_predicates, lambda s, a, b: a & b)
    define(ROWS, "or", "9.7.8.2", with_predicates, lambda s, a, b: a | b)
    define(ROWS, "xor", "9.7.8.3", with_predicates, lambda s, a, b: a ^ b)
    define(ROWS, "not", "9.7.8.4", with_predicates, lambda s, a: ~a)
    define(
        ROWS,
        "cnot",
        "9.7.8.5",
        BITS,
        lambda s, a: a.compare("eq", 0).select(like(a, 1), like(a, 0)),
    )
    for mode in ("clamp", "wrap"):
        clamp = mode == "clamp"
        for way, funnel in (("l", funnel_left), ("r", funnel_right)):
            define(
                ROWS,
                f"shf.{way}.{mode}",
                "9.7.8.7",
                ("b32",),
                lambda s, a, b, c, funnel=funnel, clamp=clamp: funnel(clamp, a, b, c),
            )
    define(ROWS, "shl", "9.7.8.8", BITS, lambda s, a, n: shift_left(a, n), ("", "u32"))
    define(ROWS, "shr", "9.7.8.9", BITS + INTEGERS, shift_right, ("", "u32"))


_define_all()
