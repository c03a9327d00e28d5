"""Moves, byte permutes and addresses (PTX ISA 9.7.9)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.ptx.syntax import FloatBits, Integer, Register, Sink, Symbol, Vector
from fa4.emulator.translate.layout import WINDOWS
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES
from tests.emulator.isa_rows import (
    Compiled,
    Row,
    check_corners,
    check_row,
    lane_values,
    masks,
    row_inputs,
)
from tests.emulator.lane_rig import FULL, instruction

MOVED = [f"{sign}{w}" for sign in "bus" for w in (16, 32, 64)] + ["f32", "f64"]
WINDOW = 0x7F_1234_0000_0000
SYMBOLS = {"%shared_window": WINDOW, "buffer": 0x4_0000, "weights": 0x1_2345_6000}


def registers_of(names):
    return tuple(Register(name) if name != "_" else Sink() for name in names)


def vector(*names):
    return Vector(registers_of(names))


# The manual's table of specialised permutes (9.7.9.7): for control 0 to 3, source bytes of result
# bytes 3, 2, 1, 0.
MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def permute(mode):
    def meaning(a, b, c):
        source = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
        if mode:
            return int.from_bytes(bytes(source[int(k)] for k in MODES[mode][c & 3]), "big")
        result = []
        for k in range(4):
            nibble = c >> (4 * k) & 15
            byte = source[nibble & 7]
            result.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(result), "little")

    suffix = f".{mode}" if mode else ""
    return Row(f"prmt.b32{suffix}", "b32", ("b32",) * 3, meaning)


ROWS = [Row(f"mov.{kind}", kind, (kind,), lambda a: a) for kind in MOVED] + [
    permute(mode) for mode in ("", *MODES)
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_corner_values(row):
    check_corners(row)


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@settings(max_examples=6)
def test_any_values_under_guard_and_mask(row, data):
    check_row(row, *data.draw(row_inputs(row)))


@given(data=st.data())
@settings(max_examples=20)
def test_prmt_with_constant_control(data):
    control = data.draw(st.integers(0, 0xFFFF) | st.sampled_from([0x3210, 0x7654, 0x5410, 0xFFFF]))
    a, b = data.draw(lane_values(32)), data.draw(lane_values(32))
    program = Compiled(
        [instruction("prmt.b32", "d", "a", "b", Integer(control))], dict.fromkeys("dab", "b32")
    )
    meaning = permute("").meaning
    wanted = [meaning(x, y, control) for x, y in zip(a, b, strict=True)]
    assert program({"a": a, "b": b})["d"] == wanted


@pytest.mark.parametrize("width, parts", [(16, 2), (32, 2), (32, 4), (64, 2), (64, 4)])
@given(data=st.data())
@settings(max_examples=6)
def test_pack_and_unpack(width, parts, data):
    """The first element is the lowest; under a guard, and with one element dropped."""
    part = width // parts
    whole, guard, mask = data.draw(lane_values(width)), data.draw(masks), data.draw(masks)
    elements = [data.draw(lane_values(part)) for _ in range(parts)]
    sources, targets = [[f"{n}{k}" for k in range(parts)] for n in "st"]
    program = Compiled(
        [
            instruction(f"mov.b{width}", vector("_", *targets[1:]), "w", guard=Register("g")),
            instruction(f"mov.b{width}", "d", vector(*sources), guard=Register("g")),
            instruction(f"mov.b{width}", "c", vector(*sources)),
            instruction(f"mov.b{width}", vector(*sources), "c"),
        ],
        dict.fromkeys("wdc", f"b{width}")
        | dict.fromkeys(sources + targets, f"b{part}")
        | {"g": "pred"},
    )
    zeros = {name: [0] * LANES for name in ["d", "c", *targets]}
    inputs = dict(zip(sources, elements, strict=True)) | zeros | {"w": whole, "g": guard}
    after = program(inputs, mask)
    for lane in range(LANES):
        runs = bool(mask & guard & 1 << lane)
        joined = sum(values[lane] << (part * k) for k, values in enumerate(elements))
        assert after["d"][lane] == (joined if runs else 0)
        assert after["c"][lane] == (joined if mask >> lane & 1 else 0)
        assert [after[name][lane] for name in sources] == [v[lane] for v in elements]
        for k, name in enumerate(targets):
            kept = whole[lane] >> (part * k) & (1 << part) - 1
            assert after[name][lane] == (kept if runs and k else 0)


@given(low=lane_values(64), high=lane_values(64), mask=masks)
@settings(max_examples=6)
def test_128_bit_registers(low, high, mask):
    """Packed and unpacked by halves and by quarters; sinks in between."""
    names = ["r0", "r1", "r2", "r3"]
    program = Compiled(
        [
            instruction("mov.b128", "q", vector("a", "b")),
            instruction("mov.b128", "r", "q"),
            instruction("mov.b128", vector(*names), "r"),
            instruction("mov.b128", vector("c", "e"), "r"),
            instruction("mov.b128", "s", vector(*names)),
            instruction("mov.b128", vector("_", "f"), "s"),
        ],
        dict.fromkeys("qrs", "b128") | dict.fromkeys("abcef", "b64") | dict.fromkeys(names, "b32"),
    )
    zeros = {name: [0] * LANES for name in [*names, *"cef"]}
    after = program({"a": low, "b": high} | zeros, mask)
    for lane in range(LANES):
        here = mask >> lane & 1
        words = [v >> at & 0xFFFFFFFF for v in (low[lane], high[lane]) for at in (0, 32)]
        assert [after[name][lane] for name in names] == [w * here for w in words]
        found = [after[name][lane] for name in "cef"]
        assert found == [low[lane] * here, high[lane] * here, high[lane] * here]


def test_swap_reads_before_it_writes():
    program = Compiled(
        [
            instruction("mov.b64", "w", vector("b", "a")),
            instruction("mov.b64", vector("a", "b"), "w"),
        ],
        {"a": "b32", "b": "b32", "w": "b64"},
    )
    after = program({"a": range(LANES), "b": range(100, 100 + LANES)})
    assert after["a"] == list(range(100, 100 + LANES))
    assert after["b"] == list(range(LANES))


def test_constants_symbols_and_special_registers():
    sources = {
        "i": ("b32", Integer(-2), 0xFFFFFFFE),
        "l": ("b64", Integer(-2), 0xFFFFFFFFFFFFFFFE),
        "h": ("b16", Integer(0x3C00), 0x3C00),
        "f": ("f32", FloatBits(0x3FC00000, 32), 0x3FC00000),
        "w": ("f64", FloatBits(0x3FF8000000000000, 64), 0x3FF8000000000000),
        "t": ("f32", FloatBits(0x3FF8000000000000, 64), 0x3FC00000),
        "s": ("u32", Symbol("buffer", 12), 0x4000C),
        "g": ("u64", Symbol("weights"), 0x1_2345_6000),
        "x": ("u32", Register("%tid.x"), 0x12345),
        "y": ("u16", Register("%tid.x"), 0x2345),
        "v": ("b64", Vector((Register("%tid.x"), FloatBits(0x3F800000, 32))), 0x3F80000000012345),
    }
    program = Compiled(
        [instruction(f"mov.{kind}", name, source) for name, (kind, source, _) in sources.items()],
        {name: kind for name, (kind, _, _) in sources.items()} | {"%tid.x": "u32"},
        SYMBOLS,
    )
    after = program({"%tid.x": [0x12345] * LANES})
    for name, (_, _, meant) in sources.items():
        assert set(after[name]) == {meant}, name


def test_predicates():
    program = Compiled(
        [
            instruction("mov.pred", "p", Integer(1)),
            instruction("mov.pred", "q", Integer(0)),
            instruction("mov.pred", "r", Integer(-1)),
            instruction("mov.pred", "s", Register("s", negated=True)),
        ],
        dict.fromkeys("pqrs", "pred"),
    )
    after = program({"p": 0, "q": FULL, "r": 0, "s": 0x1234}, mask=0xFFFF)
    assert after == {"p": 0xFFFF, "q": 0xFFFF0000, "r": 0xFFFF, "s": 0xFFFF & ~0x1234}


SHARED = ["shared", "shared::cta", "shared::cluster"]


@pytest.mark.parametrize("space", SHARED)
def test_cvta_of_shared_memory(space):
    offsets = [k * 0x1000 | k for k in range(LANES)]
    program = Compiled(
        [
            instruction(f"cvta.{space}.u64", "generic", "offset"),
            instruction(f"cvta.to.{space}.u64", "back", "generic"),
            instruction(f"cvta.{space}.u64", "variable", Symbol("buffer", 8)),
        ],
        dict.fromkeys(["generic", "offset", "back", "variable"], "b64"),
        SYMBOLS,
    )
    after = program({"offset": offsets})
    assert after["generic"] == [WINDOW + offset for offset in offsets]
    assert after["back"] == offsets
    assert set(after["variable"]) == {WINDOW + 0x4_0008}


@pytest.mark.parametrize("space", ["global", "const", "local", "param", "param::entry"])
@given(addresses=lane_values(64))
@settings(max_examples=3)
def test_cvta_of_other_memory_adds_what_32_bits_lack(space, addresses):
    program = Compiled(
        [
            instruction(f"cvta.{space}.u64", "generic", "a"),
            instruction(f"cvta.to.{space}.u64", "back", "generic"),
        ],
        dict.fromkeys(["generic", "a", "back"], "b64"),
        SYMBOLS,
    )
    addresses[:3] = [0, 0xFFFF_FFFF, 1 << 32]
    lacking = 0 if space == "global" else WINDOWS[space]
    whole = [address + lacking if address < 1 << 32 else address for address in addresses]
    after = program({"a": addresses})
    assert after["generic"] == after["back"] == whole


def test_isspacep():
    """Edges of the window, and of the own CTA's part of it."""
    edges = {
        0: (False, False),
        WINDOW - 1: (False, False),
        WINDOW: (True, True),
        WINDOW + 2**24 - 1: (True, True),
        WINDOW + 2**24: (False, True),
        WINDOW + 2**32 - 1: (False, True),
        WINDOW + 2**32: (False, False),
        2**64 - 1: (False, False),
    }
    spaces = [*SHARED, "global"]
    program = Compiled(
        [instruction(f"isspacep.{space}", space, "a") for space in spaces],
        {"a": "b64", "%cluster_ctarank": "b32"} | dict.fromkeys(spaces, "pred"),
        SYMBOLS,
    )
    after = program({"a": list(edges) * 4})
    for lane, (own, cluster) in enumerate([*edges.values()] * 4):
        bits = [after[space] >> lane & 1 for space in spaces]
        assert bits == [own, own, cluster, not cluster]


