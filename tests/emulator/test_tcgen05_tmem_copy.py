"""tcgen05.cp, tcgen05.shift and the allocator of tensor memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulatorError
from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.tmem import TmemAddress
from fa4.emulator.tcgen05.tmem_allocator import TmemAllocator
from fa4.emulator.tcgen05.tmem_copy import plan_copy, plan_shift
from tests.emulator.tcgen05_support import cute_layout, element_address

# Shape and multicast -> rows, bytes per row, and (rows, copies): lanes, from CUTLASS's copy traits
# (a layout of lanes: rows first, then copies).
COPIES = {
    ("128x256b", ""): (128, 32, (128, 1), (1, 0)),
    ("128x128b", ""): (128, 16, (128, 1), (1, 0)),
    ("4x256b", ""): (4, 32, (4, 1), (32, 0)),
    ("64x128b", "warpx2::02_13"): (64, 16, (64, 2), (1, 64)),
    ("64x128b", "warpx2::01_23"): (64, 16, ((32, 2), 2), ((1, 64), 32)),
    ("32x128b", "warpx4"): (32, 16, (32, 4), (1, 32)),
}
PLAIN = SmemDescriptor(4096, 2048, 128, 0, Swizzle.NONE)
SWIZZLED = SmemDescriptor(4096, 16, 1024, 0, Swizzle.B128)


def memories(cta_group: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random shared and tensor memories of a CTA group."""
    rng = np.random.default_rng(seed)
    smem = [rng.integers(0, 256, 32 * 1024, dtype=np.uint8) for _ in range(cta_group)]
    tmem = [rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32) for _ in range(cta_group)]
    return smem, tmem


