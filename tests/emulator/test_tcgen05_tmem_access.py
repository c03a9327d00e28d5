"""tcgen05.ld and .st: cells against CUTLASS's copy traits, identities, packing, reductions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import TmemAddress, Words
from fa4.emulator.tcgen05.tmem_access import (
    access_map,
    load,
    names_own_lanes,
    pack16,
    reduce_registers,
    register_count,
    store,
    unpack16,
)
from tests.emulator.tcgen05_support import cute_layout

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
REGISTERS_OF_X1 = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
ACCESSES = [
    (shape, count)
    for shape, registers in REGISTERS_OF_X1.items()
    for count in COUNTS
    if registers * count <= 128
]


def traits_cells(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) relative to the address, (32, registers), from CUTLASS's layouts of bits.

    Each maps (thread, bits of its registers) to a bit of the accessed block, whose rows (lanes) are
    32 * columns bits long. 16x32bx2 is CUTLASS's special case: halves side by side.
    """
    n = count
    columns = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}[shape] * n
    row = 32 * columns
    threads, values = {
        "32x32b": ((32, row), (32 * n, 1)),
        "16x32bx2": (((16, 2), (row, 32 * n)), (32 * n, 1)),
        "16x64b": (((2, 2, 8), (8 * row, 32, row)), ((32, n), (1, 64))),
        "16x128b": (((4, 8), (32, row)), ((32, 2, n), (1, 8 * row, 128))),
        "16x256b": (((4, 8), (64, row)), ((64, 2, n), (1, 8 * row, 256))),
    }[shape]
    bits = cute_layout(*threads)[:, None] + cute_layout(*values)[None, ::32]
    return bits // row, bits % row // 32


@pytest.mark.parametrize(("shape", "count"), ACCESSES)
def test_cells_are_those_of_cutlass(shape: str, count: int) -> None:
    start = TmemAddress(lane=64, column=7)
    split = count if shape == "16x32bx2" else None
    cells = access_map(shape, count, 2, start.encode(), split)
    rows, columns = traits_cells(shape, count)
    assert register_count(shape, count) == rows.shape[1] == REGISTERS_OF_X1[shape] * count
    np.testing.assert_array_equal(cells.lanes, rows + 64)
    np.testing.assert_array_equal(cells.columns, columns + 7)


@pytest.mark.parametrize(("shape", "count"), ACCESSES)
@pytest.mark.parametrize("packed", [False, True])
def test_store_then_load_is_the_identity(shape: str, count: int, packed: bool) -> None:
    rng = np.random.default_rng(count)
    registers = REGISTERS_OF_X1[shape] * count
    split = 256 if shape == "16x32bx2" else None
    cells = access_map(shape, count, 3, TmemAddress(96, 0).encode(), split, packed)
    values = rng.integers(0, 1 << 32, (32, registers), dtype=np.uint32)
    tmem = rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    before = tmem.copy()
    store(tmem, cells, values, packed)
    np.testing.assert_array_equal(load(tmem, cells, packed), values)
    touched = set(zip(cells.lanes.ravel().tolist(), cells.columns.ravel().tolist(), strict=True))
    assert len(touched) == 32 * registers * (2 if packed else 1)  # no cell twice
    changed = np.argwhere(tmem != before)
    assert {(int(lane), int(column)) for lane, column in changed} <= touched


def test_packed_cells() -> None:
    """.16x256b.x1 with packing: 16 columns, register r of the plain map in columns 2c, 2c + 1."""
    tmem = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)
    plain = access_map("16x256b", 1, 0, 0)
    packed = access_map("16x256b", 1, 0, 0, packed=True)
    values = load(tmem, packed, packed=True)
    for thread in range(32):
        for register in range(4):
            lane, column = plain.lanes[thread, register], plain.columns[thread, register]
            low, high = tmem[lane, 2 * column], tmem[lane, 2 * column + 1]
            assert values[thread, register] == (int(low) & 0xFFFF) | (int(high) & 0xFFFF) << 16


def test_pack_and_unpack_are_inverse() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, (32, 8), dtype=np.uint32)
    halves = unpack16(values)
    assert halves.shape == (32, 16) and halves.max() <= 0xFFFF
    np.testing.assert_array_equal(pack16(halves), values)
    np.testing.assert_array_equal(pack16(halves | np.uint32(0xFFFF0000)), values)


