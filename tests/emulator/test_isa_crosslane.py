"""Exchanges between lanes against the manual's definitions (PTX ISA 9.7.9.6 and 9.7.13)."""

from __future__ import annotations

import functools
import math
import operator
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.ptx.syntax import Integer, Pair, Register, Sink
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator.isa_rows import Compiled, lane_values, masks, signed
from tests.emulator.lane_rig import FULL, instruction

POISON = 0xBAD0BAD0
OLD = 0x01D01D01


def lanes_in(mask):
    return [lane for lane in range(LANES) if mask >> lane & 1]


def pair(d, p):
    return Pair(Register(d) if d else Sink(), Register(p) if p else Sink())


def shfl(mode, values, lane, b, c):
    """The manual's pseudo code for one lane: (source lane, predicate)."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    max_lane = lane & mask | cval & ~mask & 31
    min_lane = lane & mask
    j = {
        "up": lane - bval,
        "down": lane + bval,
        "bfly": lane ^ bval,
        "idx": min_lane | bval & ~mask & 31,
    }[mode]
    in_range = j >= max_lane if mode == "up" else j <= max_lane
    return (j if in_range else lane), in_range


# Operand c: whole warp, halves, quarters, odd clamps, and bits that do not count.
CLAMPS = [0x1F, 0, 0x101F, 0x1C03, 0x1800, 0x0A0B, 0x1E1F, 0xFFFFE0FF]
OFFSETS = [0, 1, 2, 5, 16, 31, 32, 33, 0xFFFFFFFF]


def check_shfl(mode, program, inputs, offsets, clamps, members, guard, mask):
    values = inputs["a"]
    taking_part = mask & guard
    after = program(inputs | {"d": [OLD] * LANES, "p": 0, "g": guard}, mask)
    for lane in range(LANES):
        if not taking_part >> lane & 1:
            assert after["d"][lane] == OLD
            assert not after["p"] >> lane & 1
            continue
        source, in_range = shfl(mode, values, lane, offsets[lane], clamps[lane])
        present = taking_part & members[lane] & 1 << source
        assert after["d"][lane] == (values[source] if present else POISON), (lane, source)
        assert after["p"] >> lane & 1 == in_range


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@given(data=st.data())
@settings(max_examples=25)
def test_shfl_with_constant_operands(mode, data):
    b, c = data.draw(st.sampled_from(OFFSETS)), data.draw(st.sampled_from(CLAMPS))
    members = data.draw(masks)
    program = Compiled(
        [
            instruction(
                f"shfl.sync.{mode}.b32",
                pair("d", "p"),
                "a",
                Integer(b),
                Integer(c),
                Integer(members),
                guard=Register("g"),
            )
        ],
        {"d": "b32", "a": "b32", "p": "pred", "g": "pred"},
    )
    guard, mask = data.draw(masks), data.draw(masks)
    inputs = {"a": data.draw(lane_values(32))}
    check_shfl(mode, program, inputs, [b] * LANES, [c] * LANES, [members] * LANES, guard, mask)


@functools.cache
def shfl_of_registers(mode):
    return Compiled(
        [
            instruction(
                f"shfl.sync.{mode}.b32", pair("d", "p"), "a", "b", "c", "m", guard=Register("g")
            )
        ],
        dict.fromkeys("dabcm", "b32") | {"p": "pred", "g": "pred"},
    )


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@given(data=st.data())
@settings(max_examples=25)
def test_shfl_with_register_operands(mode, data):
    """Every lane has its own offset, clamp and membermask."""
    draw = data.draw
    inputs = {"a": draw(lane_values(32)), "b": draw(lane_values(32)), "m": draw(lane_values(32))}
    inputs["c"] = draw(st.lists(st.sampled_from(CLAMPS), min_size=LANES, max_size=LANES))
    if draw(st.booleans()):
        inputs["m"] = [FULL] * LANES
    guard, mask = draw(masks), draw(masks)
    check_shfl(
        mode, shfl_of_registers(mode), inputs, inputs["b"], inputs["c"], inputs["m"], guard, mask
    )


def test_shfl_forms():
    """Without predicate; destination equal to the source; a butterfly sum over the warp."""
    steps = []
    for distance in (16, 8, 4, 2, 1):
        steps += [
            instruction(
                "shfl.sync.bfly.b32", "t", "x", Integer(distance), Integer(31), Integer(-1)
            ),
            instruction("add.u32", "x", "x", "t"),
        ]
    program = Compiled(
        [*steps, instruction("shfl.sync.idx.b32", "y", "y", Integer(7), Integer(31), Integer(-1))],
        dict.fromkeys("xyt", "b32"),
    )
    after = program({"x": range(LANES), "y": range(50, 50 + LANES)})
    assert set(after["x"]) == {sum(range(LANES))}
    assert set(after["y"]) == {57}


def member_masks(draw):
    """One mask for the warp, two halves that act apart, or anything."""
    kind = draw(st.sampled_from(["same", "halves", "any"]))
    if kind == "halves":
        return [0xFFFF] * 16 + [0xFFFF0000] * 16
    return [draw(masks)] * LANES if kind == "same" else draw(lane_values(32))


@functools.cache
def voting():
    guard = Register("g")
    modes = ["all", "any", "uni"]
    program = [instruction(f"vote.sync.{mode}.pred", mode, "q", "m", guard=guard) for mode in modes]
    program += [
        instruction("vote.sync.ballot.b32", "d", Register("q", True), "m", guard=guard),
        instruction("vote.sync.all.pred", "q", "q", "m"),
        instruction("activemask.b32", "active", guard=guard),
    ]
    registers = dict.fromkeys([*modes, "q", "g"], "pred") | dict.fromkeys(
        ["d", "m", "active"], "b32"
    )
    return Compiled(program, registers)


@given(data=st.data())
@settings(max_examples=40)
def test_votes(data):
    draw = data.draw
    q, guard, mask, members = draw(masks), draw(masks), draw(masks), member_masks(draw)
    zeros = {"all": 0, "any": 0, "uni": 0, "d": [0] * LANES, "active": [0] * LANES}
    after = voting()({"q": q, "g": guard, "m": members} | zeros, mask)
    taking_part = mask & guard
    for lane in range(LANES):
        votes = [bool(q >> other & 1) for other in lanes_in(taking_part & members[lane])]
        runs = bool(taking_part >> lane & 1)
        assert after["all"] >> lane & 1 == (runs and all(votes))
        assert after["any"] >> lane & 1 == (runs and any(votes))
        assert after["uni"] >> lane & 1 == (runs and len(set(votes)) <= 1)
        ballot = ~q & taking_part & members[lane] & FULL
        assert after["d"][lane] == (ballot if runs else 0)
        assert after["active"][lane] == (taking_part if runs else 0)
        if mask >> lane & 1:
            everyone = [bool(q >> other & 1) for other in lanes_in(mask & members[lane])]
            assert after["q"] >> lane & 1 == all(everyone)


@functools.cache
def matching(kind):
    guard = Register("g")
    program = [
        instruction(f"match.any.sync.{kind}", "some", "a", "m", guard=guard),
        instruction(f"match.all.sync.{kind}", pair("every", "p"), "a", "m", guard=guard),
    ]
    words = dict.fromkeys(["some", "every", "m"], "b32")
    return Compiled(program, words | {"a": kind, "p": "pred", "g": "pred"})


@pytest.mark.parametrize("kind", ["b32", "b64"])
@given(data=st.data())
@settings(max_examples=20)
def test_match(kind, data):
    draw = data.draw
    # 64-bit values that differ in one half only must not match.
    pool = [1, 2, 1 << 31] if kind == "b32" else [1, 1 << 32 | 1, 1 << 63]
    few = pool[: draw(st.integers(1, 3))]
    a = draw(st.lists(st.sampled_from(few), min_size=LANES, max_size=LANES))
    guard, mask, members = draw(masks), draw(masks), member_masks(draw)
    zeros = {"some": [0] * LANES, "every": [0] * LANES, "p": 0}
    after = matching(kind)({"a": a, "m": members, "g": guard} | zeros, mask)
    taking_part = mask & guard
    for lane in range(LANES):
        runs = bool(taking_part >> lane & 1)
        present = lanes_in(taking_part & members[lane])
        equal = sum(1 << other for other in present if a[other] == a[lane])
        same = equal == taking_part & members[lane]
        assert after["some"][lane] == (equal if runs else 0)
        assert after["every"][lane] == (equal if runs and same else 0)
        assert after["p"] >> lane & 1 == (runs and same)


def as_float(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def extreme_float(operation, magnitude, strict):
    """Minimum or maximum of float bits; +0 above -0, NaNs left out or, if strict, decisive."""

    def key(bits):
        return as_float(bits), math.copysign(1, as_float(bits))

    def meaning(values):
        values = [v & 0x7FFFFFFF if magnitude else v for v in values]
        numbers = [v for v in values if not math.isnan(as_float(v))]
        if not numbers or (strict and len(numbers) < len(values)):
            return 0x7FFFFFFF
        return (min if operation == "min" else max)(numbers, key=key)

    return meaning


REDUCTIONS = {
    "and.b32": lambda values: functools.reduce(operator.and_, values),
    "or.b32": lambda values: functools.reduce(operator.or_, values),
    "xor.b32": lambda values: functools.reduce(operator.xor, values),
    "add.u32": sum,
    "add.s32": sum,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda values: min(signed(v, 32) for v in values),
    "max.s32": lambda values: max(signed(v, 32) for v in values),
} | {
    f"{operation}{magnitude}{strict}.f32": extreme_float(operation, magnitude, strict)
    for operation in ("min", "max")
    for magnitude in ("", ".abs")
    for strict in ("", ".NaN")
}
FLOATS = [0, 0x80000000, 1, 0x80000001, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0x7F800000]
FLOATS += [0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF7FFFFF]


@functools.cache
def reducing(form):
    return Compiled(
        [instruction(f"redux.sync.{form}", "d", "a", "m", guard=Register("g"))],
        dict.fromkeys("dam", "b32") | {"g": "pred"},
    )


@pytest.mark.parametrize("form", REDUCTIONS)
@given(data=st.data())
@settings(max_examples=12)
def test_redux(form, data):
    draw = data.draw
    if form.endswith("f32"):
        pool = FLOATS[: draw(st.sampled_from([2, 9, len(FLOATS)]))]
        pool = pool if draw(st.integers(0, 3)) else FLOATS[9:14]
        a = draw(st.lists(st.sampled_from(pool), min_size=LANES, max_size=LANES))
    else:
        a = draw(lane_values(32))
    guard, mask, members = draw(masks), draw(masks), member_masks(draw)
    after = reducing(form)({"a": a, "m": members, "g": guard, "d": [OLD] * LANES}, mask)
    taking_part = mask & guard
    for lane in range(LANES):
        present = lanes_in(taking_part & members[lane])
        if not taking_part >> lane & 1:
            assert after["d"][lane] == OLD
        elif present:
            meant = REDUCTIONS[form]([a[other] for other in present])
            assert after["d"][lane] == meant % 2**32


@given(mask=masks, guard=masks, members=masks)
@settings(max_examples=40)
def test_elect(mask, guard, members):
    """One leader, the lowest lane that takes part; d is its number; d may be the sink."""
    program = Compiled(
        [
            instruction("elect.sync", pair("d", "p"), "m", guard=Register("g")),
            instruction("elect.sync", pair("", "q"), Integer(-1), guard=Register("g")),
        ],
        {"d": "b32", "m": "b32"} | dict.fromkeys("pqg", "pred"),
    )
    inputs = {"m": [members] * LANES, "g": guard, "d": [OLD] * LANES, "p": 0, "q": 0}
    after = program(inputs, mask)
    taking_part = lanes_in(mask & guard)
    named = lanes_in(mask & guard & members)
    if named:
        assert after["p"] == 1 << named[0]
        assert {after["d"][lane] for lane in taking_part} == {named[0]}
    assert after["q"] == (1 << taking_part[0] if taking_part else 0)
    idle = [after["d"][lane] for lane in range(LANES) if lane not in taking_part]
    assert set(idle) <= {OLD}


def test_sync_instructions_wait_for_diverged_lanes():
    """All of them converge; activemask asks who is there and must not wait."""
    names = [
        "shfl.sync",
        "vote.sync",
        "match.any.sync",
        "match.all.sync",
        "redux.sync",
        "elect.sync",
    ]
    assert all(row.converges for name in names for row in TABLE[name])
    assert not any(row.converges for row in TABLE["activemask"])


REFUSED = {
    "shfl.sync.idx.b64": "b64",
    "shfl.sync.left.b32": "left",
    "vote.sync.ballot.pred": "together",
    "vote.sync.any.b32": "together",
    "match.any.sync.u32": "u32",
    "redux.sync.add.b32": "together",
    "redux.sync.xor.u32": "together",
    "redux.sync.add.f32": "add",
    "redux.sync.min.abs.s32": "abs",
    "elect.sync.b32": "b32",
}


@pytest.mark.parametrize("opcode, reason", REFUSED.items())
def test_unknown_forms_are_refused(opcode, reason):
    with pytest.raises(Unsupported, match=reason):
        Compiled([instruction(opcode, "d", "a", "a", "a", "a")], dict.fromkeys("da", "b32"))
