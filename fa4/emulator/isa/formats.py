"""Floating-point formats, and the simple functions on 32 encoded numbers: decode, flush, clamp."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.emulator.translate.lanes import Lanes


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: a sign, exponent_bits, mantissa_bits.

    nan: the bits of its canonical NaN, or None. infinity: whether the all-ones exponent
    is set aside for infinity and NaN, as IEEE 754 does.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    nan: int | None
    infinity: bool = True

    @property
    def width(self) -> int:
        """Bits of an encoded value, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        """The sign bit as a mask."""
        return 1 << (self.width - 1)

    @property
    def bias(self) -> int:
        """What is added to the exponent of a normal number."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_normal(self) -> int:
        """Bits of the smallest positive normal number."""
        return 1 << self.mantissa_bits

    @property
    def infinity_bits(self) -> int:
        """Bits of +infinity, in a format that has it."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def largest(self) -> int:
        """Bits of the largest finite number."""
        if self.infinity:
            return self.infinity_bits - 1
        return self.sign - 1 if self.nan is None else self.nan - 1


# The manual names the NaN that f32 and 16-bit operations give; f64's is what an H200 gives for an
# invalid operation (a NaN among the sources passes on: see `pass_nan`).
F64 = FloatFormat("f64", 11, 52, 0xFFF8 << 48)
F32 = FloatFormat("f32", 8, 23, 0x7FFFFFFF)
F16 = FloatFormat("f16", 5, 10, 0x7FFF)
BF16 = FloatFormat("bf16", 8, 7, 0x7FFF)
TF32 = FloatFormat("tf32", 8, 10, 0x3FFFF)
E5M2 = FloatFormat("e5m2", 5, 2, 0x7F)
E4M3 = FloatFormat("e4m3", 4, 3, 0x7F, infinity=False)
E3M2 = FloatFormat("e3m2", 3, 2, None, infinity=False)
E2M3 = FloatFormat("e2m3", 2, 3, None, infinity=False)
E2M1 = FloatFormat("e2m1", 2, 1, None, infinity=False)


def is_nan(value: Lanes) -> Lanes:
    """i1: where a float vector is NaN."""
    return value.compare("uno", value)


def split(value: Lanes, count: int) -> list[Lanes]:
    """The `count` equal parts of an integer vector's elements, lowest bits first."""
    bits = int(value.type[1:]) // count
    return [(value >> bits * k if k else value).resize(bits) for k in range(count)]


def join(parts: list[Lanes]) -> Lanes:
    """The inverse of `split`."""
    bits = int(parts[0].type[1:])
    word = parts[0].resize(bits * len(parts))
    for k, part in enumerate(parts[1:], 1):
        word = word | part.resize(bits * len(parts)) << bits * k
    return word


def decode(bits: Lanes, form: FloatFormat) -> Lanes:
    """The value of encoded numbers of at most 32 bits as float, exactly; double for f64."""
    if form in (F32, F64):
        return bits.as_float()
    word = bits.resize(32)
    if form is BF16:
        return (word << 16).as_float()
    magnitude = word & (form.sign - 1)
    # The mantissa at float's place, the exponent as if biased by 127: one factor corrects it, and
    # turns subnormals into normal numbers.
    place = magnitude << (23 - form.mantissa_bits)
    builder = bits.builder
    scaled = (place.as_float() * builder.constant(2.0 ** (127 - form.bias), "float")).as_integer()
    if form.infinity:
        top = magnitude.compare("uge", form.infinity_bits)
        scaled = top.select(place | F32.infinity_bits, scaled)
    elif form.nan is not None:
        top = magnitude.compare("eq", form.nan)
        scaled = top.select(builder.constant(0x7FFFFFFF, "i32"), scaled)
    return (scaled | (word & form.sign) << (32 - form.width)).as_float()


def widen(value: Lanes) -> Lanes:
    """float to double."""
    return value.convert("fpext", "double")


def flush(bits: Lanes, form: FloatFormat) -> Lanes:
    """Subnormal numbers become zeros of the same sign (.ftz)."""
    tiny = (bits & form.infinity_bits).compare("eq", 0)
    return tiny.select(bits & form.sign, bits)


def canonical(bits: Lanes, nan: Lanes, form: FloatFormat) -> Lanes:
    """The bits, with the format's canonical NaN where the i1 `nan` is true."""
    if form.nan is None:
        raise ValueError(f"{form.name} has no NaN")
    return nan.select(bits.builder.constant(form.nan, bits.type), bits)


def pass_nan(bits: Lanes, source: Lanes, form: FloatFormat, to: FloatFormat) -> Lanes:
    """The bits in `to`, but a NaN in `source` keeps its sign and the top of its payload, quiet.

    What f64 operations and conversions from and to f64 do, as measured on an H200.
    """
    word = source.resize(64)
    nan = (word & (form.sign - 1)).compare("ugt", form.infinity_bits)
    payload = word & (form.smallest_normal - 1)
    shift = to.mantissa_bits - form.mantissa_bits
    payload = payload << shift if shift > 0 else payload >> -shift
    sign = (word >> (form.width - 1)) << (to.width - 1)
    quiet = sign | payload | to.infinity_bits | to.smallest_normal >> 1
    return nan.select(quiet.resize(to.width), bits)


def saturate(value: Lanes) -> Lanes:
    """A float vector clamped to [+0, 1], NaN to +0 (.sat)."""
    zero = value.builder.constant(0.0, value.type)
    one = value.builder.constant(1.0, value.type)
    lower = value.compare("ogt", zero).select(value, zero)
    return lower.compare("olt", one).select(lower, one)


def rectify(value: Lanes) -> Lanes:
    """A float vector with +0 for negative numbers and -0; NaN stays (.relu)."""
    zero = value.builder.constant(0.0, value.type)
    return value.compare("ole", zero).select(zero, value)
