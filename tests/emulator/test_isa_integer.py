"""Integer instructions against the manual's definitions (PTX ISA 9.7.1 and 9.7.2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.ptx.syntax import Integer
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.table import Unsupported, find
from fa4.emulator.warp_lanes import LANES
from tests.emulator.isa_rows import (
    Compiled,
    Row,
    check_corners,
    check_row,
    lane_values,
    row_inputs,
    signed,
)
from tests.emulator.lane_rig import instruction, run

TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")


def reader(kind):
    """Bits -> the integer they stand for."""
    width = width_of(kind)
    return (lambda v: signed(v, width)) if kind[0] == "s" else (lambda v: v)


def truncated_division(a, b):
    sign = -1 if (a < 0) != (b < 0) else 1
    return sign * (abs(a) // abs(b))


def saturated(value):
    return max(-(2**31), min(2**31 - 1, value))


def arithmetic_rows(kind):
    """The instructions that every integer type has."""
    w, of = width_of(kind), reader(kind)

    def divide(a, b):
        return truncated_division(of(a), of(b)) if b else -1

    def modulo(a, b):
        return of(a) - of(b) * truncated_division(of(a), of(b)) if b else -1

    two = (kind, kind)
    three = (kind, kind, kind)
    yield Row(f"add.{kind}", kind, two, lambda a, b: a + b)
    yield Row(f"sub.{kind}", kind, two, lambda a, b: a - b)
    yield Row(f"mul.lo.{kind}", kind, two, lambda a, b: a * b)
    yield Row(f"mul.hi.{kind}", kind, two, lambda a, b: of(a) * of(b) >> w)
    yield Row(f"mad.lo.{kind}", kind, three, lambda a, b, c: a * b + c)
    yield Row(f"mad.hi.{kind}", kind, three, lambda a, b, c: (of(a) * of(b) >> w) + c)
    yield Row(f"sad.{kind}", kind, three, lambda a, b, c: c + abs(of(a) - of(b)))
    yield Row(f"div.{kind}", kind, two, divide)
    yield Row(f"rem.{kind}", kind, two, modulo)
    yield Row(f"min.{kind}", kind, two, lambda a, b: min(of(a), of(b)))
    yield Row(f"max.{kind}", kind, two, lambda a, b: max(of(a), of(b)))
    if w < 64:
        wide = f"{kind[0]}{2 * w}"
        yield Row(f"mul.wide.{kind}", wide, two, lambda a, b: of(a) * of(b))
        yield Row(f"mad.wide.{kind}", wide, (*two, wide), lambda a, b, c: of(a) * of(b) + c)
    if kind[0] == "s":
        yield Row(f"abs.{kind}", kind, (kind,), lambda a: abs(of(a)))
        yield Row(f"neg.{kind}", kind, (kind,), lambda a: -a)


def rows_of_24_bits(kind):
    def product(a, b):
        low = [v % 2**24 for v in (a, b)]
        factors = [signed(v, 24) for v in low] if kind == "s32" else low
        return factors[0] * factors[1]

    two, three = (kind,) * 2, (kind,) * 3
    yield Row(f"mul24.lo.{kind}", kind, two, product)
    yield Row(f"mul24.hi.{kind}", kind, two, lambda a, b: product(a, b) >> 16)
    yield Row(f"mad24.lo.{kind}", kind, three, lambda a, b, c: product(a, b) + c)
    yield Row(f"mad24.hi.{kind}", kind, three, lambda a, b, c: (product(a, b) >> 16) + c)
    if kind == "s32":
        yield Row(
            "mad24.hi.sat.s32",
            kind,
            three,
            lambda a, b, c: saturated(signed((product(a, b) >> 16) % 2**32, 32) + signed(c, 32)),
        )


def s32(v):
    return signed(v, 32)


SATURATING = [
    Row("add.sat.s32", "s32", ("s32",) * 2, lambda a, b: saturated(s32(a) + s32(b))),
    Row("sub.sat.s32", "s32", ("s32",) * 2, lambda a, b: saturated(s32(a) - s32(b))),
    Row(
        "mad.hi.sat.s32",
        "s32",
        ("s32",) * 3,
        lambda a, b, c: saturated((s32(a) * s32(b) >> 32) + s32(c)),
    ),
    Row("min.relu.s32", "s32", ("s32",) * 2, lambda a, b: max(0, min(s32(a), s32(b)))),
    Row("max.relu.s32", "s32", ("s32",) * 2, lambda a, b: max(0, s32(a), s32(b))),
]


def packed(opcode, kind, meaning):
    """A row whose definition holds for both halves apart."""

    def both(a, b):
        halves = [
            meaning(signed(x, 16), signed(y, 16)) if kind == "s16x2" else meaning(x, y)
            for x, y in ((a & 0xFFFF, b & 0xFFFF), (a >> 16, b >> 16))
        ]
        return halves[0] % 2**16 | (halves[1] % 2**16) << 16

    return Row(f"{opcode}.{kind}", "b32", ("b32", "b32"), both)


PACKED = [
    packed(opcode, kind, meaning)
    for kind in ("u16x2", "s16x2")
    for opcode, meaning in (("add", lambda a, b: a + b), ("min", min), ("max", max))
] + [
    packed("min.relu", "s16x2", lambda a, b: max(0, min(a, b))),
    packed("max.relu", "s16x2", lambda a, b: max(0, a, b)),
]


def bfind(kind, from_top):
    w = width_of(kind)

    def meaning(a):
        if kind[0] == "s" and a >> (w - 1):
            a = ~a % 2**w
        for position in range(w - 1, -1, -1):
            if a >> position & 1:
                return w - 1 - position if from_top else position
        return 0xFFFFFFFF

    return meaning


def fns(mask, base, offset):
    """The manual's loop, word for word."""
    offset = signed(offset, 32)
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    position, count = base, abs(offset) - 1
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += 1 if offset > 0 else -1
    return 0xFFFFFFFF