RANKED = [("mapa.shared::cluster.u32", "b32", 0), ("mapa.shared::cluster.u64", "b64", 0)]


@pytest.mark.parametrize("opcode, kind, base", [*RANKED, ("mapa.u64", "b64", WINDOW)])
def test_mapa_and_getctarank(opcode, kind, base):
    """mapa names a CTA, getctarank reads the name back, a second mapa replaces the name."""
    ranks = [lane % 16 for lane in range(LANES)]
    own = 3 << 24
    offsets = [lane * 7001 for lane in range(LANES)]
    get = opcode.replace("mapa", "getctarank")
    program = Compiled(
        [
            instruction(opcode, "there", "a", "rank"),
            instruction(get, "found", "there"),
            instruction(get, "own", "a"),
            instruction(opcode, "again", "there", Integer(5)),
        ],
        dict.fromkeys(["a", "there", "again"], kind)
        | dict.fromkeys(["rank", "found", "own"], "b32"),
        SYMBOLS,
    )
    inputs = {"a": [base + own + o for o in offsets], "rank": ranks}
    after = program(inputs)
    there = [base + (rank << 24 | o) for rank, o in zip(ranks, offsets, strict=True)]
    assert after["there"] == there
    assert after["found"] == ranks
    assert set(after["own"]) == {3}
    assert after["again"] == [base + (5 << 24 | o) for o in offsets]


def test_mapa_of_a_variable():
    program = Compiled(
        [instruction("mapa.shared::cluster.u32", "d", Symbol("buffer", 4), Integer(2))],
        {"d": "b32"},
        SYMBOLS,
    )
    assert set(program({})["d"]) == {0x0204_0004}


REFUSED = {
    "mov.f16": "f16",
    "mov.b8": "b8",
    "prmt.b32.f4f": "f4f",
    "cvta.shared.u32": "u32",
    "cvta.to.shared::gpu.u64": "shared::gpu",
    "isspacep.local": "local",
    "isspacep.const": "const",
    "mapa.u32": "32-bit generic",
    "mapa.shared::cta.u32": "shared::cta",
    "getctarank.u32": "32-bit generic",
}


@pytest.mark.parametrize("opcode, reason", REFUSED.items())
def test_unknown_forms_are_refused(opcode, reason):
    with pytest.raises(Unsupported, match=reason):
        Compiled([instruction(opcode, "d", "a", "a", "a")], dict.fromkeys("da", "b64"), SYMBOLS)


def test_moves_that_lose_bits_are_refused():
    with pytest.raises(Unsupported, match="the result 64"):
        Compiled([instruction("mov.b64", "d", "a")], {"d": "b32", "a": "b64"})
