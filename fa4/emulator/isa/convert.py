"""cvt and cvt.pack (PTX ISA 9.7.9.21 and 9.7.9.22): any scalar type to any other.

Every floating-point source is exact in double; a 64-bit integer becomes a double rounded to odd.
So one rounding remains, which `fa4.emulator.isa.rounding` does. The packed and narrow formats are
in `fa4.emulator.isa.convert_packed`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fa4.emulator.isa.convert_packed import PACKED, convert_packed
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
    pass_nan,
    rectify,
    saturate,
    widen,
)
from fa4.emulator.isa.rounding import ROUNDINGS, Exact, directed_f32, encode, flush_result
from fa4.emulator.ptx.syntax import Operand, PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, is_signed, width_of
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
SCALARS = (*INTEGERS, *FORMATS)
# modifier -> LLVM's function that rounds to an integral value
INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
EXACT_IN_DOUBLE = 1 << 53


def types_of(instruction: PtxInstruction) -> tuple[str, str]:
    """(destination, source) types of a cvt."""
    types = [part for part in instruction.parts if part in SCALARS or part in PACKED]
    if len(types) != 2:
        raise Unsupported("cvt needs two types")
    return types[0], types[1]


@ROWS.lane(
    "cvt",
    "9.7.9.21",
    "{.sat}.int.int, {.rn .rz .rm .rp}{.ftz}{.sat}.float.int, "
    "{.rni .rzi .rmi .rpi}{.ftz}{.sat}.int.float, "
    "{.rn .rz .rm .rp .rni .rzi .rmi .rpi}{.ftz}{.sat}{.relu}{.satfinite}.float.float, "
    "{.rn .rz .rs}{.relu}{.satfinite}.{f16x2 bf16x2}.f32, "
    "{.rn .rz .rna}{.relu}{.satfinite}.tf32.f32, "
    ".rn.satfinite{.relu}.{e4m3x2 e5m2x2 e2m1x2}.{f32 f16x2}, "
    ".rn.satfinite{.relu}.{e2m3x2 e3m2x2}.f32, "
    ".rn{.relu}.f16x2.{e4m3x2 e5m2x2 e2m3x2 e3m2x2 e2m1x2}, "
    "{.rz .rp}{.satfinite}.ue8m0x2.{f32 bf16x2}, .rn.bf16x2.ue8m0x2",
)
def cvt(builder: SegmentBuilder, i: PtxInstruction) -> None:
    """Dispatches on the two types."""
    to, source = types_of(i)
    if to in PACKED or source in PACKED:
        convert_packed(builder, i, to, source)
    elif to in INTEGERS and source in INTEGERS:
        _integer_to_integer(builder, i, to, source)
    elif to in INTEGERS:
        _float_to_integer(builder, i, to, source)
    else:
        _to_float(builder, i, to, source)


def clamp(value: Lanes, source_signed: bool, to: str) -> Lanes:
    """An i64 vector limited to the range of an integer type of at most 64 bits."""
    builder = value.builder
    bits = width_of(to)
    top = (1 << (bits - is_signed(to))) - 1
    if not source_signed:
        return builder.call("llvm.umin.v32i64", "i64", value, builder.constant(top, "i64"))
    bottom = -(1 << (bits - 1)) if is_signed(to) else 0
    value = builder.call("llvm.smax.v32i64", "i64", value, builder.constant(bottom, "i64"))
    top = min(top, (1 << 63) - 1)
    return builder.call("llvm.smin.v32i64", "i64", value, builder.constant(top, "i64"))


def _modifiers(i: PtxInstruction, *groups: Iterable[str]) -> list[str]:
    """The modifiers of a cvt by group, its two types left out."""
    to, source = types_of(i)
    return modifiers(i, "cvt", *groups, (to,), (source,))


def _integer_to_integer(builder: SegmentBuilder, i: PtxInstruction, to: str, source: str) -> None:
    fits = (source[0] == to[0] or is_signed(to)) and (
        width_of(to) > width_of(source) or (width_of(to) == width_of(source) and source[0] == to[0])
    )
    sat, _, _ = _modifiers(i, () if fits else ("sat",))
    value = builder.read(i.operands[1], source)
    if sat:
        value = clamp(value.resize(64, is_signed(source)), is_signed(source), to)
    result = value.resize(width_of(to), is_signed(source))
    builder.write(i.operands[0], result, is_signed(to))


def _read(builder: SegmentBuilder, operand: Operand, source: str, ftz: bool) -> Lanes:
    """A floating-point source as double, exactly."""
    form = FORMATS[source]
    bits = builder.read(operand, source)
    value = decode(flush(bits, form) if ftz and form is F32 else bits, form)
    return value if form is F64 else widen(value)


def _float_to_integer(builder: SegmentBuilder, i: PtxInstruction, to: str, source: str) -> None:
    """Out of range values are clamped always. NaN is 0, or the top bit if a type has 64 bits."""
    if source == "bf16" and width_of(to) == 8:
        raise Unsupported(f"cvt.{to}.{source}")
    ftz = ("ftz",) if source == "f32" else ()
    sat = () if source == "bf16" else ("sat",)
    rounding, ftz_found, _, _, _ = _modifiers(i, INTEGRAL, ftz, sat)
    if not rounding:
        raise Unsupported("no integer rounding modifier")
    value = _read(builder, i.operands[1], source, bool(ftz_found))
    integral = builder.call(f"llvm.{INTEGRAL[rounding]}.v32f64", "double", value)
    bits = width_of(to)
    intrinsic = "fptosi" if is_signed(to) else "fptoui"
    result = builder.call(f"llvm.{intrinsic}.sat.v32i{bits}.v32f64", f"i{bits}", integral)
    if source == "f64" or bits == 64:
        top = builder.constant(1 << (bits - 1), f"i{bits}")
        result = is_nan(value).select(top, result)
    builder.write(i.operands[0], result, is_signed(to))


def _float_modifiers(i: PtxInstruction, to: str, source: str) -> tuple[str, bool, bool, bool, bool]:
    """(rounding, ftz, sat, relu, satfinite) of a cvt to a float; only where ptxas accepts them."""
    to_half = source == "f32" and to in ("f16", "bf16")
    inexact = source in INTEGERS or width_of(to) < width_of(source)
    other_half = to != source and "bf16" in (to, source)
    rounding, ftz, sat, relu, finite, _, _ = _modifiers(
        i,
        ROUNDINGS if inexact or other_half else INTEGRAL if to == source else (),
        ("ftz",) if "f32" in (to, source) else (),
        () if "bf16" in (to, source) else ("sat",),
        ("relu",) if to_half else (),
        ("satfinite",) if to_half else (),
    )
    if inexact and not rounding:
        raise Unsupported("no rounding modifier")
    if (relu or finite) and rounding not in ("rn", "rz"):
        raise Unsupported(f"modifier .{rounding} with .relu or .satfinite")
    return rounding, bool(ftz), bool(sat), bool(relu), bool(finite)


def _to_float(builder: SegmentBuilder, i: PtxInstruction, to: str, source: str) -> None:
    """Integer or floating-point source; the result is rounded to an integral value or to `to`."""
    if to == "bf16" and width_of(source) == 8:
        raise Unsupported(f"cvt.{to}.{source}")
    form = FORMATS[to]
    rounding, ftz, sat, relu, finite = _float_modifiers(i, to, source)
    if source in INTEGERS:
        value = _from_integer(builder.read(i.operands[1], source), source, to, rounding)
    else:
        # An H200 does not flush what it converts to f16, though the manual says that .ftz does.
        value = _read(builder, i.operands[1], source, ftz and to != "f16")
    integral = rounding in INTEGRAL
    if integral:
        value = builder.call(f"llvm.{INTEGRAL[rounding]}.v32f64", "double", value)
    value = saturate(value) if sat else value
    value = rectify(value) if relu else value
    if form is F32 and source in ("f32", "bf16") and not (sat or integral or ftz):
        # Such moves and shifts let a NaN's payload pass, on an H200 at least.
        builder.write(i.operands[0], value.convert("fptrunc", "float"))
        return
    if to == source == "f64" and not (sat or integral):
        builder.write(i.operands[0], value.as_integer())
        return
    mode = "rn" if integral or not rounding else rounding
    bits = _round(value, form, mode, finite)
    if ftz and form is F32 and value.type == "double":
        bits = flush_result(bits, value, F32, mode)
    if "f64" in (to, source) and source not in INTEGERS and not sat:
        given = builder.read(i.operands[1], source)
        if ftz and source == "f32":
            given = canonical(given, is_nan(given.as_float()), F32)
        bits = pass_nan(bits, given, FORMATS[source], form)
    builder.write(i.operands[0], bits)


def _from_integer(value: Lanes, source: str, to: str, rounding: str) -> Lanes:
    """An integer vector as float or double: rounded already if that type is `to`, else exact."""
    opcode = "sitofp" if is_signed(source) else "uitofp"
    if rounding == "rn" and to in ("f32", "f64"):
        return value.convert(opcode, "float" if to == "f32" else "double")
    if value.type != "i64":
        return value.convert(opcode, "double")
    if to == "f64":
        raise Unsupported(f".{rounding} from 64-bit integers to f64: only .rn is modelled")
    return _odd_double(value, is_signed(source))


def _odd_double(value: Lanes, signed: bool) -> Lanes:
    """64-bit integers as doubles rounded to odd: the bits that do not fit become a sticky one."""
    builder = value.builder
    negative = value.compare("slt", 0) if signed else builder.constant(0, "i1")
    magnitude = negative.select(-value, value)
    sticky = (magnitude & 0x7FF).compare("ne", 0).convert("zext", "i64")
    upper = ((magnitude >> 11) | sticky).convert("uitofp", "double")
    large = upper * builder.constant(2048.0, "double")
    small = magnitude.compare("ult", EXACT_IN_DOUBLE)
    result = small.select(magnitude.convert("uitofp", "double"), large)
    return negative.select(-result, result)


def _round(value: Lanes, form: FloatFormat, rounding: str, finite: bool) -> Lanes:
    """The bits in `form` of floats or doubles."""
    if form not in (F32, F64):
        return encode(value, form, rounding, finite)
    if form is F32 and value.type == "double":
        zero = value.builder.constant(0.0, "double")
        value = directed_f32(Exact(value, zero), rounding)
    return canonical(value.as_integer(), is_nan(value), form)


@ROWS.lane("cvt.pack", "9.7.9.22", ".sat.{u16 s16}.s32, .sat.{u8 s8 u4 s4 u2 s2}.s32.b32")
def cvt_pack(builder: SegmentBuilder, i: PtxInstruction) -> None:
    """a and b saturated, a above b; the low bits of c fill the register above them."""
    wide, narrow = ("u16", "s16"), ("u8", "s8", "u4", "s4", "u2", "s2")
    sat, to, source, third = modifiers(i, "cvt.pack", ("sat",), wide + narrow, ("s32",), ("b32",))
    if not (sat and to and source) or bool(third) != (to in narrow):
        raise Unsupported("cvt.pack with these types")
    bits = int(to[1:])
    mask = (1 << bits) - 1
    limits = (-(1 << (bits - 1)), mask >> 1) if to.startswith("s") else (0, mask)
    result = builder.read(i.operands[3], "b32") if third else builder.constant(0, "i32")
    for operand in i.operands[1:3]:
        value = builder.read(operand, "s32")
        for name, limit in zip(("smax", "smin"), limits, strict=True):
            bound = builder.constant(limit, "i32")
            value = builder.call(f"llvm.{name}.v32i32", "i32", value, bound)
        result = (result << bits) | (value & mask)
    builder.write(i.operands[0], result)
