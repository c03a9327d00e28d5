"""Hiding the columns of a row of S that a mask does not show."""

import math

import cutlass
from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock, literal

MASK_COLUMNS = 28  # columns that share a mask word


def keep_range(row: list[Float32], start: Int32 | None, stop: Int32) -> list[Float32]:
    """The row with -inf outside columns [start, stop).

    One instruction moves 7 bits of a byte to predicates (R2P), so a byte of a mask word stands for
    7 columns: column c is bit c + c // 7 of all words, and 28 columns share a word.
    """
    code = PtxBlock()
    values = code.read_all(row)
    last = code.read(_mask_bit(stop, len(row)))
    first = None if start is None else code.read(_mask_bit(start, len(row)))
    result: list[str] = []
    for word, column in enumerate(range(0, len(row), MASK_COLUMNS)):
        hide = _ones_from(code, last, word)
        if first is not None:
            before = code.do("not.b32", _ones_from(code, first, word), kind="b32")
            hide = code.do("or.b32", hide, before, kind="b32")
        for c, value in enumerate(values[column : column + MASK_COLUMNS]):
            bit = code.do("and.b32", hide, str(1 << (c + c // 7)), kind="b32")
            shown = code.do("setp.eq.b32", bit, "0", kind="pred")
            result.append(code.do("selp.f32", value, literal(-math.inf), shown))
    return code.trace(*result)


def _mask_bit(column: Int32, columns: int) -> Int32:
    """column + column // 7 for columns from 0 to 128; the same order outside."""
    column = cutlass.max(cutlass.min(column, columns), 0)
    return (column * (1024 + 147)) >> 10


def _ones_from(code: PtxBlock, bit: str, word: int) -> str:
    """Mask word number `word`: its bits from `bit` of all words on are set."""
    if word:
        bit = code.do("sub.s32", bit, str(32 * word), kind="b32")
        bit = code.do("max.s32", bit, "0", kind="b32")
    return code.do("shl.b32", "-1", bit, kind="b32")  # by more than 31 leaves 0 in PTX
