"""min, max, neg, abs, copysign and testp of every floating-point type (PTX ISA 9.7.3, 9.7.4)."""

from __future__ import annotations

from collections.abc import Callable

from fa4.emulator.isa.floats import ELEMENTS, Emitter, type_of
from fa4.emulator.isa.formats import (
    F64,
    FloatFormat,
    canonical,
    decode,
    flush,
    is_nan,
    join,
    pass_nan,
    split,
)
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

FTZ = ("f32", "f16", "f16x2")
TYPES = (*FTZ, "f64", "bf16", "bf16x2")
SCALARS = ("f32", "f64")


def extremum(name: str, left: Lanes, right: Lanes, form: FloatFormat, propagate: bool) -> Lanes:
    """min or max of encoded numbers, -0 < +0. A NaN loses against a number unless `propagate`."""

    def body(a: Lanes, b: Lanes) -> Lanes:
        return _extremum(name, a, b, form, propagate)

    label = f"{name}{'.NaN' if propagate else ''}.{form.name}"
    return left.builder.subroutine(label, body, left, right)


def _extremum(name: str, left: Lanes, right: Lanes, form: FloatFormat, propagate: bool) -> Lanes:
    a, b = decode(left, form), decode(right, form)
    result = a.compare("ogt" if name == "max" else "olt", b).select(left, right)
    # Equal numbers have equal bits, except zeros.
    same = left & right if name == "max" else left | right
    result = a.compare("oeq", b).select(same, result)
    if propagate:
        return canonical(result, a.compare("uno", b), form)
    result = is_nan(b).select(left, result)
    if form is F64:
        return is_nan(a).select(pass_nan(result, right, F64, F64), result)
    return canonical(result, is_nan(a) & is_nan(b), form)


def _emit_extremum(name: str, builder: SegmentBuilder, i: PtxInstruction) -> None:
    kind = type_of(i)
    form, count = ELEMENTS[kind]
    three = kind == "f32" and len(i.operands) == 4
    propagating = () if kind == "f64" else ("NaN",)
    crossed = () if kind == "f64" or three else ("xorsign",)
    flushing = ("ftz",) if kind in FTZ else ()
    ftz, nan, xorsign, absolute, _ = modifiers(
        i, name, flushing, propagating, crossed, ("abs",), (kind,)
    )
    if bool(absolute) != bool(xorsign) and not three:
        raise Unsupported("one of the modifiers .xorsign.abs without the other")
    registers = [builder.read(operand, kind) for operand in i.operands[1:]]
    if len(registers) != 2 + three:
        raise Unsupported(f"{len(registers)} sources")
    results = []
    for element in zip(*(split(register, count) for register in registers), strict=True):
        values = [flush(bits, form) if ftz else bits for bits in element]
        sign = (values[0] ^ values[1]) & form.sign
        if absolute:
            values = [bits & (form.sign - 1) for bits in values]
        result = values[0]
        for value in values[1:]:
            result = extremum(name, result, value, form, bool(nan))
        if xorsign:
            result = canonical(result | sign, is_nan(decode(result, form)), form)
        results.append(result)
    builder.write(i.operands[0], join(results))


def _emit_sign(name: str, builder: SegmentBuilder, i: PtxInstruction) -> None:
    """NaN, whose sign the manual leaves open, becomes the canonical one or in f64 quiet, as on an
    H200."""
    kind = type_of(i)
    form, count = ELEMENTS[kind]
    ftz, _ = modifiers(i, name, ("ftz",) if kind in FTZ else (), (kind,))
    results = []
    for element in split(builder.read(i.operands[1], kind), count):
        bits = flush(element, form) if ftz else element
        signed = bits ^ form.sign if name == "neg" else bits & (form.sign - 1)
        if form is F64:
            results.append(pass_nan(signed, bits, F64, F64))
        else:
            results.append(canonical(signed, is_nan(decode(bits, form)), form))
    builder.write(i.operands[0], join(results))


def _emitter(function: Callable[[str, SegmentBuilder, PtxInstruction], None], name: str) -> Emitter:
    return lambda builder, i: function(name, builder, i)


def _register() -> None:
    for name, section in (("min", "9.7.3.11, 9.7.4.7"), ("max", "9.7.3.12, 9.7.4.8")):
        forms = (
            "{.ftz}{.NaN}{.xorsign.abs}.{f32 f16 f16x2}, {.NaN}{.xorsign.abs}.{bf16 bf16x2}, "
            "{.ftz}{.NaN}{.abs}.f32 of three sources, .f64"
        )
        ROWS.lane(name, section, forms, types=TYPES)(_emitter(_emit_extremum, name))
    for name, section in (("neg", "9.7.3.10, 9.7.4.5"), ("abs", "9.7.3.9, 9.7.4.6")):
        forms = "{.ftz}.{f32 f16 f16x2}, .{f64 bf16 bf16x2}"
        ROWS.lane(name, section, forms, types=TYPES)(_emitter(_emit_sign, name))


_register()


@ROWS.lane("copysign", "9.7.3.2", ".f32, .f64", types=SCALARS)
def copysign(builder: SegmentBuilder, i: PtxInstruction) -> None:
    """The sign of a on the magnitude of b."""
    (kind,) = modifiers(i, "copysign", SCALARS)
    form = ELEMENTS[kind][0]
    sign, magnitude = (builder.read(operand, kind) for operand in i.operands[1:])
    builder.write(i.operands[0], (sign & form.sign) | (magnitude & (form.sign - 1)))


@ROWS.lane(
    "testp",
    "9.7.3.1",
    "{.finite .infinite .number .notanumber .normal .subnormal}.{f32 f64}",
    types=SCALARS,
)
def testp(builder: SegmentBuilder, i: PtxInstruction) -> None:
    """A property of a number as predicate; zeros count as normal."""
    names = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    name, kind = modifiers(i, "testp", names, SCALARS)
    if not name:
        raise Unsupported("no property")
    form = ELEMENTS[kind][0]
    magnitude = builder.read(i.operands[1], kind) & (form.sign - 1)
    infinity = form.infinity_bits
    finite = magnitude.compare("ult", infinity)
    tiny = magnitude.compare("ult", form.smallest_normal) & magnitude.compare("ne", 0)
    results = {
        "finite": lambda: finite,
        "infinite": lambda: magnitude.compare("eq", infinity),
        "number": lambda: magnitude.compare("ule", infinity),
        "notanumber": lambda: magnitude.compare("ugt", infinity),
        "normal": lambda: finite & ~tiny,
        "subnormal": lambda: tiny,
    }
    builder.write(i.operands[0], results[name]())
