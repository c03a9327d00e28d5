"""Rows for instructions whose whole meaning is one formula over their operands.

    define(ROWS, "sad", "9.7.1.7", INTEGERS, lambda s, a, b, c: c + distance(s, a, b))

reads every source operand as the instruction's type, applies the formula to the 32 lanes at once
and writes the result. `s` says whether the type is signed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fa4.emulator.ptx.syntax import Operand, Pair, PtxInstruction, Sink
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed
from fa4.emulator.translate.table import TableRows, modifiers

Formula = Callable[..., Lanes]

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
WORDS = ("u32", "u64", "s32", "s64")
BITS = ("b16", "b32", "b64")


def spell(types: Iterable[str]) -> str:
    """The text of the support table for one of several types: ".u16 .u32"."""
    return " ".join(f".{name}" for name in types)


def define(
    rows: TableRows,
    name: str,
    section: str,
    types: Sequence[str],
    formula: Formula,
    operands: Sequence[str] = (),
    **more: Any,
) -> None:
    """Adds instruction `name`.type to the rows of a module for each of `types`.

    formula(signed, *sources) returns the result in its own width. operands: the PTX types of the
    sources, "" for the instruction's type; by default all have the instruction's type.
    more: of `Operation`.
    """

    @rows.lane(name, section, spell(types), types=types, **more)
    def emit(b: SegmentBuilder, i: PtxInstruction) -> None:
        (kind,) = modifiers(i, name, types)
        given = i.operands[1:]
        kinds = operands or [""] * len(given)
        sources = [b.read(o, k or kind) for o, k in zip(given, kinds, strict=True)]
        b.write(i.operands[0], formula(is_signed(kind), *sources))


def destinations(operand: Operand) -> tuple[Operand, Operand]:
    """The two destinations of "d|p"; the second is a sink where only one is written."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, Sink()


def bits_of(value: Lanes) -> int:
    """The width of an integer vector's lanes."""
    return int(value.type[1:])


def like(value: Lanes, constant: int) -> Lanes:
    """A constant in the type of `value`."""
    return value.builder.constant(constant, value.type)


def intrinsic(name: str, *values: Lanes) -> Lanes:
    """An LLVM vector intrinsic whose result has the type of its arguments, e.g. "smax"."""
    kind = values[0].type
    return values[0].builder.call(f"llvm.{name}.v32{kind}", kind, *values)


def leading_zeros(value: Lanes) -> Lanes:
    """Zeros above the highest set bit, the width for 0."""
    kind = f"<32 x {value.type}>"
    function = f"@llvm.ctlz.v32{value.type}"
    value.builder.declarations.add(f"declare {kind} {function}({kind}, i1)")
    return value.builder.emit(f"call {kind} {function}({kind} {value.name}, i1 false)", value.type)


def shift_left(value: Lanes, amount: Lanes) -> Lanes:
    """value << amount, 0 for amounts from the width on (LLVM leaves those undefined)."""
    width = bits_of(value)
    fits = amount.compare("ult", width)
    return fits.select(value << amount.resize(width), like(value, 0))


def shift_right(signed: bool, value: Lanes, amount: Lanes) -> Lanes:
    """value >> amount; amounts from the width on leave the sign, or 0 if unsigned."""
    width = bits_of(value)
    if signed:
        clamped = intrinsic("umin", amount, like(amount, width - 1))
        return value.ashr(clamped.resize(width))
    fits = amount.compare("ult", width)
    return fits.select(value >> amount.resize(width), like(value, 0))


def by_halves(formula: Formula) -> Formula:
    """The same formula on the low and the high 16 bits of 32-bit operands."""

    def packed(signed: bool, *values: Lanes) -> Lanes:
        low = formula(signed, *(v.resize(16) for v in values))
        high = formula(signed, *((v >> 16).resize(16) for v in values))
        return low.resize(32) | (high.resize(32) << 16)

    return packed
