"""Comparison and selection against the manual's definitions (PTX ISA 9.7.6 and 9.7.7)."""

from __future__ import annotations

import math
import operator
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.ptx.syntax import FloatBits, Integer, Pair, Register, Sink
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator.isa_rows import Compiled, adversarial, lane_values, masks, signed
from tests.emulator.lane_rig import FULL, instruction

BASIC = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
# Formats: bits of the exponent and of the fraction.
FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
FLUSHING = ("f16", "f32", "f16x2")


def special_floats(kind):
    """Zeros, subnormals, the smallest and largest numbers, infinities, NaNs, both signs."""
    exponent, fraction = FLOATS[kind]
    infinity = ((1 << exponent) - 1) << fraction
    one = ((1 << (exponent - 1)) - 1) << fraction
    near = [0, 1, 1 << fraction, one, infinity]
    positive = {
        *near,
        *(v + 1 for v in near),
        *(v - 1 for v in near if v),
        infinity | 1 << fraction - 1,
    }
    sign = 1 << (exponent + fraction)
    return sorted(v | s for v in positive for s in (0, sign))


def number(bits, kind, flush=False):
    """Bits of a floating-point format -> a Python float, by the definition of the format."""
    exponent_bits, fraction_bits = FLOATS[kind]
    sign = -1.0 if bits >> (exponent_bits + fraction_bits) & 1 else 1.0
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * (0.0 if flush else math.ldexp(fraction, 1 - bias - fraction_bits))
    return sign * math.ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)


def holds(comparison, kind, flush, a, b):
    """Whether a `comparison` b, by the tables of 9.7.6."""
    if kind in FLOATS:
        x, y = number(a, kind, flush), number(b, kind, flush)
        unordered = math.isnan(x) or math.isnan(y)
        if comparison in ("num", "nan"):
            return unordered == (comparison == "nan")
        if comparison in BASIC:
            return not unordered and BASIC[comparison](x, y)
        return unordered or BASIC[comparison[:-1]](x, y)
    if kind[0] == "s":
        a, b = signed(a, width_of(kind)), signed(b, width_of(kind))
    return BASIC[UNSIGNED_NAMES.get(comparison, comparison)](a, b)


def comparisons(kind):
    if kind in FLOATS:
        return [*BASIC, *(f"{name}u" for name in BASIC), "num", "nan"]
    return {"b": ["eq", "ne"], "s": [*BASIC], "u": [*BASIC, *UNSIGNED_NAMES]}[kind[0]]


KINDS = [f"{sign}{w}" for sign in "bus" for w in (16, 32, 64)] + list(FLOATS)
CASES = [(k, c, False) for k in KINDS for c in comparisons(k)] + [
    (k, c, True) for k in ("f16", "f32") for c in comparisons(k)
]


def operand_type(kind):
    return f"b{width_of(kind)}"


@pytest.mark.parametrize("kind, comparison, flush", CASES)
def test_comparisons(kind, comparison, flush):
    """All pairs of special values; both destinations."""
    values = special_floats(kind) if kind in FLOATS else adversarial(width_of(kind))
    pairs = [(x, y) for x in values for y in values]
    pairs += [pairs[-1]] * (-len(pairs) % LANES)
    opcode = f"setp.{comparison}{'.ftz' if flush else ''}.{kind}"
    item = instruction(opcode, Pair(Register("p"), Register("q")), "a", "b")
    program = Compiled(
        [item], {"a": operand_type(kind), "b": operand_type(kind), "p": "pred", "q": "pred"}
    )
    for start in range(0, len(pairs), LANES):
        batch = pairs[start : start + LANES]
        after = program({"a": [a for a, _ in batch], "b": [b for _, b in batch], "p": 0, "q": 0})
        meant = sum(holds(comparison, kind, flush, *pair) << k for k, pair in enumerate(batch))
        assert (after["p"], after["q"]) == (meant, meant ^ FULL)


