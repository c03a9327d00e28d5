"""The .approx and .full instructions (PTX ISA 9.7.3.8 to 9.7.3.22, 9.7.4.9 and 9.7.4.10).

The model is the true function in double, rounded once to nearest: an ideal unit. The hardware's
results differ from it by no more than the error that the manual documents, given beside each
function; for ex2 on an H200, 2 ulp were measured over all inputs. Special values (zeros,
infinities, NaN, and subnormals under .ftz) follow the manual's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa4.emulator.isa.floats import ELEMENTS
from fa4.emulator.isa.formats import (
    F32,
    FloatFormat,
    canonical,
    decode,
    flush,
    is_nan,
    join,
    split,
    widen,
)
from fa4.emulator.isa.rounding import encode, flush_result
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

Kernel = Callable[[list[Lanes]], Lanes]

# 2^f on [-1/2, 1/2], relative error below 2^-55 before the double roundings of its evaluation:
# the polynomial of degree 11 through the Chebyshev nodes.
EXP2 = (
    1.0,
    0.6931471805599453,
    0.24022650695910158,
    0.055504108664821625,
    0.009618129107587256,
    0.001333355814640647,
    0.00015403530463724353,
    1.5252733841556773e-05,
    1.3215432535912375e-06,
    1.0178057087733941e-07,
    7.074194297288521e-09,
    4.4558179083360645e-10,
)
# Beyond these exponents every format has overflowed to infinity or underflowed to zero.
EXP2_LIMIT = 200.0


def exp2(sources: list[Lanes]) -> Lanes:
    """2 to the power of floats, as doubles."""
    x = sources[0]
    builder, nan, wide = x.builder, is_nan(x), widen(x)
    limit, floor = (builder.constant(s * EXP2_LIMIT, "float") for s in (1.0, -1.0))
    x = x.compare("olt", limit).select(x, limit)
    x = x.compare("ogt", floor).select(x, floor)
    whole = builder.call("llvm.rint.v32f32", "float", x)
    # Exact: both are multiples of x's last bit and the difference is at most one half.
    fraction = widen(x - whole)
    result = builder.constant(EXP2[-1], "double")
    for coefficient in EXP2[-2::-1]:
        addend = builder.constant(coefficient, "double")
        result = builder.call("llvm.fma.v32f64", "double", result, fraction, addend)
    exponent = whole.convert("fptosi", "i32").resize(64, signed=True)
    return nan.select(wide, (result.as_integer() + (exponent << 52)).as_float())


def _library(name: str) -> Kernel:
    def kernel(sources: list[Lanes]) -> Lanes:
        wide = widen(sources[0])
        return wide.builder.call(f"llvm.{name}.v32f64", "double", wide)

    return kernel


def _divide(sources: list[Lanes]) -> Lanes:
    return widen(sources[0]).fdiv(widen(sources[1]))


def _divide_by_reciprocal(sources: list[Lanes]) -> Lanes:
    """a * (1 / b): a reciprocal below 2^-126 counts as zero, so |b| > 2^126 gives 0, or NaN for
    infinite a."""
    bits = sources[1].as_integer()
    magnitude = bits & 0x7FFFFFFF
    vanished = magnitude.compare("ugt", 0x7E800000) & magnitude.compare("ult", 0x7F800000)
    zero = widen((bits & (1 << 31)).as_float())
    return vanished.select(widen(sources[0]) * zero, _divide(sources))


def _reciprocal(sources: list[Lanes]) -> Lanes:
    return _divide([sources[0].builder.constant(1.0, "float"), sources[0]])


def _reciprocal_root(sources: list[Lanes]) -> Lanes:
    root = _library("sqrt")(sources)
    return root.builder.constant(1.0, "double").fdiv(root)


@dataclass(frozen=True)
class Approximation:
    """One instruction: dotted name, section of the manual, function of floats giving doubles.

    error: the hardware's bound in the manual. types: those accepted, with .ftz optional ("?"),
    required ("!") or illegal ("").
    """

    name: str
    section: str
    kernel: Kernel
    error: str
    types: dict[str, str]


FLOAT = {"f32": "?"}
APPROXIMATIONS = (
    Approximation("div.approx", "9.7.3.8", _divide_by_reciprocal, "2 ulp", FLOAT),
    Approximation("div.full", "9.7.3.8", _divide, "2 ulp", FLOAT),
    Approximation("rcp.approx", "9.7.3.13", _reciprocal, "1 ulp", FLOAT),
    Approximation("sqrt.approx", "9.7.3.15", _library("sqrt"), "relative 2^-23", FLOAT),
    Approximation("rsqrt.approx", "9.7.3.16", _reciprocal_root, "relative 2^-22.9", FLOAT),
    Approximation("sin.approx", "9.7.3.18", _library("sin"), "2^-20.5 in [-2pi, 2pi]", FLOAT),
    Approximation("cos.approx", "9.7.3.19", _library("cos"), "2^-20.5 in [-2pi, 2pi]", FLOAT),
    Approximation(
        "lg2.approx", "9.7.3.20", _library("log2"), "2^-22, relative outside (0.5, 2)", FLOAT
    ),
    Approximation(
        "ex2.approx",
        "9.7.3.21, 9.7.4.10",
        exp2,
        "relative 2^-22, f16 2^-9.9, bf16 2^-7",
        {"f32": "?", "f16": "", "f16x2": "", "bf16": "!", "bf16x2": "!"},
    ),
    Approximation(
        "tanh.approx",
        "9.7.3.22, 9.7.4.9",
        _library("tanh"),
        "relative 2^-11, f16 2^-10.987, bf16 2^-8",
        {"f32": "", "f16": "", "f16x2": "", "bf16": "", "bf16x2": ""},
    ),
)


def approximate(row: Approximation, sources: list[Lanes], form: FloatFormat, ftz: bool) -> Lanes:
    """The bits of one element of an approximate instruction, from the bits of its sources."""

    def body(*elements: Lanes) -> Lanes:
        return _approximate(row, list(elements), form, ftz)

    name = f"{row.name}{'.ftz' if ftz else ''}.{form.name}"
    return sources[0].builder.subroutine(name, body, *sources)


def _approximate(row: Approximation, sources: list[Lanes], form: FloatFormat, ftz: bool) -> Lanes:
    values = [decode(flush(bits, form) if ftz else bits, form) for bits in sources]
    result = row.kernel(values)
    if form is F32:
        rounded = result.convert("fptrunc", "float")
        bits = canonical(rounded.as_integer(), is_nan(rounded), form)
    else:
        bits = encode(result, form)
    return flush_result(bits, result, form, "rn") if ftz else bits


def _emitter(row: Approximation) -> Callable[[SegmentBuilder, PtxInstruction], None]:
    def emit(builder: SegmentBuilder, i: PtxInstruction) -> None:
        ftz, kind = modifiers(i, row.name, ("ftz",), tuple(row.types))
        if not kind:
            raise Unsupported("no type")
        accepts = row.types[kind]
        if bool(ftz) != (accepts == "!") and accepts != "?":
            raise Unsupported(f"type .{kind} {'with' if ftz else 'without'} .ftz")
        form, count = ELEMENTS[kind]
        registers = [split(builder.read(operand, kind), count) for operand in i.operands[1:]]
        results = [
            approximate(row, list(element), form, bool(ftz))
            for element in zip(*registers, strict=True)
        ]
        builder.write(i.operands[0], join(results))

    return emit


def _register() -> None:
    spelled = {"?": "{.ftz}", "!": ".ftz", "": ""}
    for row in APPROXIMATIONS:
        forms = ", ".join(f"{spelled[ftz]}.{kind}" for kind, ftz in row.types.items())
        ROWS.lane(row.name, row.section, f"{forms}; hardware's error bound: {row.error}")(
            _emitter(row)
        )


_register()