def bfe(kind):
    w = width_of(kind)

    def meaning(a, b, c):
        position, length = b & 255, c & 255
        sign = 0
        if kind[0] == "s" and length:
            sign = a >> min(position + length - 1, w - 1) & 1
        inside = [i < length and position + i < w for i in range(w)]
        return sum((a >> (position + i) & 1 if inside[i] else sign) << i for i in range(w))

    return meaning


def bfi(w):
    def meaning(a, b, c, d):
        position, length = c & 255, d & 255
        for i in range(min(length, max(0, w - position))):
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
        return b

    return meaning


def szext(mode, kind):
    def meaning(a, b):
        if mode == "clamp" and b >= 32:
            return a
        count = b % 32
        low = a % 2**count
        return signed(low, count) if kind == "s32" and count else low

    return meaning


def bmsk(mode):
    def meaning(a, b):
        if mode == "wrap":
            a, b = a % 32, b % 32
        return sum(1 << k for k in range(a, min(32, a + b)))

    return meaning


def dot(parts, first_byte, a_type, b_type):
    def meaning(a, b, c):
        size = 32 // parts
        for k in range(parts):
            x = a >> (size * k) & (2**size - 1)
            y = b >> (8 * (first_byte + k)) & 255
            x = signed(x, size) if a_type == "s32" else x
            y = signed(y, 8) if b_type == "s32" else y
            c += x * y
        return c

    return meaning


