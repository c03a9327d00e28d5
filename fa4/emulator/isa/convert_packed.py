"""cvt to and from packed and narrow formats (PTX ISA 9.7.9.21): f16x2, tf32, fp8, fp6, fp4, ue8m0.

Two sources a, b are packed with a in the upper part. The 6-bit formats take 8 bits each, with zeros
on top; the 4-bit format takes 4.
"""

from __future__ import annotations

from fa4.emulator.isa.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    TF32,
    FloatFormat,
    canonical,
    decode,
    is_nan,
    join,
    rectify,
    split,
    widen,
)
from fa4.emulator.isa.rounding import encode
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import Unsupported, modifiers

# packed type -> format, bits that an element takes
NARROW: dict[str, tuple[FloatFormat, int]] = {
    "e4m3x2": (E4M3, 8),
    "e5m2x2": (E5M2, 8),
    "e2m3x2": (E2M3, 8),
    "e3m2x2": (E3M2, 8),
    "e2m1x2": (E2M1, 4),
}
FROM_HALVES = (("e4m3x2", "f16x2"), ("e5m2x2", "f16x2"), ("e2m1x2", "f16x2"))
HALF_PAIRS: dict[str, FloatFormat] = {"f16x2": F16, "bf16x2": BF16}
QUADRUPLES = ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4")
PACKED = (*NARROW, *HALF_PAIRS, *QUADRUPLES, "tf32", "ue8m0x2")
# Random bits for each element under .rs: as many as the conversion from f32 drops.
RANDOM_BITS = {"f16x2": 13, "bf16x2": 16}
UE8M0_NAN = 0xFF


def convert_packed(builder: SegmentBuilder, i: PtxInstruction, to: str, source: str) -> None:
    """A cvt of which a type is in PACKED. Raises Unsupported for pairs that have no conversion."""
    if to in QUADRUPLES:
        raise Unsupported(f".{to}: the manual leaves open which bits the random ones meet")
    pair = (to, source)
    if source == "f32" and to in HALF_PAIRS:
        _floats_to_halves(builder, i, to)
    elif pair == ("tf32", "f32"):
        _float_to_tf32(builder, i)
    elif pair in FROM_HALVES or (source == "f32" and to in NARROW):
        _to_narrow(builder, i, to, source)
    elif to == "f16x2" and source in NARROW:
        _from_narrow(builder, i, source)
    elif to == "ue8m0x2" and source in ("f32", "bf16x2"):
        _to_scale(builder, i, source)
    elif pair == ("bf16x2", "ue8m0x2"):
        _from_scale(builder, i)
    else:
        raise Unsupported(f"cvt.{to}.{source}")


def nearest_bf16(value: Lanes) -> Lanes:
    """Floats as bfloat16 bits, rounded to nearest even: the hot path of a softmax."""
    bits = value.as_integer()
    upper = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return canonical(upper.resize(16), is_nan(value), BF16)


def nearest_f16(value: Lanes) -> Lanes:
    """Floats as half bits, rounded to nearest even by the CPU."""
    return canonical(value.convert("fptrunc", "half").as_integer(), is_nan(value), F16)


def _floats_to_halves(builder: SegmentBuilder, i: PtxInstruction, to: str) -> None:
    rounding, relu, finite, _, _ = modifiers(
        i, "cvt", ("rn", "rz", "rs"), ("relu",), ("satfinite",), (to,), ("f32",)
    )
    if not rounding:
        raise Unsupported("no rounding modifier")
    form = HALF_PAIRS[to]
    random: list[tuple[Lanes, int] | None] = [None, None]
    if rounding == "rs":
        bits = RANDOM_BITS[to]
        halves = split(builder.read(i.operands[3], "b32"), 2)
        random = [((half & ((1 << bits) - 1)).resize(64), bits) for half in halves]
    # The last source is the lower half.
    values = [builder.read_float(operand, "f32") for operand in i.operands[2:0:-1]]
    values = [rectify(value) if relu else value for value in values]
    if rounding == "rn" and not finite:
        nearest = nearest_f16 if form is F16 else nearest_bf16
        pair = builder.subroutine(
            f"cvt.rn.{to}", lambda a, b: join([nearest(a), nearest(b)]), *values
        )
    else:
        pair = join(
            [
                encode(widen(value), form, rounding, bool(finite), chance)
                for value, chance in zip(values, random, strict=True)
            ]
        )
    builder.write(i.operands[0], pair)


