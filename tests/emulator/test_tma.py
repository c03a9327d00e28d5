"""TMA descriptors, address plans and swizzles against slow definitions.

The definitions below follow the manual's words one element at a time, with Python loops and the
manual's printed swizzle tables. Literal words and bit patterns were recorded from
the driver, from CuTe-DSL and on an H200.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.emulator.tma.descriptor import ELEMENT_BYTES, TensorMap, TensorMapError, TmaError
from fa4.emulator.tma.reduction import DTYPES
from fa4.emulator.tma.swizzle import PATTERNS, swizzle_addresses
from fa4.emulator.tma.transfer import (
    Transfer,
    check_bulk,
    plan_gather4,
    plan_scatter4,
    plan_tile,
)
from fa4.emulator.tma.values import convert_loaded, fill_pattern

ORIGIN = 1 << 20  # address of the first byte of MEMORY
MEMORY = np.random.default_rng(7).integers(0, 256, 1 << 16, dtype=np.uint8)
SMEM = np.random.default_rng(8).integers(0, 256, 1 << 15, dtype=np.uint8)
FEW = settings(max_examples=60)

SQUARE = TensorMap(
    address=ORIGIN,
    element="bf16",
    dims=(128, 40),
    strides_bytes=(256,),
    box=(64, 16),
    element_strides=(1, 1),
    swizzle=128,
)

# 16-byte cells of eight 128-byte lines, as PTX ISA 5.5.7 prints them: row = line, column = place in
# shared memory, digit = which cell of the line lies there. Shorter tables repeat.
PRINTED = {
    (0, 16): ["01234567"],
    (32, 16): ["01234567", "10325476"],
    (64, 16): ["01234567", "10325476", "23016745", "32107654"],
    (128, 16): [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    (128, 32): ["01234567", "23016745", "45670123", "67452301"],
    (128, 64): ["01234567", "45670123"],
}


# Definitions


def printed_place(address: int, swizzle: int, atom_bytes: int) -> int:
    """Where the manual's table puts the byte whose unswizzled shared address is `address`."""
    line, within = divmod(address, 128)
    table = PRINTED[swizzle, atom_bytes]
    cell = table[line % len(table)].index(str(within // 16))
    return line * 128 + cell * 16 + within % 16


def boxed_elements(tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int):
    """Yields (position in the tensor, shared address) of each element of the box, dim 0 fastest."""
    steps = (1, *tensor_map.element_strides[1:])
    ranges = [range(0, b, s) for b, s in zip(tensor_map.box, steps, strict=True)]
    row_bytes = tensor_map.box[0] * tensor_map.element_bytes
    pitch = max(row_bytes, tensor_map.swizzle)  # narrow rows keep the distance of the swizzle span
    for row, outer in enumerate(itertools.product(*reversed(ranges[1:]))):
        for inner in ranges[0]:
            offsets = (inner, *reversed(outer))
            position = tuple(c + o for c, o in zip(coordinates, offsets, strict=True))
            linear = smem_base + row * pitch + inner * tensor_map.element_bytes
            yield (
                position,
                printed_place(linear, tensor_map.swizzle, tensor_map.swizzle_atom_bytes),
            )


def in_tensor(tensor_map: TensorMap, position: tuple[int, ...]) -> bool:
    return all(0 <= p < d for p, d in zip(position, tensor_map.dims, strict=True))


def place_in_memory(tensor_map: TensorMap, position: tuple[int, ...]) -> int:
    strides = (tensor_map.element_bytes, *tensor_map.strides_bytes)
    return tensor_map.address + sum(p * s for p, s in zip(position, strides, strict=True)) - ORIGIN


def slow_load(tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int) -> np.ndarray:
    """Shared memory after the load."""
    smem, size = SMEM.copy(), tensor_map.element_bytes
    fill = {True: b"\xf7\x7f" * 4, False: bytes(8)}[tensor_map.fill_nan][:size]
    for position, address in boxed_elements(tensor_map, coordinates, smem_base):
        value = np.frombuffer(fill, np.uint8)
        if in_tensor(tensor_map, position):
            start = place_in_memory(tensor_map, position)
            value = MEMORY[start : start + size]
        smem[address : address + size] = value
    return smem


def slow_store(tensor_map: TensorMap, coordinates: tuple[int, ...], smem_base: int) -> np.ndarray:
    """Global memory after the store: a 16-byte chunk is written if its first element is inside."""
    memory, size = MEMORY.copy(), tensor_map.element_bytes
    for position, address in boxed_elements(tensor_map, coordinates, smem_base):
        first = position[0] - (position[0] - coordinates[0]) % (16 // size)
        if in_tensor(tensor_map, (first, *position[1:])):
            start = place_in_memory(tensor_map, position)
            memory[start : start + size] = SMEM[address : address + size]
    return memory


def run_load(plan: Transfer, tensor_map: TensorMap, memory: np.ndarray = MEMORY) -> np.ndarray:
    """Shared memory after the plan's units are moved."""
    smem, unit = SMEM.copy(), np.arange(plan.unit_bytes)
    places = plan.smem_addresses[:, None] + unit
    smem[places] = np.frombuffer(fill_pattern(tensor_map), np.uint8)[: plan.unit_bytes]
    smem[places[plan.valid]] = memory[plan.global_addresses[plan.valid, None] + unit - ORIGIN]
    return smem


def run_store(plan: Transfer, smem: np.ndarray = SMEM) -> np.ndarray:
    memory, unit = MEMORY.copy(), np.arange(plan.unit_bytes)
    valid = plan.valid
    memory[plan.global_addresses[valid, None] + unit - ORIGIN] = smem[
        plan.smem_addresses[valid, None] + unit
    ]
    return memory


@st.composite
def copies(draw, negative: bool = True, whole_chunks: bool = False):
    """A small map inside MEMORY, coordinates of a box near it, and a shared address."""
    rank = draw(st.integers(1, 5))
    element = draw(st.sampled_from(sorted(set(ELEMENT_BYTES) - {"tf32", "tf32_ftz"})))
    size = ELEMENT_BYTES[element]
    swizzle, atom_bytes = draw(st.sampled_from(sorted(PATTERNS)))
    chunk = 16 // size
    box = [chunk * draw(st.integers(1, (swizzle or 96) // 16))]
    dims = [draw(st.integers(1, 2 * box[0] + 3))]
    if whole_chunks:
        dims[0] = -(-dims[0] // chunk) * chunk
    strides, extent, rows = [], -(-dims[0] * size // 16) * 16, 1
    for _ in range(rank - 1):
        box.append(draw(st.integers(1, min(9, 24 // rows))))
        dims.append(draw(st.integers(1, 5)))
        rows *= box[-1]
        strides.append(extent + 16 * draw(st.integers(0, 2)))
        extent = strides[-1] * dims[-1]
    assume(extent < MEMORY.size - 256)
    steps = [1] + [draw(st.sampled_from([1, 1, 2, 3, 8])) for _ in box[1:]]
    tensor_map = TensorMap(
        address=ORIGIN + 16 * draw(st.integers(0, 9)),
        element=element,
        dims=tuple(dims),
        strides_bytes=tuple(strides),
        box=tuple(box),
        element_strides=tuple(steps),
        swizzle=swizzle,
        swizzle_atom_bytes=atom_bytes,
        fill_nan=element[0] in "fb" and draw(st.booleans()),
    )
    low = [-b - 1 if negative else 0 for b in box]
    coordinates = [
        draw(st.sampled_from([0, c])) if (c := draw(st.integers(lo, d + 1))) else 0
        for lo, d in zip(low, dims, strict=True)
    ]
    coordinates[0] = coordinates[0] // chunk * chunk
    return tensor_map, tuple(coordinates), 128 * draw(st.integers(0, 15))


# Descriptors

# (words 0 to 7, what they say)
KNOWN = [
    (
        "0x100000 0x1000006520 0x1000 0 0xff0000007f 0x3 0x3f00000000000000 0x7f",
        {"dims": (128, 256, 4), "strides_bytes": (256, 65536), "box": (64, 128, 1), "hints": 0},
    ),
    (
        "0x100000 0x1000046542 0x1000000010 0x1000 0xff0000007f 0 0x3f00000000000000 0x7f",
        {
            "dims": (128, 256, 1, 1, 1),
            "strides_bytes": (256, 256, 256, 65536),
            "box": (64, 128, 1, 1, 1),
            "hints": 0x40002,
        },
    ),
    (
        "0x100000 0x8000240392 0 0 0xff000001ff 0 0x1f00000000000000 0x7",
        {"element": "f32", "dims": (512, 256), "box": (32, 8), "swizzle": 0},
    ),
    ("0x100000 0x8000242392 0 0 0xff000001ff 0 0x700000000000000 0", {"swizzle": 32}),
    ("0x100000 0x8000244392 0 0 0xff000001ff 0 0xf00000000000000 0", {"swizzle": 64}),
    (
        "0x100000 0x80002c6392 0 0 0xff000001ff 0 0x1f00000000000000 0x7",
        {"swizzle": 128, "swizzle_atom_bytes": 32},
    ),
    (
        "0x100000 0x80003c6392 0 0 0xff000001ff 0 0x1f00000000000000 0x7",
        {"swizzle": 128, "swizzle_atom_bytes": 64},
    ),
    ("0x100000 0x8000256392 0 0 0xff000001ff 0 0x1f00000000000000 0x7", {"element": "tf32"}),
    ("0x100000 0x10000246492 0 0 0xff000001ff 0 0xf00000000000000 0x7", {"element": "f64"}),
    ("0x100000 0x2000246012 0 0 0xff000001ff 0 0x7f00000000000000 0x7", {"element": "u8"}),
    (  # from the driver: 4D, L2 promotion of 256 bytes
        "0x100000 0x800060330 0x100000000100 0 0x1f0000003f 0x70000000f 0x700000000000000 0x3",
        {"element": "f16", "dims": (64, 32, 16, 8), "strides_bytes": (128, 4096, 65536)},
    ),
]


def raw_map(words: str) -> bytes:
    return struct.pack("<8Q", *(int(w, 16) for w in words.split())) + bytes(64)


@pytest.mark.parametrize(("words", "fields"), KNOWN)
def test_known_words_decode_and_encode_back(words: str, fields: dict[str, object]) -> None:
    tensor_map = TensorMap.decode(raw_map(words))
    assert {name: getattr(tensor_map, name) for name in fields} == fields
    assert tensor_map.address == ORIGIN
    assert tensor_map.encode() == raw_map(words)


def test_driver_map_with_every_field_used() -> None:
    raw = bytes.fromhex(
        "805e9ef7fb09000020250000c49e2e4803000000000000000000000001000000"
        "015b6d5cffffffffffffffff00000000000000009401000784d4000000000000"
    )
    expected = TensorMap(
        address=10977795792512,
        element="bf16",
        dims=(1550670594, 1 << 32, 1 << 32),
        strides_bytes=(88095714368, 48),
        box=(8, 133, 213),
        element_strides=(5, 3, 7),
        swizzle=32,
        hints=0,
    )
    assert TensorMap.decode(raw + bytes(64)) == expected
    assert expected.encode() == raw + bytes(64)
    assert expected.counts == (8, 45, 31), "element strides divide the box, but not in dimension 0"


@FEW
@given(copies(), st.sampled_from([0, 2, 0x40002, 0x260002]))
def test_encode_decode_round_trip(copy, hints: int) -> None:
    tensor_map = replace(copy[0], hints=hints)
    raw = tensor_map.encode()
    assert len(raw) == 128
    assert TensorMap.decode(raw) == tensor_map
    assert TensorMap.decode(raw[:64] + bytes(range(64))) == tensor_map, "words 8 to 15 mean nothing"


def test_every_bit_of_a_map_is_read_or_must_be_zero() -> None:
    full = TensorMap(
        address=ORIGIN,
        element="f16",
        dims=(64, 3, 4, 5, 6),
        strides_bytes=(128, 384, 1536, 7680),
        box=(64, 2, 2, 2, 2),
        element_strides=(1, 1, 2, 1, 3),
        swizzle=128,
    )
    read = 0
    for bit in range(512):
        flipped = bytearray(full.encode())
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            tensor_map = TensorMap.decode(flipped)
        except TensorMapError:
            continue
        read += 1
        assert tensor_map != full
        assert tensor_map.encode() == flipped or tensor_map.rank < 5
    assert read > 300


@settings(max_examples=200)
@given(st.binary(min_size=128, max_size=128))
def test_decode_refuses_noise(noise: bytes) -> None:
    with pytest.raises(TensorMapError):
        TensorMap.decode(noise)


IM2COL = (
    "00001000000000003163000008000000000100000010000000000000000000003f0000001f0000000f000000"
    "0700000000000000000000003fffff01011f0000"
)

NONSENSE = [
    ({"address": ORIGIN + 8}, "address"),
    ({"address": 1 << 60}, "address"),
    ({"element": "f8"}, "element"),
    ({"dims": (0, 40)}, "dims"),
    ({"dims": (128, (1 << 32) + 1)}, "dims"),
    ({"strides_bytes": (264,)}, "strides_bytes"),
    ({"strides_bytes": (1 << 40,)}, "strides_bytes"),
    ({"strides_bytes": ()}, "strides_bytes"),
    ({"box": (64, 257)}, "box"),
    ({"box": (64, 0)}, "box"),
    ({"box": (64,)}, "box"),
    ({"box": (4, 16)}, "box inner bytes"),
    ({"box": (72, 16)}, "box inner bytes"),
    ({"swizzle": 64}, "box inner bytes"),
    ({"element_strides": (1, 9)}, "element_strides"),
    ({"element_strides": (1, 0)}, "element_strides"),
    ({"element_strides": (1, 1, 1)}, "element_strides"),
    ({"swizzle": 96}, "swizzle"),
    ({"swizzle_atom_bytes": -1}, "swizzle_atom_bytes"),
    ({"swizzle": 64, "box": (32, 16), "swizzle_atom_bytes": 32}, "swizzle_atom_bytes"),
    ({"interleave": 16}, "rank"),
    ({"interleave": 64}, "interleave"),
    ({"element": "u16", "fill_nan": True}, "element"),
    ({"hints": 1}, "hints"),
    (
        {"dims": (), "box": (), "element_strides": (), "strides_bytes": ()},
        "rank",
    ),
]


@pytest.mark.parametrize(("change", "field"), NONSENSE)
def test_nonsense_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(TensorMapError, match=f"TMA: {field} is ") as caught:
        replace(SQUARE, **change)
    assert caught.value.field == field
    assert str(caught.value.value) in str(caught.value)
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (bytes(128), "box inner bytes"),
        (bytes(64), "size"),
        (bytes.fromhex(IM2COL) + bytes(64), "mode"),
        (
            raw_map("0x100000 0x1000040712 0 0 0xff000001ff 0 0x7f00000000000000 0x7"),
            "element type",
        ),
        (
            raw_map("0x100000 0x8000346392 0 0 0xff000001ff 0 0x1f00000000000000 0x7"),
            "swizzle_atom",
        ),
        (
            raw_map("0x100000 0x8000256512 0 0 0xff000001ff 0 0x1f00000000000000 0x7"),
            "element type",
        ),
        (raw_map("0x100000 0x8000246352 0 0 0xff000001ff 0 0x1f00000000000000 0x7"), "rank"),
        (raw_map("0x100000 0x8000247b92 0 0 0xff000001ff 0 0x1f00000000000000 0x7"), "interleave"),
        (raw_map("0x100000 0x8001246392 0 0 0xff000001ff 0 0x1f00000000000000 0x7"), "word 1"),
    ],
    ids=[
        "zeros",
        "short",
        "im2col",
        "no type",
        "flip",
        "tf32 of bf16",
        "rank",
        "interleave",
        "bit 24",
    ],
)
def test_words_that_are_no_supported_map(raw: bytes, field: str) -> None:
    if field == "rank":
        raw = raw[:8] + bytes([raw[8] | 0x50]) + raw[9:]
    with pytest.raises(TensorMapError, match=f"TMA: {field}"):
        TensorMap.decode(raw)


# Swizzles


@pytest.mark.parametrize(("swizzle", "atom_bytes"), sorted(PATTERNS))
def test_swizzle_is_the_printed_table(swizzle: int, atom_bytes: int) -> None:
    addresses = np.arange(8192, dtype=np.int64)
    moved = swizzle_addresses(addresses, swizzle, atom_bytes)
    assert moved.tolist() == [printed_place(a, swizzle, atom_bytes) for a in addresses.tolist()]
    assert sorted(moved.tolist()) == addresses.tolist(), "a permutation"
    assert np.array_equal(swizzle_addresses(moved, swizzle, atom_bytes), addresses), "an involution"
    atoms = moved.reshape(-1, atom_bytes)
    assert (np.diff(atoms) == 1).all(), "bytes of an atom stay together"


def test_printed_tables_tell_the_modes_apart() -> None:
    places = {m: tuple(printed_place(a, *m) for a in range(0, 1024, 16)) for m in PRINTED}
    assert PRINTED.keys() == PATTERNS.keys()
    assert len(set(places.values())) == len(PRINTED)


# Transfers


@FEW
@given(copies())
def test_load_is_the_definition(copy) -> None:
    tensor_map, coordinates, smem_base = copy
    plan = plan_tile(tensor_map, coordinates, smem_base)
    assert plan.total_bytes == plan.unit_bytes * plan.valid.size == tensor_map.box_bytes
    assert (plan.smem_addresses % plan.unit_bytes == 0).all()
    assert (plan.global_addresses[plan.valid] % plan.unit_bytes == 0).all()
    assert np.array_equal(run_load(plan, tensor_map), slow_load(tensor_map, coordinates, smem_base))


@FEW
@given(copies(negative=False))
def test_store_is_the_definition(copy) -> None:
    tensor_map, coordinates, smem_base = copy
    plan = plan_tile(tensor_map, coordinates, smem_base, store=True)
    assert plan.unit_bytes == 16
    assert np.array_equal(run_store(plan), slow_store(tensor_map, coordinates, smem_base))


@FEW
@given(copies(negative=False, whole_chunks=True))
def test_store_then_load_is_the_identity_in_bounds(copy) -> None:
    tensor_map, coordinates, smem_base = copy
    plan = plan_tile(tensor_map, coordinates, smem_base)
    memory = run_store(plan_tile(tensor_map, coordinates, smem_base, store=True))
    back = run_load(plan, tensor_map, memory)
    places = plan.smem_addresses[plan.valid, None] + np.arange(plan.unit_bytes)
    assert np.array_equal(back[places], SMEM[places])


@pytest.mark.parametrize("coordinates", [(0, 0), (64, 24), (64, 32), (-64, 0), (0, -3), (128, 0)])
@pytest.mark.parametrize(
    "fault",
    [
        {"swizzle": 0},
        {"swizzle_atom_bytes": 32},
        {"box": (64, 15)},
        {"box": (56, 16)},
        {"element_strides": (1, 2)},
        {"strides_bytes": (272,)},
        {"address": ORIGIN + 16},
        {"dims": (127, 39)},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_comparison_catches_planted_faults(coordinates, fault: dict[str, object]) -> None:
    expected = slow_load(SQUARE, coordinates, 384)
    assert np.array_equal(run_load(plan_tile(SQUARE, coordinates, 384), SQUARE), expected)
    wrong = replace(SQUARE, **fault)
    got = run_load(plan_tile(wrong, coordinates, 384), wrong)
    nothing_read = not plan_tile(SQUARE, coordinates, 384).valid.any()
    only_zeros = nothing_read and "box" not in fault and "element_strides" not in fault
    ends_before_edge = "dims" in fault and coordinates in [(0, 0), (0, -3)]
    assert np.array_equal(got, expected) == (only_zeros or ends_before_edge)


def test_units_shrink_only_where_the_edge_cuts_a_chunk() -> None:
    units = {
        dims0: plan_tile(replace(SQUARE, dims=(dims0, 40)), (64, 0), 0).unit_bytes
        for dims0 in (64, 65, 66, 68, 72, 100, 127, 128, 129)
    }
    assert units == {64: 16, 65: 2, 66: 4, 68: 8, 72: 16, 100: 8, 127: 2, 128: 16, 129: 16}


def test_stores_reach_past_an_edge_that_cuts_a_chunk() -> None:
    """As an H200 does: 6 floats stored, 8 written."""
    row = TensorMap(ORIGIN, "f32", (6,), (), (8,), (1,))
    written = np.flatnonzero(run_store(plan_tile(row, (0,), 0, store=True)) != MEMORY)
    assert written.max() >= 24
    assert written.max() < 32


def test_narrow_rows_keep_the_distance_of_the_swizzle_span() -> None:
    """Recorded on an H200: 128-byte swizzle, rows of 32 bytes, 64-byte swizzle at address 128."""
    narrow = TensorMap(ORIGIN, "bf16", (64, 64), (128,), (16, 5), (1, 1), swizzle=128)
    places = plan_tile(narrow, (0, 0), 0).smem_addresses
    assert places.tolist() == [0, 16, 144, 128, 288, 304, 432, 416, 576, 592]
    thin = replace(narrow, box=(8, 9), swizzle=64)
    places = plan_tile(thin, (0, 0), 128).smem_addresses
    assert places.tolist() == [144, 208, 288, 352, 432, 496, 512, 576, 656]


def test_coordinates_far_outside_do_not_overflow() -> None:
    far = replace(SQUARE, dims=(128, 1 << 32), strides_bytes=((1 << 40) - 16,))
    for row in (-(1 << 31), (1 << 31) - 1):
        plan = plan_tile(far, (0, row), 0)
        assert not plan.valid.any() if row < 0 else plan.valid.all()
    assert not plan_tile(SQUARE, ((1 << 31) - 64, -(1 << 31)), 0).valid.any()


def test_arrays_shared_by_transfers_are_read_only() -> None:
    plan = plan_tile(SQUARE, (0, 0), 0)
    with pytest.raises(ValueError, match="read-only"):
        plan.valid[0] = False


@FEW
@given(
    st.sampled_from([(128, 64), (128, 24), (32, 16), (0, 80)]),
    st.integers(1, 20),
    st.lists(st.integers(-3, 9), min_size=4, max_size=4),
    st.integers(0, 9),
)
def test_gather4_is_four_rows(shape, dims0: int, rows: list[int], line: int) -> None:
    swizzle, inner = shape
    tensor_map = TensorMap(
        ORIGIN, "u16", (dims0 * 8 - 3, 7), (512,), (inner, 1), (1, 1), swizzle=swizzle
    )
    column, smem_base = 8 * (line - 2), 128 * line
    # In shared memory the four rows lie like a box of four rows.
    expected = SMEM.copy()
    box = replace(tensor_map, box=(inner, 4))
    for position, address in boxed_elements(box, (column, 0), smem_base):
        source = (position[0], rows[position[1]])
        start = place_in_memory(tensor_map, source)
        inside = in_tensor(tensor_map, source)
        expected[address : address + 2] = MEMORY[start : start + 2] if inside else 0
    plan = plan_gather4(tensor_map, (column, *rows), smem_base)
    assert plan.total_bytes == 4 * tensor_map.box_bytes
    assert np.array_equal(run_load(plan, tensor_map), expected)


def test_scatter4_writes_each_row_where_gather4_reads_it() -> None:
    rows = replace(SQUARE, box=(64, 1))
    memory = run_store(plan_scatter4(rows, (64, 30, 2, 39, 40), 256))
    back = run_load(plan_gather4(rows, (64, 30, 2, 39, 40), 256), rows, memory)
    assert np.array_equal(back[256 : 256 + 384], SMEM[256 : 256 + 384])
    assert not back[256 + 384 : 256 + 512].any(), "row 40 is outside"
    lines = {int(i) // 256 for i in np.flatnonzero(memory != MEMORY)}
    assert lines == {2, 30, 39}


TALL = replace(SQUARE, box=(64, 1))
BLOCKS = TensorMap(ORIGIN, "u16", (8, 8, 8), (16, 128), (8, 2, 2), (1, 1, 1), interleave=16)


@pytest.mark.parametrize(
    ("plan", "arguments", "field"),
    [
        (plan_tile, (SQUARE, (0, 0, 0), 0), "number of coordinates"),
        (plan_tile, (SQUARE, (3, 0), 0), "coordinate 0"),
        (plan_tile, (SQUARE, (-4, 0), 0), "coordinate 0"),
        (plan_tile, (SQUARE, (0, -1), 0, True), "coordinates"),
        (plan_tile, (SQUARE, (0, 0), 64), "shared address"),
        (plan_tile, (BLOCKS, (0, 0, 0), 0), "interleave"),
        (plan_gather4, (TALL, (0, 1, 2, 3), 0), "number of coordinates"),
        (plan_gather4, (SQUARE, (0, 1, 2, 3, 4), 0), "box"),
        (plan_gather4, (TALL, (4, 1, 2, 3, 4), 0), "coordinate 0"),
        (plan_scatter4, (TALL, (0, 1, 2, 3, -4), 0), "coordinates"),
        (check_bulk, (24, 32), "bulk copy address"),
        (check_bulk, (32, 24), "bulk copy size"),
        (check_bulk, (32, -16), "bulk copy size"),
    ],
)
def test_operands_that_the_hardware_refuses(plan, arguments, field: str) -> None:
    with pytest.raises(TmaError, match=f"TMA: {field} is "):
        plan(*arguments)


def test_bulk_operands_in_multiples_of_16() -> None:
    for address, size_bytes in [(0, 0), (16, 4096), (1 << 40, 16)]:
        check_bulk(address, size_bytes)


# Values


@pytest.mark.parametrize("element", sorted(ELEMENT_BYTES))
def test_fill_is_zero_or_nan(element: str) -> None:
    row = TensorMap(ORIGIN, element, (64,), (), (16,), (1,))
    assert fill_pattern(row) == bytes(16)
    if element[0] in "us":
        return
    kind = DTYPES.get(element, np.float32)
    nan = np.frombuffer(fill_pattern(replace(row, fill_nan=True)), kind)
    assert np.isnan(nan.astype(np.float64)).all()
    assert nan.tobytes() == b"\xf7\x7f" * 8


# f32 bits in global memory -> what an H200 writes to shared memory for a tf32 map
TF32 = {
    0x00000001: 0x00000000,
    0x007FFFFF: 0x00800000,
    0x80000001: 0x80000000,
    0x7F7FFFFF: 0x7F800000,
    0xFF800000: 0xFF800000,
    0x7F800001: 0x7FFFE000,
    0xFFC00123: 0x7FFFE000,
    0xFFFFFFFF: 0x7FFFE000,
    0x3F801000: 0x3F800000,
    0x3F801001: 0x3F802000,
    0x3F802FFF: 0x3F802000,
    0x807FF000: 0x80800000,
}


def test_tf32_loads_round_and_others_copy() -> None:
    data = np.resize(np.array(list(TF32), np.uint32), 16).view(np.uint8).reshape(8, 8)
    wanted = np.resize(np.array(list(TF32.values()), np.uint32), 16)
    for element in ("tf32", "tf32_ftz"):
        row = TensorMap(ORIGIN, element, (64,), (), (16,), (1,))
        assert convert_loaded(row, data).reshape(-1).view(np.uint32).tolist() == wanted.tolist()
    for element in ("f32", "f32_ftz", "u32"):
        assert convert_loaded(TensorMap(ORIGIN, element, (64,), (), (16,), (1,)), data) is data