def bit_rows():
    for w in (32, 64):
        b = f"b{w}"
        yield Row(f"popc.{b}", "u32", (b,), lambda a: bin(a).count("1"))
        yield Row(f"clz.{b}", "u32", (b,), lambda a, w=w: w - a.bit_length())
        yield Row(f"brev.{b}", b, (b,), lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2))
        yield Row(f"bfi.{b}", b, (b, b, "u32", "u32"), bfi(w))
        for sign in "us":
            kind = f"{sign}{w}"
            yield Row(f"bfind.{kind}", "u32", (kind,), bfind(kind, False))
            yield Row(f"bfind.shiftamt.{kind}", "u32", (kind,), bfind(kind, True))
            yield Row(f"bfe.{kind}", kind, (kind, "u32", "u32"), bfe(kind))
    for mode in ("clamp", "wrap"):
        yield Row(f"bmsk.{mode}.b32", "b32", ("u32", "u32"), bmsk(mode))
        for kind in ("u32", "s32"):
            yield Row(f"szext.{mode}.{kind}", kind, (kind, "u32"), szext(mode, kind))
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            types = (a, b, "u32")
            yield Row(f"dp4a.{a}.{b}", "u32", types, dot(4, 0, a, b))
            yield Row(f"dp2a.lo.{a}.{b}", "u32", types, dot(2, 0, a, b))
            yield Row(f"dp2a.hi.{a}.{b}", "u32", types, dot(2, 2, a, b))


