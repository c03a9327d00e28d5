"""Bit counting, bit fields and byte dot products: PTX ISA 9.7.1.14 to 9.7.1.24."""

from __future__ import annotations

from fa4.emulator.isa.formula import (
    WORDS,
    bits_of,
    define,
    intrinsic,
    leading_zeros,
    like,
    shift_left,
    shift_right,
)
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed
from fa4.emulator.translate.table import TableRows, modifiers

ROWS = TableRows()

NONE_FOUND = -1


def highest_bit(signed: bool, a: Lanes, from_top: bool) -> Lanes:
    """Position of the highest bit that differs from the sign (or its distance from the top)."""
    plain = a ^ a.ashr(bits_of(a) - 1) if signed else a
    zeros = leading_zeros(plain).resize(32)
    position = zeros if from_top else like(zeros, bits_of(a) - 1) - zeros
    return plain.compare("eq", 0).select(like(position, NONE_FOUND), position)


def nth_set_bit(signed: bool, mask: Lanes, base: Lanes, offset: Lanes) -> Lanes:
    """Position of the |offset|-th set bit from `base` upwards (downwards if offset < 0)."""
    # Searching down is searching up in the reversed word.
    down = offset.compare("slt", 0)
    word = down.select(intrinsic("bitreverse", mask), mask)
    start = down.select(like(base, 31) - base, base)
    here = shift_left(like(mask, 1), start)
    from_start = word & -here
    wanted = intrinsic("umax", down.select(-offset, offset), like(offset, 1))
    # Offset 0 asks about the bit at base alone.
    word = offset.compare("eq", 0).select(word & here, from_start)
    found = like(mask, NONE_FOUND)
    seen = like(mask, 0)
    for position in range(32):
        bit = (word >> position) & 1
        seen = seen + bit
        hit = bit.compare("ne", 0) & seen.compare("eq", wanted)
        found = hit.select(down.select(like(mask, 31 - position), like(mask, position)), found)
    return found


def bit_field(signed: bool, a: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`length` bits of a from `position` on, sign- or zero-extended; both counts modulo 256."""
    width = bits_of(a)
    length = length & 0xFF
    moved = shift_right(signed, a, position & 0xFF)
    # Shifted to the top and back, the field is extended.
    unused = like(length, width) - intrinsic("umin", length, like(length, width))
    field = shift_right(signed, shift_left(moved, unused), unused)
    return length.compare("eq", 0).select(like(a, 0), field)


def insert_bits(signed: bool, a: Lanes, into: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`into` with its `length` bits from `position` on replaced by the low bits of a."""
    position = position & 0xFF
    field = shift_left(~(shift_left(like(a, -1), length & 0xFF)), position)
    return (into & ~field) | (shift_left(a, position) & field)


def extend_clamped(signed: bool, a: Lanes, count: Lanes) -> Lanes:
    """The low `count` bits of a, sign- or zero-extended; all of a from 32 on."""
    return count.compare("uge", 32).select(a, extend_wrapped(signed, a, count))


def extend_wrapped(signed: bool, a: Lanes, count: Lanes) -> Lanes:
    """The low `count` modulo 32 bits of a, sign- or zero-extended; 0 for none."""
    return bit_field(signed, a, like(a, 0), count & 31)


def mask_clamped(signed: bool, start: Lanes, count: Lanes) -> Lanes:
    """`count` ones from bit `start` on; what does not fit in 32 bits is dropped."""
    return shift_left(~shift_left(like(start, -1), count), start)


def mask_wrapped(signed: bool, start: Lanes, count: Lanes) -> Lanes:
    """`mask_clamped` with both operands modulo 32."""
    return mask_clamped(signed, start & 31, count & 31)


def _part(word: Lanes, index: int, bits: int, signed: bool) -> Lanes:
    """Part `index` of `bits` bits of a 32-bit word, extended to 32 bits."""
    top = word << (32 - bits * (index + 1))
    return top.ashr(32 - bits) if signed else top >> (32 - bits)


def _define_dot(name: str, section: str, pairs: int, first_byte: int) -> None:
    """d = c + the products of `pairs` parts of a and the bytes of b from `first_byte` on."""

    @ROWS.lane(name, section, "(.u32 .s32 of a) (.u32 .s32 of b)")
    def emit(b: SegmentBuilder, i: PtxInstruction) -> None:
        a_type, b_type = modifiers(i, name, ("u32", "s32"), ("u32", "s32"))
        a, x, total = (b.read(operand, "u32") for operand in i.operands[1:])
        for k in range(pairs):
            left = _part(a, k, 32 // pairs, is_signed(a_type))
            right = _part(x, first_byte + k, 8, is_signed(b_type))
            total = total + left * right
        b.write(i.operands[0], total)


def _define_all() -> None:
    words = ("b32", "b64")
    define(ROWS, "popc", "9.7.1.14", words, lambda s, a: intrinsic("ctpop", a).resize(32))
    define(ROWS, "clz", "9.7.1.15", words, lambda s, a: leading_zeros(a).resize(32))
    define(ROWS, "bfind", "9.7.1.16", WORDS, lambda s, a: highest_bit(s, a, False))
    define(ROWS, "bfind.shiftamt", "9.7.1.16", WORDS, lambda s, a: highest_bit(s, a, True))
    define(ROWS, "fns", "9.7.1.17", ("b32",), nth_set_bit)
    define(ROWS, "brev", "9.7.1.18", words, lambda s, a: intrinsic("bitreverse", a))
    define(ROWS, "bfe", "9.7.1.19", WORDS, bit_field, ("", "u32", "u32"))
    define(ROWS, "bfi", "9.7.1.20", words, insert_bits, ("", "", "u32", "u32"))
    define(ROWS, "szext.clamp", "9.7.1.21", ("u32", "s32"), extend_clamped)
    define(ROWS, "szext.wrap", "9.7.1.21", ("u32", "s32"), extend_wrapped)
    define(ROWS, "bmsk.clamp", "9.7.1.22", ("b32",), mask_clamped)
    define(ROWS, "bmsk.wrap", "9.7.1.22", ("b32",), mask_wrapped)
    _define_dot("dp4a", "9.7.1.23", 4, 0)
    _define_dot("dp2a.lo", "9.7.1.24", 2, 0)
    _define_dot("dp2a.hi", "9.7.1.24", 2, 2)


_define_all()