@settings(max_examples=200)
@given(
    access=st.sampled_from(ACCESSES),
    warp=st.integers(0, 3),
    lane=st.integers(0, 0xFFFF),
    column=st.integers(0, 7),
)
def test_a_warp_reaches_its_own_lanes_whatever_the_quarter(access, warp, lane, column) -> None:
    shape, count = access
    split = count if shape == "16x32bx2" else None
    address, half = lane << 16 | column, 32 if shape == "32x32b" else 16
    assert names_own_lanes(warp, address) == (32 * warp <= lane < 32 * warp + 32)
    if lane % half:
        with pytest.raises(TmemError, match="must start at 0"):
            access_map(shape, count, warp, address, split)
        return
    own = TmemAddress(32 * warp + lane % 32, column)
    found, expected = (access_map(shape, count, warp, x, split) for x in (address, own.encode()))
    np.testing.assert_array_equal(found.lanes, expected.lanes)
    np.testing.assert_array_equal(found.columns, expected.columns)
    assert set((found.lanes // 32).ravel()) == {warp}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("32x32b", 3, 0, 0), "no .x3"),
        (("16x256b", 64, 0, 0), "no .x64"),
        (("16x128b", 128, 0, 0), "no .x128"),
        (("8x8b", 1, 0, 0), "does not exist"),
        (("32x32b", 32, 0, 481), "column 511"),
        (("16x32bx2", 8, 0, 0), "half-split"),
        (("32x32b", 8, 0, 0, 8), "half-split"),
        (("16x32bx2", 8, 0, 0, 505), "column 511"),
        (("16x32bx2", 8, 0, 0, -1), "negative"),
        (("32x32b", 1, 0, 8 << 16), "must start at 0"),
        (("32x32b", 1, 0, 512), "outside"),
        (("32x32b", 128, 0, 257, None, True), "column 511"),
    ],
)
def test_refused(arguments: tuple[object, ...], why: str) -> None:
    with pytest.raises(TmemError, match=why):
        access_map(*arguments)  # type: ignore[arg-type]


def test_the_last_column_is_reached() -> None:
    assert access_map("32x32b", 32, 0, 480).columns.max() == 511


def as_f32(values: np.ndarray) -> Words:
    """The words of float32 numbers."""
    return np.asarray(values, np.float32).view(np.uint32)


def reduced_f32(row: list[float], operation: str, absolute: bool, nan: bool) -> int:
    """The word that min.f32 or max.f32 over a list of numbers gives."""
    numbers = [abs(x) if absolute else x for x in row]
    kept = [x for x in numbers if not math.isnan(x)]
    if not kept or (nan and len(kept) < len(numbers)):
        return 0x7FFFFFFF
    # +0 is greater than -0.
    pick = min if operation == "min" else max
    best = pick(kept, key=lambda x: (x, math.copysign(1.0, x)))
    return int(np.float32(best).view(np.uint32))


special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 1.5, -1.5])


@settings(max_examples=60)
@given(
    st.lists(st.one_of(special, st.floats(width=32)), min_size=2, max_size=8),
    st.sampled_from(["min", "max"]),
    st.booleans(),
    st.booleans(),
)
def test_reduce_f32(row: list[float], operation: str, absolute: bool, nan: bool) -> None:
    got = reduce_registers(as_f32(np.array([row])), operation, "f32", absolute, nan)
    assert got.shape == (1,)
    assert int(got[0]) == reduced_f32(row, operation, absolute, nan)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=5), st.booleans(), st.booleans())
def test_reduce_integers(row: list[int], signed: bool, smallest: bool) -> None:
    words = np.array([row], np.uint32)
    numbers = [x - (x >> 31 << 32) if signed else x for x in row]
    expected = (min if smallest else max)(numbers) & 0xFFFFFFFF
    got = reduce_registers(words, "min" if smallest else "max", "s32" if signed else "u32")
    assert int(got[0]) == expected


@pytest.mark.parametrize(
    ("registers", "arguments"),
    [
        (1, ("min", "f32")),
        (2, ("add", "f32")),
        (2, ("min", "f16")),
        (2, ("min", "u32", True)),
        (2, ("max", "s32", False, True)),
    ],
)
def test_reductions_refused(registers: int, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TmemError):
        reduce_registers(np.zeros((32, registers), np.uint32), *arguments)  # type: ignore[arg-type]