ROWS = [
    *(row for kind in TYPES for row in arithmetic_rows(kind)),
    *(row for kind in ("u32", "s32") for row in rows_of_24_bits(kind)),
    *SATURATING,
    *PACKED,
    *bit_rows(),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_corner_values(row):
    check_corners(row)


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@settings(max_examples=4)
def test_any_values_under_guard_and_mask(row, data):
    check_row(row, *data.draw(row_inputs(row)))


@pytest.mark.parametrize("step", [1, -1])
def test_fns(step):
    """Offset and base over their useful ranges; a base above 31 is undefined."""
    masks = [0, 1, 0x80000000, 0xAAAAAAAA, 0xFFFFFFFF, 0x00F0F00F, 0x12345678, 0x7FFFFFFE]
    registers = {"d": "b32", "m": "b32", "base": "u32", "n": "s32"}
    program = Compiled([instruction("fns.b32", "d", "m", "base", "n")], registers)
    for mask in masks:
        for count in [*range(0, 34, 3), 2**31 - 1, 2**31]:
            offset = step * count % 2**32
            bases = list(range(LANES))
            after = program({"m": [mask] * LANES, "base": bases, "n": [offset] * LANES})
            assert after["d"] == [fns(mask, base, offset) for base in bases], (mask, offset)


def test_manual_examples_of_fns():
    for base, offset, found in ((3, 1, 3), (3, -1, 3), (2, 1, 3), (2, -1, 1)):
        assert fns(0xAAAAAAAA, base, offset % 2**32) == found


# opcode stem, whether it reads the flag, and the exact value whose overflow or borrow it records
CHAINS = [
    ("add.cc", False, 2, lambda of, w, a, b, f: a + b),
    ("addc", True, 2, lambda of, w, a, b, f: a + b + f),
    ("addc.cc", True, 2, lambda of, w, a, b, f: a + b + f),
    ("sub.cc", False, 2, lambda of, w, a, b, f: a - b),
    ("subc", True, 2, lambda of, w, a, b, f: a - b - f),
    ("subc.cc", True, 2, lambda of, w, a, b, f: a - b - f),
    ("mad.lo.cc", False, 3, lambda of, w, a, b, c, f: a * b % 2**w + c),
    ("mad.hi.cc", False, 3, lambda of, w, a, b, c, f: (of(a) * of(b) >> w) % 2**w + c),
    ("madc.lo", True, 3, lambda of, w, a, b, c, f: a * b % 2**w + c + f),
    ("madc.lo.cc", True, 3, lambda of, w, a, b, c, f: a * b % 2**w + c + f),
    ("madc.hi", True, 3, lambda of, w, a, b, c, f: (of(a) * of(b) >> w) % 2**w + c + f),
    ("madc.hi.cc", True, 3, lambda of, w, a, b, c, f: (of(a) * of(b) >> w) % 2**w + c + f),
]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("stem, reads, count, exact", CHAINS, ids=[c[0] for c in CHAINS])
@given(data=st.data())
@settings(max_examples=4)
def test_carry_flag(kind, stem, reads, count, exact, data):
    """Result and flag of one instruction of a chain, for both states of the flag before."""
    w, of = width_of(kind), reader(kind)
    names = ["a", "b", "c"][:count]
    program = Compiled(
        [instruction(f"{stem}.{kind}", "d", *names)],
        dict.fromkeys([*names, "d"], kind) | {"%cc": "pred"},
    )
    values = [data.draw(lane_values(w)) for _ in names]
    flags = data.draw(st.integers(0, 2**32 - 1))
    after = program(dict(zip(names, values, strict=True)) | {"%cc": flags})
    for lane in range(LANES):
        before = flags >> lane & 1
        value = exact(of, w, *(v[lane] for v in values), before)
        flag = int(not 0 <= value < 2**w) if stem.endswith(".cc") else before
        assert after["d"][lane] == value % 2**w
        assert after["%cc"] >> lane & 1 == flag


@given(a=lane_values(64), b=lane_values(64))
@settings(max_examples=10)
def test_multiword_product(a, b):
    """The manual's example of a carry chain: 64 by 64 bits in 32-bit pieces (9.7.2.6)."""
    zero = Integer(0)
    program = Compiled(
        [
            instruction("mul.lo.u32", "r0", "a0", "b0"),
            instruction("mul.hi.u32", "r1", "a0", "b0"),
            instruction("mad.lo.cc.u32", "r1", "a1", "b0", "r1"),
            instruction("madc.hi.u32", "r2", "a1", "b0", zero),
            instruction("mad.lo.cc.u32", "r1", "a0", "b1", "r1"),
            instruction("madc.hi.cc.u32", "r2", "a0", "b1", "r2"),
            instruction("addc.u32", "r3", zero, zero),
            instruction("mad.lo.cc.u32", "r2", "a1", "b1", "r2"),
            instruction("madc.hi.u32", "r3", "a1", "b1", "r3"),
        ],
        dict.fromkeys(["a0", "a1", "b0", "b1", "r0", "r1", "r2", "r3"], "u32") | {"%cc": "pred"},
    )
    words = {"a0": a, "a1": a, "b0": b, "b1": b}
    after = program(
        {n: [v >> (32 * int(n[1])) & 0xFFFFFFFF for v in vs] for n, vs in words.items()}
    )
    for lane in range(LANES):
        product = sum(after[f"r{k}"][lane] << (32 * k) for k in range(4))
        assert product == a[lane] * b[lane]


@pytest.mark.parametrize("opcode", ["div", "rem"])
@pytest.mark.parametrize("kind", TYPES)
def test_division_never_traps(opcode, kind):
    """Not in executing lanes and not in the others, whatever they hold."""
    lowest = 1 << (width_of(kind) - 1)
    divisors = [0, 2 * lowest - 1] * 16
    for mask in (0, 0xFFFFFFFF):
        after = run(
            [instruction(f"{opcode}.{kind}", "d", "a", "b")],
            dict.fromkeys("dab", kind),
            {"a": [lowest] * LANES, "b": divisors, "d": [7] * LANES},
            mask,
        )
        assert mask or set(after["d"].tolist()) == {7}


REFUSED = [
    "add.sat.u32",
    "add.u8",
    "sub.u16x2",
    "max.relu.u16x2",
    "mul.wide.u64",
    "abs.u32",
    "mul.u32",
]


@pytest.mark.parametrize("opcode", [*REFUSED, "add.sat.sat.s32", "mad.lo.sat.s32", "bfe.rn.u32"])
def test_unknown_forms_are_refused(opcode):
    registers = dict.fromkeys("dabc", "b32")
    with pytest.raises(Unsupported):
        item = instruction(opcode, "d", "a", "b", "c")
        find(item, TABLE)
        Compiled([item], registers)
