"""Arithmetic of f32, f64 and f32x2, and the mixed-precision forms (PTX ISA 9.7.3 and 9.7.5).

Each operation works on one element; a packed type runs it on every half of the register. The
16-bit types register the same functions (see `fa4.emulator.isa.halves`).

No rounding modifier means .rn. The manual lets ptxas contract such a mul and add into an fma; the
emulator never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fa4.emulator.isa.formats import (
    BF16,
    F16,
    F32,
    F64,
    FloatFormat,
    canonical,
    decode,
    flush,
    is_nan,
    join,
    pass_nan,
    rectify,
    saturate,
    split,
    widen,
)
from fa4.emulator.isa.rounding import (
    ROUNDINGS,
    directed_f32,
    encode,
    exact,
    flush_result,
    native,
    round_to_odd,
)
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

# type -> format of an element, elements in a register
ELEMENTS: dict[str, tuple[FloatFormat, int]] = {
    "f32": (F32, 1),
    "f64": (F64, 1),
    "f32x2": (F32, 2),
    "f16": (F16, 1),
    "f16x2": (F16, 2),
    "bf16": (BF16, 1),
    "bf16x2": (BF16, 2),
}
Emitter = Callable[[SegmentBuilder, PtxInstruction], None]
FLOATS = ("f32", "f64", "f32x2")
MIXED = ("f16", "bf16")
# operation -> number of sources
ARITHMETIC = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}
# The order in which f64 sources are asked for the NaN that passes on (measured on an H200).
NAN_ORDER = {"fma": (1, 2, 0), "div": (0, 1), "sqrt": (0,)}
EXPLICIT_ROUNDING = ("fma", "mad", "div", "rcp", "sqrt")
# 9.7.3.* and, for the mixed forms, 9.7.5.*
SECTIONS = {
    "add": "9.7.3.3, 9.7.5.1",
    "sub": "9.7.3.4, 9.7.5.2",
    "mul": "9.7.3.5",
    "fma": "9.7.3.6, 9.7.5.3",
    "mad": "9.7.3.7",
    "div": "9.7.3.8",
    "rcp": "9.7.3.13",
    "sqrt": "9.7.3.15",
}


@dataclass(frozen=True)
class Modifiers:
    """How one arithmetic instruction rounds, and what it does to subnormals and its result."""

    rounding: str = "rn"
    ftz: bool = False
    sat: bool = False
    relu: bool = False


def type_of(instruction: PtxInstruction) -> str:
    """The floating-point type that an instruction works in: the first one among its parts."""
    return next(part for part in instruction.parts if part in ELEMENTS)


def arithmetic(
    operation: str, sources: list[tuple[Lanes, FloatFormat]], form: FloatFormat, how: Modifiers
) -> Lanes:
    """The bits of add, sub, mul, fma, div or sqrt of encoded sources, rounded once to `form`."""
    formats = [source for _, source in sources]

    def body(*bits: Lanes) -> Lanes:
        return _arithmetic(operation, list(zip(bits, formats, strict=True)), form, how)

    flags = [name for name in ("ftz", "sat", "relu") if getattr(how, name)]
    types = [form.name, *(source.name for source in formats)]
    name = ".".join([operation, how.rounding, *flags, *types])
    return sources[0][0].builder.subroutine(name, body, *(bits for bits, _ in sources))


def _arithmetic(
    operation: str, sources: list[tuple[Lanes, FloatFormat]], form: FloatFormat, how: Modifiers
) -> Lanes:
    values = [decode(flush(b, f) if how.ftz else b, f) for b, f in sources]
    odd = None
    if form is F64 or (form is F32 and how.rounding == "rn" and not how.ftz):
        result = native(operation, values)
    else:
        truth = exact(operation, [widen(value) for value in values], how.rounding)
        odd = round_to_odd(truth)
        result = directed_f32(truth, how.rounding) if form is F32 else odd
    if how.sat:
        result = saturate(result)
    if how.relu:
        result = rectify(result)
    if form in (F32, F64):
        bits = canonical(result.as_integer(), is_nan(result), form)
        for index in reversed(NAN_ORDER.get(operation, (1, 0)) if form is F64 else ()):
            bits = pass_nan(bits, sources[index][0], F64, F64)
    else:
        bits = encode(result, form, how.rounding)
    return flush_result(bits, odd, form, how.rounding) if how.ftz and odd is not None else bits


def emit_arithmetic(
    operation: str, builder: SegmentBuilder, i: PtxInstruction, flags: Iterable[str]
) -> None:
    """Any operation of ARITHMETIC. flags: those of ftz, sat and relu that the type accepts."""
    kind = type_of(i)
    form, count = ELEMENTS[kind]
    narrow = MIXED if kind == "f32" and operation in ("add", "sub", "fma") else ()
    allowed = [(flag,) if flag in flags else () for flag in ("ftz", "sat", "relu")]
    roundings = ROUNDINGS if kind in FLOATS else ("rn",)
    rounding, ftz, sat, relu, source, _ = modifiers(
        i, operation, roundings, *allowed, narrow, (kind,)
    )
    if operation in EXPLICIT_ROUNDING and not rounding:
        raise Unsupported("no rounding modifier")
    if form is F64 and rounding not in ("", "rn"):
        raise Unsupported(f".{rounding} for f64: only .rn is modelled")
    if source and ftz:
        raise Unsupported("modifier .ftz on a mixed-precision form")
    # add and sub convert only their first operand, fma the two factors.
    types = [kind] * ARITHMETIC[operation]
    if source:
        types[: len(types) - 1] = [source] * (len(types) - 1)
    registers = [builder.read(o, t) for o, t in zip(i.operands[1:], types, strict=True)]
    how = Modifiers(rounding or "rn", bool(ftz), bool(sat), bool(relu))
    parts = [split(register, count) for register in registers]
    formats = [ELEMENTS[t][0] for t in types]
    results = []
    for element in zip(*parts, strict=True):
        sources = list(zip(element, formats, strict=True))
        if operation == "rcp":
            sources.insert(0, (builder.constant(_one(form), element[0].type), form))
        name = {"mad": "fma", "rcp": "div"}.get(operation, operation)
        results.append(arithmetic(name, sources, form, how))
    builder.write(i.operands[0], join(results))


def _one(form: FloatFormat) -> int:
    return form.bias << form.mantissa_bits


def _arithmetic_emitter(operation: str) -> Emitter:
    def emit(builder: SegmentBuilder, i: PtxInstruction) -> None:
        kind = type_of(i)
        flags = {"f32": ("ftz", "sat"), "f32x2": ("ftz",), "f64": ()}[kind]
        quotient = operation in ("div", "rcp", "sqrt")
        emit_arithmetic(operation, builder, i, flags[:1] if quotient else flags)

    return emit


def _register() -> None:
    rounded = "{.rn .rz .rm .rp}{.ftz}{.sat}.f32, {.rn}.f64"
    for operation in ("add", "sub", "mul", "fma"):
        forms = rounded + ", {.rn .rz .rm .rp}{.ftz}.f32x2"
        if operation != "mul":
            forms += ", {.rn .rz .rm .rp}{.sat}.f32.{f16 bf16}"
        ROWS.lane(operation, SECTIONS[operation], forms, types=FLOATS)(
            _arithmetic_emitter(operation)
        )
    ROWS.lane("mad", SECTIONS["mad"], rounded, types=FLOATS[:2])(_arithmetic_emitter("mad"))
    for operation in ("div", "rcp", "sqrt"):
        forms = "{.rn .rz .rm .rp}{.ftz}.f32, .rn.f64"
        ROWS.lane(operation, SECTIONS[operation], forms, types=FLOATS[:2])(
            _arithmetic_emitter(operation)
        )


_register()
