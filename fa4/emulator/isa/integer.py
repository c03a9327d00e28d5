"""Integer arithmetic: PTX ISA 9.7.1 and the carry chains of 9.7.2."""

from __future__ import annotations

from collections.abc import Callable

from fa4.emulator.isa.formula import (
    INTEGERS,
    SIGNED,
    WORDS,
    bits_of,
    by_halves,
    define,
    intrinsic,
    like,
    spell,
)
from fa4.emulator.isa.watches import watch_divisor
from fa4.emulator.ptx.syntax import PtxInstruction, Register
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed, width_of
from fa4.emulator.translate.table import TableRows, modifiers

ROWS = TableRows()

# The condition code register has one bit. It is a carry after additions, a borrow after
# subtractions.
CARRY = Register("%cc")


def minimum(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The smaller operand."""
    return intrinsic("smin" if signed else "umin", a, b)


def maximum(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The larger operand."""
    return intrinsic("smax" if signed else "umax", a, b)


def with_relu(formula: Callable[[bool, Lanes, Lanes], Lanes]) -> Callable[..., Lanes]:
    """Negative results become 0."""
    return lambda s, a, b: intrinsic("smax", formula(s, a, b), like(a, 0))


def product(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The whole product, twice as wide as its factors."""
    wide = 2 * bits_of(a)
    return a.resize(wide, signed) * b.resize(wide, signed)


def high_half(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The upper half of the product."""
    return (product(signed, a, b) >> bits_of(a)).resize(bits_of(a))


def low_half(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The lower half of the product, the same for both signs."""
    return a * b


def product_24(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """The 48-bit product of the low 24 bits of both factors, in 64 bits."""
    # Shifted to the top and back, the 24 bits are sign- or zero-extended.
    factors = [(v << 8).ashr(8) if signed else (v << 8) >> 8 for v in (a, b)]
    return product(signed, *factors)


def high_24(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """Bits 47 to 16 of the product of 24-bit factors."""
    return (product_24(signed, a, b) >> 16).resize(32)


def low_24(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """Bits 31 to 0 of the product of 24-bit factors."""
    return product_24(signed, a, b).resize(32)


def distance(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """|a - b| modulo the width."""
    return a.compare("slt" if signed else "ult", b).select(b - a, a - b)


def _divisor(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """b, or 1 where the CPU would trap: division by 0 and the one signed quotient out of range.

    a / 1 and a % 1 are the wrapped results of that signed case.
    """
    traps = b.compare("eq", 0)
    if signed:
        smallest = 1 << (bits_of(a) - 1)
        traps = traps | (a.compare("eq", smallest) & b.compare("eq", -1))
    return traps.select(like(b, 1), b)


def quotient(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """a / b; all ones where b is 0, a case the manual leaves open and an H200 answers so."""
    safe = _divisor(signed, a, b)
    value = a.sdiv(safe) if signed else a.udiv(safe)
    return b.compare("eq", 0).select(like(a, -1), value)


def remainder(signed: bool, a: Lanes, b: Lanes) -> Lanes:
    """a % b with the sign of a; all ones where b is 0, as for `quotient`."""
    safe = _divisor(signed, a, b)
    value = a.srem(safe) if signed else a.urem(safe)
    return b.compare("eq", 0).select(like(a, -1), value)


def _define_sums() -> None:
    define(ROWS, "add", "9.7.1.1", INTEGERS, lambda s, a, b: a + b)
    define(ROWS, "add", "9.7.1.1", ("u16x2", "s16x2"), by_halves(lambda s, a, b: a + b))
    define(ROWS, "add.sat", "9.7.1.1", ("s32",), lambda s, a, b: intrinsic("sadd.sat", a, b))
    define(ROWS, "sub", "9.7.1.2", INTEGERS, lambda s, a, b: a - b)
    define(ROWS, "sub.sat", "9.7.1.2", ("s32",), lambda s, a, b: intrinsic("ssub.sat", a, b))
    define(ROWS, "sad", "9.7.1.7", INTEGERS, lambda s, a, b, c: c + distance(s, a, b))
    define(ROWS, "div", "9.7.1.8", INTEGERS, quotient, watch=watch_divisor)
    define(ROWS, "rem", "9.7.1.9", INTEGERS, remainder, watch=watch_divisor)
    define(ROWS, "abs", "9.7.1.10", SIGNED, lambda s, a: a.compare("slt", 0).select(-a, a))
    define(ROWS, "neg", "9.7.1.11", SIGNED, lambda s, a: -a)


def _define_extremes() -> None:
    for name, section, formula in (("min", "9.7.1.12", minimum), ("max", "9.7.1.13", maximum)):
        define(ROWS, name, section, INTEGERS, formula)
        define(ROWS, name, section, ("u16x2", "s16x2"), by_halves(formula))
        define(ROWS, f"{name}.relu", section, ("s32",), with_relu(formula))
        define(ROWS, f"{name}.relu", section, ("s16x2",), by_halves(with_relu(formula)))


def _define_products() -> None:
    for name, types, formula in (
        ("mul.lo", INTEGERS, low_half),
        ("mul.hi", INTEGERS, high_half),
        ("mul.wide", ("u16", "u32", "s16", "s32"), product),
        ("mul24.lo", ("u32", "s32"), low_24),
        ("mul24.hi", ("u32", "s32"), high_24),
    ):
        define(ROWS, name, "9.7.1.5" if "24" in name else "9.7.1.3", types, formula)
    for name, types, formula in (
        ("mad.lo", INTEGERS, low_half),
        ("mad.hi", INTEGERS, high_half),
        ("mad24.lo", ("u32", "s32"), low_24),
        ("mad24.hi", ("u32", "s32"), high_24),
    ):
        section = "9.7.1.6" if "24" in name else "9.7.1.4"
        define(ROWS, name, section, types, lambda s, a, b, c, formula=formula: formula(s, a, b) + c)
        if name.endswith("hi"):
            define(
                ROWS,
                f"{name}.sat",
                section,
                ("s32",),
                lambda s, a, b, c, formula=formula: intrinsic("sadd.sat", formula(s, a, b), c),
            )
    for kind, wide in (("u16", "u32"), ("u32", "u64"), ("s16", "s32"), ("s32", "s64")):
        define(
            ROWS,
            "mad.wide",
            "9.7.1.4",
            (kind,),
            lambda s, a, b, c: product(s, a, b) + c,
            (kind, kind, wide),
        )


def _sum_with_carry(a: Lanes, b: Lanes, carry: Lanes) -> tuple[Lanes, Lanes]:
    partial = a + b
    total = partial + carry
    return total, partial.compare("ult", a) | total.compare("ult", partial)


def _difference_with_borrow(a: Lanes, b: Lanes, borrow: Lanes) -> tuple[Lanes, Lanes]:
    partial = a - b
    return partial - borrow, a.compare("ult", b) | partial.compare("ult", borrow)


def _define_carry(name: str, section: str, half: Callable[..., Lanes] | None) -> None:
    """One instruction of a carry chain. It reads %cc if its stem ends in c, writes it for .cc."""
    stem = name.split(".")[0]
    combine = _difference_with_borrow if stem.startswith("sub") else _sum_with_carry

    @ROWS.lane(name, section, spell(WORDS), types=WORDS)
    def emit(b: SegmentBuilder, i: PtxInstruction) -> None:
        (kind,) = modifiers(i, name, WORDS)
        sources = [b.read(operand, kind) for operand in i.operands[1:]]
        left = sources[0] if half is None else half(is_signed(kind), sources[0], sources[1])
        width = width_of(kind)
        reads = stem.endswith("c")
        carry = b.read(CARRY, "pred").resize(width) if reads else b.constant(0, f"i{width}")
        result, out = combine(left, sources[-1], carry)
        b.write(i.operands[0], result)
        if name.endswith(".cc"):
            b.write(CARRY, out)


def _define_carries() -> None:
    for name, section in (
        ("add.cc", "9.7.2.1"),
        ("addc", "9.7.2.2"),
        ("addc.cc", "9.7.2.2"),
        ("sub.cc", "9.7.2.3"),
        ("subc", "9.7.2.4"),
        ("subc.cc", "9.7.2.4"),
    ):
        _define_carry(name, section, None)
    for part, half in (("lo", low_half), ("hi", high_half)):
        _define_carry(f"mad.{part}.cc", "9.7.2.5", half)
        _define_carry(f"madc.{part}", "9.7.2.6", half)
        _define_carry(f"madc.{part}.cc", "9.7.2.6", half)


_define_sums()
_define_extremes()
_define_products()
_define_carries()