@pytest.mark.parametrize(("shape", "multicast"), list(COPIES))
@pytest.mark.parametrize("desc", [PLAIN, SWIZZLED], ids=["plain", "swizzled"])
@pytest.mark.parametrize("cta_group", [1, 2])
def test_copy(shape: str, multicast: str, desc: SmemDescriptor, cta_group: int) -> None:
    smem, tmem = memories(cta_group)
    first_lane = 31 if shape == "4x256b" else 0
    plan = plan_copy(shape, multicast, "", cta_group, TmemAddress(first_lane, 40), desc)
    expected = [tensor.copy() for tensor in tmem]
    rows, row_bytes, lane_shape, lane_stride = COPIES[shape, multicast]
    lanes = cute_layout(lane_shape, lane_stride).reshape(-1, rows).T + first_lane
    for rank in range(cta_group):
        for row in range(rows):
            at = [element_address(desc, row, byte, 1, True) for byte in range(row_bytes)]
            words = smem[rank][at].view(np.uint32)
            for lane in lanes[row]:
                expected[rank][lane, 40 : 40 + row_bytes // 4] = words
    changed = [old != new for old, new in zip(tmem, expected, strict=True)]
    plan.execute(smem, tmem)
    for got, want in zip(tmem, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    for region in plan.tmem_writes:
        inside = np.zeros((128, 512), bool)
        columns = slice(region.first_column, region.first_column + region.columns)
        inside[region.lanes, columns] = True
        assert not (changed[region.cta_rank] & ~inside).any()
        assert inside.sum() == lanes.size * row_bytes // 4


@pytest.mark.parametrize(
    ("source_format", "element", "shift"),
    [("b8x16.b6x16_p32", Format.E2M3, 0), ("b8x16.b4x16_p64", Format.E2M1, 2)],
)
def test_decompression(source_format: str, element: Format, shift: int) -> None:
    smem, tmem = memories(1)
    plan_copy("128x256b", "", source_format, 1, TmemAddress(0, 0), PLAIN).execute(smem, tmem)
    for row in (0, 1, 77, 127):
        for k in range(32):
            unit = element_address(PLAIN, row, k // 16 * 16, 1, True)
            stream = int.from_bytes(smem[0][unit : unit + 16].tobytes(), "little")
            code = stream >> k % 16 * element.bits & ((1 << element.bits) - 1)
            assert int(tmem[0][row, k // 4]) >> 8 * (k % 4) & 0xFF == code << shift


@pytest.mark.parametrize("name", list(COPIES))
def test_the_plan_names_every_byte_read(name: tuple[str, str]) -> None:
    smem, tmem = memories(1)
    plan = plan_copy(*name, "", 1, TmemAddress(0, 0), SWIZZLED)
    read = plan.smem_reads[0]
    at = (read.addresses[:, None] + np.arange(read.unit_bytes)).ravel()
    only_read = np.zeros_like(smem[0])
    only_read[at] = smem[0][at]
    twin = [tmem[0].copy()]
    plan.execute(smem, tmem)
    plan.execute([only_read], twin)
    np.testing.assert_array_equal(tmem[0], twin[0])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("64x128b", "", "", TmemAddress(0, 0)), "multicast none"),
        (("128x256b", "warpx4", "", TmemAddress(0, 0)), "warpx4"),
        (("128x256b", "", "b8x16", TmemAddress(0, 0)), "decompress"),
        (("128x256b", "", "", TmemAddress(32, 0)), "lane 32"),
        (("4x256b", "", "", TmemAddress(32, 0)), "lane 32"),
        (("128x256b", "", "", TmemAddress(0, 505)), "column 511"),
    ],
)
def test_copies_refused(arguments: tuple[str, str, str, TmemAddress], why: str) -> None:
    shape, multicast, source_format, address = arguments
    with pytest.raises(TmemError, match=why):
        plan_copy(shape, multicast, source_format, 1, address, PLAIN)


@pytest.mark.parametrize("cta_group", [1, 2])
def test_shift(cta_group: int) -> None:
    smem, tmem = memories(cta_group)
    before = [tensor.copy() for tensor in tmem]
    plan = plan_shift(cta_group, TmemAddress(64, 100))
    plan.execute(smem, tmem)
    for old, new in zip(before, tmem, strict=True):
        for lane in range(128):
            source = lane + 1 if 64 <= lane < 95 else lane
            np.testing.assert_array_equal(new[lane, 100:108], old[source, 100:108])
        old[:, 100:108] = new[:, 100:108]
        np.testing.assert_array_equal(old, new)
    assert [region.columns for region in plan.tmem_writes] == [8] * cta_group
    assert plan.tmem_writes[0].lanes.tolist() == list(range(64, 95))
    assert plan.tmem_reads[0].lanes.tolist() == list(range(65, 96))


@pytest.mark.parametrize("address", [TmemAddress(16, 0), TmemAddress(0, 505)])
def test_shifts_refused(address: TmemAddress) -> None:
    with pytest.raises(TmemError):
        plan_shift(1, address)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_allocator_against_a_map_of_columns(steps: list[tuple[bool, int]]) -> None:
    allocator = TmemAllocator()
    columns: list[int | None] = [None] * 512  # which allocation each column belongs to
    held: list[tuple[int, int]] = []
    for allocate, choice in steps:
        if allocate:
            size = 32 << choice % 5
            free = [at for at in range(513 - size) if columns[at : at + size] == [None] * size]
            address = allocator.allocate(size)
            assert address == (free[0] if free else None)
            if address is not None:
                held.append((address, size))
                columns[address : address + size] = [address] * size
        elif held:
            address, size = held.pop(choice % len(held))
            allocator.free(address, size)
            columns[address : address + size] = [None] * size
        assert [allocator.owner_of(column) for column in range(512)] == columns
        assert allocator.allocations == dict(held)


def test_an_exact_gap_is_filled_and_a_full_memory_waits() -> None:
    allocator = TmemAllocator()
    assert [allocator.allocate(128) for _ in range(5)] == [0, 128, 256, 384, None]
    allocator.free(128, 128)
    assert allocator.allocate(256) is None
    assert allocator.allocate(128) == 128


@pytest.mark.parametrize("size", [0, 16, 31, 48, 96, 513, 1024, -32])
def test_allocation_sizes(size: int) -> None:
    with pytest.raises(TmemError, match="power of two"):
        TmemAllocator().allocate(size)


def test_wrong_frees() -> None:
    allocator = TmemAllocator()
    address = allocator.allocate(64)
    assert address == 0
    with pytest.raises(EmulatorError, match="64 were allocated"):
        allocator.free(address, 32)
    with pytest.raises(EmulatorError, match="nothing was allocated"):
        allocator.free(32, 32)
    allocator.free(address, 64)
    with pytest.raises(EmulatorError, match="nothing"):
        allocator.free(address, 64)