JOINED = {
    "": lambda t, c: t,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@pytest.mark.parametrize("boolean", JOINED)
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("sinks", [(), ("p",), ("q",)])
@given(a=lane_values(32), b=lane_values(32), c=masks, guard=masks, mask=masks)
@settings(max_examples=5)
def test_boolean_operators(boolean, negated, sinks, a, b, c, guard, mask):
    """p = t op c and q = !t op c; here q is also the source c, and either may be the sink."""
    first = Sink() if "p" in sinks else Register("p")
    second = Sink() if "q" in sinks else Register("q")
    third = [Register("q", negated)] if boolean else []
    opcode = ".".join(filter(None, ("setp.lt", boolean, "s32")))
    item = instruction(opcode, Pair(first, second), "a", "b", *third, guard=Register("g"))
    registers = {"a": "b32", "b": "b32"} | dict.fromkeys("pqg", "pred")
    after = Compiled([item], registers)({"a": a, "b": b, "p": 0, "q": c, "g": guard}, mask)
    for lane in range(LANES):
        runs = bool(mask & guard & 1 << lane)
        t = signed(a[lane], 32) < signed(b[lane], 32)
        before = bool(c >> lane & 1)
        joined = [JOINED[boolean](v, before != negated) for v in (t, not t)]
        assert after["p"] >> lane & 1 == (joined[0] if runs and "p" not in sinks else 0)
        assert after["q"] >> lane & 1 == (joined[1] if runs and "q" not in sinks else before)


def halves(values):
    return [v & 0xFFFF for v in values], [v >> 16 for v in values]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("comparison, boolean", [("lt", ""), ("geu", "and"), ("nan", "xor")])
@pytest.mark.parametrize("flush", [False, True])
@given(data=st.data())
@settings(max_examples=5)
def test_packed_halves(kind, comparison, boolean, flush, data):
    """setp gives one predicate a half; set gives 1.0 or all ones a half."""
    if flush and kind == "bf16":
        return
    packed = st.sampled_from(special_floats(kind))
    pairs = st.lists(st.builds(lambda x, y: x | y << 16, packed, packed), min_size=32, max_size=32)
    a, b, c = data.draw(pairs), data.draw(pairs), data.draw(masks)
    middle = ".".join(filter(None, (comparison, boolean, "ftz" if flush else "")))
    third = ["c"] if boolean else []
    program = Compiled(
        [
            instruction(
                f"setp.{middle}.{kind}x2", Pair(Register("p"), Register("q")), "a", "b", *third
            ),
            instruction(f"set.{middle}.{kind}x2.{kind}x2", "ones", "a", "b", *third),
            instruction(f"set.{middle}.u32.{kind}x2", "full", "a", "b", *third),
        ],
        dict.fromkeys(["a", "b", "ones", "full"], "b32") | dict.fromkeys("pqc", "pred"),
    )
    after = program({"a": a, "b": b, "c": c})
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    for lane in range(LANES):
        results = [
            JOINED[boolean](holds(comparison, kind, flush, x[lane], y[lane]), bool(c >> lane & 1))
            for x, y in zip(halves(a), halves(b), strict=True)
        ]
        assert [after["p"] >> lane & 1, after["q"] >> lane & 1] == results
        assert after["ones"][lane] == one * results[0] | one * results[1] << 16
        assert after["full"][lane] == 0xFFFF * results[0] | 0xFFFF * results[1] << 16


SET = [
    (target, source)
    for source in ("b32", "u16", "s64", "f32", "f64")
    for target in ("u32", "s32", "f32", "f16", "bf16")
] + [(t, s) for s in ("f16", "bf16") for t in ("u16", "s16", "u32", "s32", s)]
ONE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


@pytest.mark.parametrize("target, source", SET)
def test_set(target, source):
    values = special_floats(source) if source in FLOATS else adversarial(width_of(source))
    a = [values[k % len(values)] for k in range(LANES)]
    b = [values[(k * 7 + k // 3) % len(values)] for k in range(LANES)]
    comparison = "ne" if source[0] == "b" and source != "bf16" else "le"
    program = Compiled(
        [instruction(f"set.{comparison}.or.{target}.{source}", "d", "a", "b", Register("c", True))],
        {"d": operand_type(target), "c": "pred"} | dict.fromkeys("ab", operand_type(source)),
    )
    c = 0xFF00FF0F
    after = program({"a": a, "b": b, "c": c})
    true = ONE.get(target, (1 << width_of(target)) - 1)
    for lane in range(LANES):
        meant = holds(comparison, source, False, a[lane], b[lane]) or not c >> lane & 1
        assert after["d"][lane] == (true if meant else 0)


SELECTED = [f"{sign}{w}" for sign in "bus" for w in (16, 32, 64)] + ["f32", "f64"]


@pytest.mark.parametrize("kind", SELECTED)
@given(data=st.data())
@settings(max_examples=4)
def test_selp_and_slct(kind, data):
    """Bits pass unchanged (NaN payloads too). slct tests c >= 0: NaN no, -0 yes."""
    w = width_of(kind)
    a, b, c = data.draw(lane_values(w)), data.draw(lane_values(w)), data.draw(masks)
    integers = data.draw(lane_values(32))
    specials = st.sampled_from(special_floats("f32"))
    floats = data.draw(st.lists(specials, min_size=LANES, max_size=LANES))
    guard, mask = data.draw(masks), data.draw(masks)
    program = Compiled(
        [
            instruction(f"selp.{kind}", "p", "a", "b", Register("c", True), guard=Register("g")),
            instruction(f"slct.{kind}.s32", "i", "a", "b", "n"),
            instruction(f"slct.{kind}.f32", "f", "a", "b", "x"),
            instruction(f"slct.ftz.{kind}.f32", "z", "a", "b", "x"),
            instruction(f"selp.{kind}", "a", "a", "b", Register("c")),
        ],
        dict.fromkeys("abpifz", f"b{w}") | dict.fromkeys("nx", "b32") | dict.fromkeys("cg", "pred"),
    )
    inputs = {"a": a, "b": b, "c": c, "n": integers, "x": floats, "g": guard, "p": [3] * LANES}
    after = program(inputs | {name: [0] * LANES for name in "ifz"}, mask)
    for lane in range(LANES):
        runs = mask >> lane & 1
        takes = c >> lane & 1
        not_taken = b[lane] if takes else a[lane]
        assert after["p"][lane] == (not_taken if runs & guard >> lane else 3)
        assert after["a"][lane] == (b[lane] if runs and not takes else a[lane])
        meant = {
            "i": signed(integers[lane], 32) >= 0,
            "f": number(floats[lane], "f32") >= 0,
            "z": number(floats[lane], "f32", flush=True) >= 0,
        }
        for name, first in meant.items():
            assert after[name][lane] == ((a if first else b)[lane] if runs else 0), name


def test_float_constants():
    """0f..., decimal and integer literals as sources."""
    half = struct.unpack("<Q", struct.pack("<d", 0.5))[0]
    program = Compiled(
        [
            instruction("setp.gt.f32", "p", "a", FloatBits(0x3F000000, 32)),
            instruction("setp.gt.f32", "q", "a", FloatBits(half, 64)),
            instruction("setp.gt.s32", "r", "n", Integer(-1)),
        ],
        {"a": "f32", "n": "s32", "p": "pred", "q": "pred", "r": "pred"},
    )
    ones = [0x3F800000 if k % 3 else 0x3E800000 for k in range(LANES)]
    after = program({"a": ones, "n": [k - 16 & 0xFFFFFFFF for k in range(LANES)]})
    meant = sum(1 << k for k in range(LANES) if k % 3)
    assert (after["p"], after["q"], after["r"]) == (meant, meant, 0xFFFF0000)


REFUSED = [
    "setp.lt.b32",
    "setp.lo.s32",
    "setp.lo.f32",
    "setp.equ.s32",
    "setp.lt.ftz.f64",
    "setp.lt.ftz.bf16",
    "setp.lt.ftz.s32",
    "setp.lt.nand.s32",
    "setp.eq.u8",
    "set.lt.u16.u32",
    "set.lt.f32.f16",
    "set.lt.bf16x2.f16x2",
    "set.lt.f64.u32",
    "slct.ftz.f32.s32",
    "selp.pred",
]


@pytest.mark.parametrize("opcode", REFUSED)
def test_unknown_forms_are_refused(opcode):
    """The forms that the PTX assembler refuses too."""
    target = "p" if opcode.startswith("setp") else "d"
    registers = {"d": "b64", "a": "b64", "p": "pred"}
    with pytest.raises(Unsupported):
        Compiled([instruction(opcode, target, "a", "a", "p")], registers)
