"""Operand addresses: against CuTe's layouts and compiled descriptors, TMA boxes, and a formula."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.operands import Major, operand_addresses, unit_addresses
from tests.emulator.tcgen05_support import (
    ROW_BYTES,
    SWIZZLE_BITS,
    cute_layout,
    cute_swizzle,
    element_address,
)

# CuTe-DSL 4.8.1 on sm_100a: bytes per element, major-ness, the layout ((rows, k), 1, 4 k-blocks) in
# elements that tile_to_mma_shape gives, and what its compiler adds to the start address (in units
# of 16 bytes) for the first and each later k-block.
CUTE = {
    "K 128B": (
        2,
        Major.K,
        ((128, 16), 1, 4),
        ((64, 1), 0, 16),
        4611756662049538048,
        (0, 2, 4, 6),
    ),
    "K 64B": (
        2,
        Major.K,
        ((128, 16), 1, (2, 2)),
        ((32, 1), 0, (16, 4096)),
        -9223301530671579136,
        (0, 2, 512, 514),
    ),
    "K none": (
        2,
        Major.K,
        ((128, (8, 2)), 1, 4),
        ((8, (1, 1024)), 0, 2048),
        70403112304640,
        (0, 256, 512, 768),
    ),
    "MN 128B": (
        2,
        Major.MN,
        (((64, 2), (8, 2)), 1, 4),
        (((1, 512), (64, 1024)), 0, 2048),
        4611756936931573760,
        (0, 256, 512, 768),
    ),
    "MN 64B": (
        2,
        Major.MN,
        (((32, 4), (8, 2)), 1, 4),
        (((1, 256), (32, 1024)), 0, 2048),
        -9223301118352687104,
        (0, 256, 512, 768),
    ),
    "MN none": (
        2,
        Major.MN,
        (((8, 16), (8, 2)), 1, 4),
        (((1, 64), (8, 1024)), 0, 2048),
        70403112304640,
        (0, 256, 512, 768),
    ),
    "MN 128B, 8 bits, M=128": (
        1,
        Major.MN,
        ((128, 32), 1, 4),
        ((1, 128), 0, 4096),
        4611756662049472512,
        (0, 256, 512, 768),
    ),
    "MN 128B, 8 bits, N=256": (
        1,
        Major.MN,
        (((128, 2), (8, 4)), 1, 4),
        (((1, 1024), (128, 2048)), 0, 8192),
        4611756936931573760,
        (0, 512, 1024, 1536),
    ),
    "MN 128B 32B atom, tf32": (
        4,
        Major.MN,
        (((32, 4), 8), 1, 4),
        (((1, 256), 32), 0, 1024),
        2305913515401019392,
        (0, 256, 512, 768),
    ),
    "MN 128B, N=64 of a pair": (
        2,
        Major.MN,
        ((64, 16), 1, 4),
        ((1, 64), 0, 1024),
        4611756662049472512,
        (0, 128, 256, 384),
    ),
}


@pytest.mark.parametrize("name", CUTE)
@pytest.mark.parametrize("base", [0, 0x8000, 0x1FC00])
def test_addresses_are_cutes(name: str, base: int) -> None:
    element_bytes, major, shape, stride, constant, steps = CUTE[name]
    rows_k: Any = shape[0]
    rows = int(np.prod(np.hstack([rows_k[0]])))
    k = int(np.prod(np.hstack([rows_k[1]])))
    assert k * element_bytes == 32
    offsets = cute_layout(shape, stride).reshape(4, k, rows)  # colexicographic: rows run fastest
    for block, step in enumerate(steps):
        desc = SmemDescriptor.decode(constant + step + (base >> 4))
        swizzle = SWIZZLE_BITS[desc.swizzle]
        expected = [
            [cute_swizzle(*swizzle, base + int(at) * element_bytes) for at in row]
            for row in offsets[block].T
        ]
        got = operand_addresses(desc, rows, k, element_bytes, major)
        np.testing.assert_array_equal(got, expected)


def test_the_comparison_with_cute_sees_a_wrong_swizzle() -> None:
    element_bytes, major, shape, stride, constant, _ = CUTE["K 128B"]
    desc = SmemDescriptor.decode(constant)
    wrong = SmemDescriptor(0, desc.leading_byte_offset, desc.stride_byte_offset, 0, Swizzle.B64)
    offsets = cute_layout(shape, stride).reshape(4, 16, 128)[0].T * element_bytes
    expected = [[cute_swizzle(3, 4, 3, int(at)) for at in row] for row in offsets]
    np.testing.assert_array_equal(operand_addresses(desc, 128, 16, 2, major), expected)
    assert (operand_addresses(wrong, 128, 16, 2, major) != expected).any()


def _tma_box(inner_bytes: int, rows: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory with a box (rows, inner_bytes) as TMA writes it with 128B swizzling."""
    box = np.random.default_rng(rows).integers(0, 256, (rows, inner_bytes), dtype=np.uint8)
    smem = np.zeros(base + rows * inner_bytes, np.uint8)
    for row, chunk in itertools.product(range(rows), range(inner_bytes // 16)):
        at = base + row * inner_bytes + (chunk ^ row % 8) * 16
        smem[at : at + 16] = box[row, chunk * 16 : chunk * 16 + 16]
    return box, smem


@pytest.mark.parametrize("k_block", [0, 1, 2, 3])
def test_k_major_reads_a_tma_box(k_block: int) -> None:
    base = 5 * 1024
    box, smem = _tma_box(128, 128, base)
    desc = SmemDescriptor(base + 32 * k_block, 16, 1024, 0, Swizzle.B128)
    at = operand_addresses(desc, 128, 16, 2, Major.K)
    values = smem[at].astype(np.uint16) | smem[at + 1].astype(np.uint16) << 8
    expected = box.view(np.uint16)[:, 16 * k_block : 16 * k_block + 16]
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("k_block", [0, 1, 3])
def test_mn_major_reads_tma_boxes(k_block: int) -> None:
    # Two boxes side by side: M 0-63 and M 64-127, each 64 rows of K.
    base, box_bytes = 3 * 1024, 64 * 128
    boxes = [_tma_box(128, 64, 0) for _ in range(2)]
    smem = np.concatenate([np.zeros(base, np.uint8), *(memory for _, memory in boxes)])
    desc = SmemDescriptor(base + k_block * 2048, box_bytes, 1024, 0, Swizzle.B128)
    at = operand_addresses(desc, 128, 16, 2, Major.MN)
    values = smem[at].astype(np.uint16) | smem[at + 1].astype(np.uint16) << 8
    whole = np.hstack([box.view(np.uint16) for box, _ in boxes])  # (K, M)
    np.testing.assert_array_equal(values, whole[16 * k_block : 16 * k_block + 16].T)


@st.composite
def operands(draw: st.DrawFn) -> tuple[SmemDescriptor, int, int, Major]:
    major = draw(st.sampled_from(Major))
    modes = [s for s in Swizzle if major is Major.MN or s is not Swizzle.B128_BASE32]
    desc = SmemDescriptor(
        start_address=16 * draw(st.integers(0, 0x3FFF)),
        leading_byte_offset=16 * draw(st.integers(0, 0x3FF)),
        stride_byte_offset=16 * draw(st.integers(0, 0x3FF)),
        base_offset=0,
        swizzle=draw(st.sampled_from(modes)),
    )
    return desc, 8 * draw(st.integers(1, 16)), draw(st.sampled_from((1, 2, 4))), major


@settings(max_examples=30)
@given(operands())
def test_addresses_by_element(case: tuple[SmemDescriptor, int, int, Major]) -> None:
    desc, rows, element_bytes, major = case
    if major is Major.MN:
        rows = max(rows // (16 // element_bytes), 1) * (16 // element_bytes)
    k = 32 // element_bytes
    got = operand_addresses(desc, rows, k, element_bytes, major)
    expected = [
        [element_address(desc, row, i, element_bytes, major is Major.K) for i in range(k)]
        for row in range(rows)
    ]
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=30)
@given(
    st.sampled_from([s for s in Swizzle if s is not Swizzle.NONE]),
    st.integers(0, 7),
    st.integers(0, 63),
)
def test_base_offset_moves_the_pattern(swizzle: Swizzle, rows_late: int, kibibyte: int) -> None:
    """A matrix that starts some 128-byte rows after a boundary looks as if it started on it."""
    major = Major.MN if swizzle is Swizzle.B128_BASE32 else Major.K
    aligned = SmemDescriptor(kibibyte * 1024, 512, 1024, 0, swizzle)
    late = SmemDescriptor(kibibyte * 1024 + 128 * rows_late, 512, 1024, rows_late, swizzle)
    at_boundary = operand_addresses(aligned, 64, 8, 4, major) - aligned.start_address
    moved = operand_addresses(late, 64, 8, 4, major) - late.start_address
    np.testing.assert_array_equal(moved, at_boundary)


@pytest.mark.parametrize("swizzle", list(Swizzle))
def test_units_stay_whole_and_apart(swizzle: Swizzle) -> None:
    """Swizzling permutes the 16-byte units of the atoms and loses none."""
    width = ROW_BYTES[swizzle]
    atom = width * swizzle.rows_per_atom
    desc = SmemDescriptor(2048, atom, atom, 0, swizzle)
    units = unit_addresses(desc, width // 4, 8, 4, Major.MN)
    assert (units % 16 == 0).all()
    span = 8 * width
    np.testing.assert_array_equal(np.sort(units.ravel()), np.arange(2048, 2048 + span, 16))


@pytest.mark.parametrize(
    ("swizzle", "rows", "k", "element_bytes", "major", "why"),
    [
        (Swizzle.B128_BASE32, 8, 8, 4, Major.K, "MN-major"),
        (Swizzle.B32, 8, 32, 2, Major.K, "wider"),
        (Swizzle.NONE, 8, 32, 1, Major.MN, "multiple of 16"),
        (Swizzle.NONE, 8, 9, 1, Major.K, "multiple of 16"),
    ],
)
def test_refused(
    swizzle: Swizzle, rows: int, k: int, element_bytes: int, major: Major, why: str
) -> None:
    with pytest.raises(DescriptorError, match=why):
        unit_addresses(SmemDescriptor(0, 128, 128, 0, swizzle), rows, k, element_bytes, major)
