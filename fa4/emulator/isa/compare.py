"""Comparison and selection: PTX ISA 9.7.6, and 9.7.7 for half precision."""

from __future__ import annotations

from collections.abc import Callable

from fa4.emulator.isa.formula import BITS, INTEGERS, define, destinations, like, spell
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed, width_of
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

# PTX comparison -> LLVM predicate. Ordered comparisons are false if an operand is NaN, so "ne" is
# LLVM's "one"; the names with u are true then.
_EQUALITY = {"eq": "eq", "ne": "ne"}
_SIGNED = _EQUALITY | {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_UNSIGNED = _EQUALITY | {
    **{"lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"},
    **{"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"},
}
_FLOAT = {
    **{"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"},
    **{"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"},
    **{"num": "ord", "nan": "uno"},
}
COMPARISONS = tuple(dict.fromkeys((*_UNSIGNED, *_FLOAT)))

BOOLEANS: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "and": lambda t, c: t & c,
    "or": lambda t, c: t | c,
    "xor": lambda t, c: t ^ c,
}
FULL = (*BITS, *INTEGERS, "f32", "f64")
HALVES = ("f16", "bf16")
PACKED_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}
_FLUSHED_EXPONENT = {"f16": 0x7C00, "f32": 0x7F800000}
_SET_TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


def relation(comparison: str, kind: str) -> str:
    """The LLVM predicate for a PTX comparison of two values of type `kind`.

    Raises Unsupported for pairs that PTX excludes, such as "lo" of signed integers.
    """
    if "f" in kind:
        codes = _FLOAT
    elif kind.startswith("b"):
        codes = _EQUALITY
    else:
        codes = _SIGNED if is_signed(kind) else _UNSIGNED
    if comparison not in codes:
        raise Unsupported(f"comparison .{comparison} of .{kind}")
    return codes[comparison]


def flushed(bits: Lanes, kind: str) -> Lanes:
    """Subnormal f16 or f32 numbers, given by their bits, become zeros of the same sign."""
    if kind not in _FLUSHED_EXPONENT:
        raise Unsupported(f"modifier .ftz with .{kind}")
    subnormal = (bits & _FLUSHED_EXPONENT[kind]).compare("eq", 0)
    return subnormal.select(bits & (1 << (width_of(kind) - 1)), bits)


def _value(bits: Lanes, kind: str) -> Lanes:
    """What LLVM compares: integers as they are, halves as the floats they equal."""
    if kind == "bf16":
        return (bits.resize(32) << 16).as_float()
    if kind == "f16":
        return bits.as_float().convert("fpext", "float")
    return bits.as_float() if kind.startswith("f") else bits


def compared(comparison: str, flush: bool, kind: str, a: Lanes, b: Lanes) -> Lanes:
    """i1: a `comparison` b, for operands given by their bits."""
    if flush:
        a, b = flushed(a, kind), flushed(b, kind)
    return _value(a, kind).compare(relation(comparison, kind), _value(b, kind))


def _compared_operands(
    b: SegmentBuilder, i: PtxInstruction, comparison: str, flush: bool, kind: str
) -> list[Lanes]:
    """The comparison of sources 1 and 2; of their low and their high halves if they are packed."""
    x, y = b.read(i.operands[1], kind), b.read(i.operands[2], kind)
    if kind not in PACKED_HALVES:
        return [compared(comparison, flush, kind, x, y)]
    half = PACKED_HALVES[kind]
    return [
        compared(comparison, flush, half, (x >> at).resize(16), (y >> at).resize(16))
        for at in (0, 16)
    ]


def _combined(
    b: SegmentBuilder, i: PtxInstruction, boolean: str, results: list[Lanes]
) -> list[Lanes]:
    """The results joined with the predicate in source 3, if there is a Boolean operator."""
    if not boolean:
        return results
    other = b.read(i.operands[3], "pred")
    return [BOOLEANS[boolean](result, other) for result in results]


_SETP_TYPES = (*FULL, *HALVES, *PACKED_HALVES)


@ROWS.lane("setp", "9.7.6.2", f".CmpOp {{.and .or .xor}} {{.ftz}} {spell(_SETP_TYPES)}")
def emit_setp(b: SegmentBuilder, i: PtxInstruction) -> None:
    """p|q: the result and, unless the type is packed, that of the opposite comparison."""
    comparison, boolean, flush, kind = modifiers(
        i, "setp", COMPARISONS, BOOLEANS, ("ftz",), _SETP_TYPES
    )
    results = _compared_operands(b, i, comparison, bool(flush), kind)
    if len(results) == 1:
        results.append(~results[0])
    results = _combined(b, i, boolean, results)
    for operand, result in zip(destinations(i.operands[0]), results, strict=True):
        b.write(operand, result)


def _set_destinations(source: str) -> tuple[str, ...]:
    """The types that `set` may write after comparing values of type `source`."""
    if source in PACKED_HALVES:
        return (source, "u32", "s32")
    if source in HALVES:
        return (source, "u16", "s16", "u32", "s32")
    return ("u32", "s32", "f32", *HALVES)


@ROWS.lane("set", "9.7.6.1", ".CmpOp {.and .or .xor} {.ftz} .dtype .stype")
def emit_set(b: SegmentBuilder, i: PtxInstruction) -> None:
    """d = 1.0 or all ones where the comparison holds, else 0."""
    written = ("u32", "s32", "u16", "s16", "f32", *HALVES, *PACKED_HALVES)
    comparison, boolean, flush, target, kind = modifiers(
        i, "set", COMPARISONS, BOOLEANS, ("ftz",), written, _SETP_TYPES
    )
    if i.parts[-2:] != (target, kind) or target not in _set_destinations(kind):
        raise Unsupported(f"result .{target} of a comparison of .{kind}")
    results = _compared_operands(b, i, comparison, bool(flush), kind)
    results = _combined(b, i, boolean, results)
    width = width_of(target) // len(results)
    true = _SET_TRUE.get(PACKED_HALVES.get(target, target), (1 << width) - 1)
    yes, no = b.constant(true, f"i{width}"), b.constant(0, f"i{width}")
    values = [result.select(yes, no) for result in results]
    if len(values) == 2:
        values = [values[0].resize(32) | (values[1].resize(32) << 16)]
    b.write(i.operands[0], values[0])


@ROWS.lane("slct", "9.7.6.4", f"{spell(FULL)}, then .s32 or {{.ftz}} .f32")
def emit_slct(b: SegmentBuilder, i: PtxInstruction) -> None:
    """d = c >= 0 ? a : b; a NaN selects b."""
    flush, kind, tested = modifiers(i, "slct", ("ftz",), FULL, ("s32", "f32"))
    first, second = b.read(i.operands[1], kind), b.read(i.operands[2], kind)
    c = b.read(i.operands[3], tested)
    b.write(
        i.operands[0],
        compared("ge", bool(flush), tested, c, like(c, 0)).select(first, second),
    )


define(ROWS, "selp", "9.7.6.3", FULL, lambda s, a, b, c: c.select(a, b), ("", "", "pred"))