def _float_to_tf32(builder: SegmentBuilder, i: PtxInstruction) -> None:
    """tf32 is an f32 whose 13 low bits are zero."""
    rounding, relu, finite, _, _ = modifiers(
        i, "cvt", ("rn", "rz", "rna"), ("relu",), ("satfinite",), ("tf32",), ("f32",)
    )
    if not rounding or (rounding == "rna" and relu):
        raise Unsupported(f".tf32 with rounding {rounding or 'missing'} and .relu")
    value = builder.read_float(i.operands[1], "f32")
    value = rectify(value) if relu else value
    code = encode(widen(value), TF32, rounding, bool(finite)).resize(32)
    bits = code << (F32.mantissa_bits - TF32.mantissa_bits)
    if rounding == "rna":
        # As on an H200, which only cuts a NaN: one whose payload is cut away becomes infinite, or
        # with .satfinite, which takes one step off, the largest number.
        cut = value.as_integer() & 0xFFFFE000
        bits = is_nan(value).select(cut - 0x2000 if finite else cut, bits)
    builder.write(i.operands[0], bits)


def _to_narrow(builder: SegmentBuilder, i: PtxInstruction, to: str, source: str) -> None:
    form, bits = NARROW[to]
    rounding, finite, relu, _, _ = modifiers(
        i, "cvt", ("rn",), ("satfinite",), ("relu",), (to,), (source,)
    )
    if not (rounding and finite):
        raise Unsupported(f".{to} without .rn.satfinite")
    if source == "f32":
        values = [builder.read_float(operand, "f32") for operand in i.operands[2:0:-1]]
    else:
        values = [decode(half, F16) for half in split(builder.read(i.operands[1], source), 2)]
    values = [rectify(value) if relu else value for value in values]
    codes = [encode(widen(value), form, finite=True).resize(bits) for value in values]
    builder.write(i.operands[0], join(codes))


def _from_narrow(builder: SegmentBuilder, i: PtxInstruction, source: str) -> None:
    form, bits = NARROW[source]
    rounding, relu, _, _ = modifiers(i, "cvt", ("rn",), ("relu",), ("f16x2",), (source,))
    if not rounding:
        raise Unsupported("no rounding modifier")
    results = []
    for code in split(builder.read(i.operands[1], f"b{2 * bits}"), 2):
        value = decode(code.resize(8) & (2 * form.sign - 1), form)
        results.append(nearest_f16(rectify(value) if relu else value))
    builder.write(i.operands[0], join(results))


def _to_scale(builder: SegmentBuilder, i: PtxInstruction, source: str) -> None:
    """ue8m0 is the exponent of a power of two: the magnitude's, rounded down or up."""
    rounding, finite, _, _ = modifiers(
        i, "cvt", ("rz", "rp"), ("satfinite",), ("ue8m0x2",), (source,)
    )
    if not rounding:
        raise Unsupported("no rounding modifier")
    if source == "f32":
        words = [builder.read(operand, "f32") for operand in i.operands[2:0:-1]]
    else:
        halves = split(builder.read(i.operands[1], source), 2)
        words = [decode(half, BF16).as_integer() for half in halves]
    results = []
    for word in words:
        magnitude = word & 0x7FFFFFFF
        code = magnitude >> F32.mantissa_bits
        if rounding == "rp":
            # 2^-127 and below have code 0; infinity and NaN keep the code of NaN.
            more = (magnitude & 0x7FFFFF).compare("ne", 0) & magnitude.compare("ugt", 0x400000)
            more = more & magnitude.compare("ult", F32.infinity_bits)
            code = code + more.convert("zext", "i32")
        if finite:
            over = code.compare("eq", UE8M0_NAN) & magnitude.compare("ule", F32.infinity_bits)
            code = over.select(builder.constant(UE8M0_NAN - 1, "i32"), code)
        results.append(code.resize(8))
    builder.write(i.operands[0], join(results))


def _from_scale(builder: SegmentBuilder, i: PtxInstruction) -> None:
    rounding, _, _ = modifiers(i, "cvt", ("rn",), ("bf16x2",), ("ue8m0x2",))
    if not rounding:
        raise Unsupported("no rounding modifier")
    results = []
    for code in split(builder.read(i.operands[1], "b16"), 2):
        word = code.resize(16)
        # 2^-127 is a subnormal bfloat16.
        bits = word.compare("eq", 0).select(builder.constant(0x40, "i16"), word << 7)
        results.append(canonical(bits, word.compare("eq", UE8M0_NAN), BF16))
    builder.write(i.operands[0], join(results))
